"""serve-local on the real engine: log-probabilities and densities against the plain model."""

import pytest
import torch
from serving_client import PROMPT, chat, complete

from twellctl.bundle.twell_model import gated_ffns
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

COUNT = 12


@pytest.fixture(scope="module")
def plain(relu_llama, reference, tokenizer):
    """The prompt's greedy tokens, their log-probabilities `[COUNT, vocabulary]` and densities
    `[COUNT, layers]`, from one forward pass of a second copy of the model."""
    model = load_model(open_checkpoint(relu_llama))
    prompt = tokenizer.encode(PROMPT)
    tokens = reference(prompt, COUNT)
    fired: list[torch.Tensor] = []
    for ffn in gated_ffns(model):
        ffn.act_fn.register_forward_hook(
            lambda *call: fired.append((call[-1] > 0).float().mean(-1))
        )
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    densities = torch.stack([shares[0, len(prompt) - 1 :] for shares in fired], -1)
    return tokens, logits.float().log_softmax(-1), densities


def test_logprobs_are_those_of_the_model(client, plain, tokenizer):
    tokens, logprobs, _ = plain
    told = complete(client, max_tokens=COUNT, logprobs=4).choices[0].logprobs
    expected = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert told.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    for best, row in zip(told.top_logprobs, logprobs, strict=True):
        assert sorted(best.values()) == pytest.approx(sorted(row.topk(4).values.tolist()), abs=1e-4)


def test_the_temperature_leaves_them_alone(client, plain, tokenizer):
    tokens, logprobs, _ = plain
    options = {"max_tokens": COUNT, "temperature": 2, "seed": 3, "logprobs": 0}
    told = complete(client, prompt=PROMPT, extra_body={"top_k": 1}, **options).choices[0].logprobs
    expected = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert told.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


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


def test_densities_are_those_of_the_model(client, plain):
    told = []
    for chunk in complete(
        client, max_tokens=COUNT, stream=True, extra_body={"twell_densities": True}
    ):
        told += chunk.model_extra.get("twell", {}).get("densities", [])
    _, _, densities = plain
    assert torch.tensor(told) == pytest.approx(densities, abs=1e-5)
    assert 0.05 < densities.mean() < 0.95
