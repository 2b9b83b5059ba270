"""serve-local on the real engine: echoed prompts are scored, twenty alternatives told.

That its log-probabilities and densities are the model's is in decoding/test_hf_decoder.py.
"""

import pytest
import torch
from serving_client import PROMPT, chat, complete

from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echoed_prompt_is_scored(client, relu_llama, tokenizer, max_tokens):
    """As lm-evaluation-harness scores: by the prompt's own log-probabilities, in one request."""
    end = tokenizer.eos_token_id
    first, second = [end, *tokenizer.encode(PROMPT), end, 7], [5]
    options = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = complete(client, prompt=[first, second], stop=tokenizer.decode(first[1:3]), **options)
    assert answer.usage.prompt_tokens == len(first) + 1
    assert answer.usage.completion_tokens <= 2 * max_tokens
    model = load_model(open_checkpoint(relu_llama))
    for prompt, choice in zip((first, second), answer.choices, strict=True):
        told = choice.logprobs
        assert choice.text.startswith(tokenizer.decode(prompt, skip_special_tokens=True))
        assert "".join(told.tokens[: len(prompt)]) == tokenizer.decode(prompt)
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        expected = logprobs[:-1].gather(-1, torch.tensor(prompt[1:], dtype=int)[:, None])[:, 0]
        mine = told.token_logprobs[1 : len(prompt)]
        assert mine == pytest.approx(expected.tolist(), abs=1e-4)
        best = [max(top.values()) for top in told.top_logprobs[1 : len(prompt)]]
        assert best == pytest.approx(logprobs[:-1].max(-1).values.tolist(), abs=1e-4)
    (one,) = complete(client, prompt=first, **options).choices
    streamed = complete(client, prompt=first, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.text


def test_chat_tells_twenty_alternatives(client):
    content = chat(client, logprobs=True, top_logprobs=20).choices[0].logprobs.content
    for entry in content:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert values[0] == entry.logprob  # greedy
