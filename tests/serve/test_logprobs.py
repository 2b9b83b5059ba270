"""serve-local: log-probabilities and densities of each token, whole and streamed."""

import math

import pytest
import torch
from serving_client import PROMPT, UNDECODED, Scripted, chat, complete, serving

from twellctl.decoding.engine import Token
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.serving.logprobs import TokenSpelling

TEXT, END = "for x in [é, 日本]:\n    print(x)", "<|endoftext|>"


class Certain(Scripted):
    """Some tokens had no chance at all, some were the only one."""

    def logprob(self, token):
        return -math.inf


@pytest.fixture
def spoken(tokenizer):
    """An engine that says TEXT and ends it, and a client before it."""
    engine = Scripted([*tokenizer.encode(TEXT), 0])
    with serving(tokenizer, engine) as client:
        yield engine, client


def spelled(content) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in content)


def whole_chat(client, **options):
    return chat(client, max_tokens=100, logprobs=True, **options).choices[0].logprobs.content


def test_chat_returns_every_token(spoken, tokenizer):
    engine, client = spoken
    content = whole_chat(client, top_logprobs=3)
    assert engine.samplings[-1].top_logprobs == 3
    assert spelled(content).decode() == TEXT + END
    assert [entry.logprob for entry in content] == [engine.logprob(t) for t in engine.tokens]
    for token, entry in zip(engine.tokens, content, strict=True):
        best = entry.top_logprobs
        assert [other.logprob for other in best] == [entry.logprob - i / 2 for i in range(3)]
        assert (best[0].token, best[0].bytes) == (entry.token, entry.bytes)
        other = tokenizer.decode([(token + 1) % 512])
        if UNDECODED not in other:
            assert (best[1].token, bytes(best[1].bytes).decode()) == (other, other)


def test_parts_of_a_character_are_returned_as_bytes(spoken, tokenizer):
    _, client = spoken
    content = whole_chat(client)
    parts = [entry for entry in content if entry.token.startswith("\\x")]
    assert all(entry.top_logprobs == [] for entry in content)
    assert parts
    for entry in parts:
        assert entry.token == "".join(f"\\x{byte:02x}" for byte in entry.bytes)
    logprobs = complete(client, max_tokens=100, logprobs=0).choices[0].logprobs
    for entry, name in zip(content, logprobs.tokens, strict=True):
        assert name == (f"bytes:{entry.token}" if entry in parts else entry.token)


def test_completion_returns_every_token(spoken):
    engine, client = spoken
    found = complete(client, max_tokens=100, logprobs=2).choices[0].logprobs
    assert engine.samplings[-1].top_logprobs == 2
    assert found.token_logprobs == [engine.logprob(token) for token in engine.tokens]
    assert [len(best) for best in found.top_logprobs] == [2] * len(engine.tokens)
    for name, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[name] == logprob
    for name, offset in zip(found.tokens, found.text_offset, strict=True):
        if not name.startswith("bytes:"):
            assert (TEXT + END)[offset : offset + len(name)] == name
    assert found.text_offset[0] == 0
    assert sorted(found.text_offset) == found.text_offset


def test_logprobs_0_returns_the_chosen_token_alone(spoken):
    _, client = spoken
    found = complete(client, max_tokens=100, logprobs=0).choices[0].logprobs
    pairs = zip(found.tokens, found.token_logprobs, strict=True)
    assert found.top_logprobs == [{name: logprob} for name, logprob in pairs]


@pytest.mark.parametrize("stop", [None, "日本", "in [é"])
def test_streamed_chat_returns_the_same(spoken, stop):
    _, client = spoken
    whole = chat(client, max_tokens=100, logprobs=True, top_logprobs=2, stop=stop).choices[0]
    text, content = "", []
    options = {"max_tokens": 100, "logprobs": True, "top_logprobs": 2, "stop": stop}
    for chunk in chat(client, stream=True, **options):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        content += choice.logprobs.content if choice.logprobs else []
    assert text == whole.message.content
    assert content == whole.logprobs.content
    assert spelled(content).startswith(text.encode())
    assert spelled(content).decode().endswith(stop or END)
    assert text == TEXT.partition(stop or "never")[0]


@pytest.mark.parametrize("stop", [None, "日本", "in [é"])
def test_streamed_completion_returns_the_same(spoken, stop):
    _, client = spoken
    options = {"max_tokens": 100, "logprobs": 3, "stop": stop}
    whole = complete(client, **options).choices[0]
    text = ""
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in complete(client, stream=True, **options):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                found[name] += values
        assert all(offset <= len(text) for offset in found["text_offset"])
    assert text == whole.text == (TEXT if stop is None else TEXT[: TEXT.index(stop)])
    assert found == whole.logprobs.model_dump()
    assert found["text_offset"][-1] == len(text)  # the end token, or the last of the stop string


LISTS = {  # what ends the answer, what was asked for: how many of its tokens the text lacks
    "the end token": ({}, 1),
    "a stop string of whole tokens": ({"stop": "日本"}, None),
    "a stop string within a token": ({"stop": "or x"}, None),
    "a stop string that is never met": ({"stop": "never"}, 1),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("options", "unseen"), LISTS.values(), ids=LISTS.keys())
def test_lists_are_as_long_as_the_usage(spoken, options, unseen, n):
    """As clients count that cut a list by `completion_tokens`."""
    _, client = spoken
    options = {"max_tokens": 100, "n": n} | options
    answer = chat(client, logprobs=True, **options)
    lists = [choice.logprobs.content for choice in answer.choices]
    assert [len(one) for one in lists] == [answer.usage.completion_tokens / n] * n
    plain = complete(client, logprobs=0, **options)
    assert {len(choice.logprobs.tokens) for choice in plain.choices} == {len(lists[0])}
    assert plain.usage.completion_tokens == answer.usage.completion_tokens
    text, offsets = plain.choices[0].text, plain.choices[0].logprobs.text_offset
    lacking = sum(offset >= len(text) for offset in offsets)
    assert lacking == unseen if unseen is not None else lacking > 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_right_after_an_echoed_prompt_is_listed(tokenizer, stream):
    """As lm-evaluation-harness counts: the prompt's tokens, and then those of the answer."""
    prompt = tokenizer.encode(TEXT)
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": prompt}
    with serving(tokenizer, Scripted([*prompt[1:], 0])) as client:
        answer = complete(client, **options, stream=stream)
        chunks = answer if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert len(tokens) == len(prompt) + 1
    assert (tokens[-1], offsets[-1]) == (END, len(TEXT))


def test_no_logprobs_or_densities_without_a_request(spoken):
    engine, client = spoken
    assert chat(client).choices[0].logprobs is None
    assert all(not c.choices[0].logprobs for c in complete(client, stream=True))
    assert {sampling.top_logprobs for sampling in engine.samplings} == {None}
    assert not any(sampling.densities for sampling in engine.samplings)


def test_a_budget_that_cuts_a_character_returns_its_part(tokenizer):
    tokens = [*tokenizer.encode("x"), tokenizer.encode("é")[0]]
    with serving(tokenizer, Scripted(tokens)) as client:
        found = complete(client, max_tokens=2, logprobs=0).choices[0]
        assert (found.text, found.logprobs.tokens) == ("x", ["x", "bytes:\\xc3"])
        choices = [c.choices[0] for c in chat(client, max_tokens=2, logprobs=True, stream=True)]
        content = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
        assert [entry.token for entry in content] == ["x", "\\xc3"]


def test_no_chance_is_a_number(tokenizer):
    engine = Certain(tokenizer.encode("print"))
    with serving(tokenizer, engine) as client:
        found = complete(client, logprobs=1).choices[0].logprobs
        assert set(found.token_logprobs) == {-9999.0}
        assert whole_chat(client)[0].logprob == -9999.0


def test_every_choice_has_its_own(tokenizer):
    class Two(Scripted):
        def described(self, place, token, sampling):
            shifted = token + (sampling.seed or 0)
            return Token(shifted, -float(sampling.seed or 0), densities=(0.5,) * 2)

    ids = tokenizer.encode("abc")
    engine = Two(ids, delay=0.002)
    with serving(tokenizer, engine) as client:
        options = {"n": 3, "seed": 5, "temperature": 1, "logprobs": True}
        whole = chat(client, **options)
        assert [c.logprobs.content[0].logprob for c in whole.choices] == [-5, -6, -7]
        assert whole.usage.completion_tokens == 3 * len(ids)
        texts, order = {0: "", 1: "", 2: ""}, []
        for chunk in chat(client, stream=True, extra_body={"twell_densities": True}, **options):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.content:
                order.append(choice.index)
                assert {entry.logprob for entry in choice.logprobs.content} == {-5.0 - choice.index}
        assert list(texts.values()) == [choice.message.content for choice in whole.choices]
        assert order != sorted(order)  # side by side, not one after another


def test_densities_of_every_token_are_streamed(spoken):
    engine, client = spoken
    for ask in (chat, complete):
        found, text = [], ""
        options = {"max_tokens": 100, "extra_body": {"twell_densities": True}}
        for chunk in ask(client, stream=True, **options):
            choice = chunk.choices[0]
            piece = choice.text if ask is complete else choice.delta.content or ""
            densities = chunk.model_extra.get("twell", {}).get("densities", [])
            assert bool(piece) == bool(densities)
            text += piece
            found += densities
        assert text == TEXT
        count = len(engine.tokens) - 1
        assert found == [[round(d, 6) for d in engine.densities(place)] for place in range(count)]


def test_byte_level_tokens_make_up_the_text(tokenizer):
    spelling = TokenSpelling(tokenizer)
    for text in ("for x in y:\n", "日本語 🏳️‍🌈 naïve ∑", " é", "\x00\x7f\u07ff\u0800\U0010ffff"):
        spelled = [spelling(token) for token in tokenizer.encode(text)]
        assert b"".join(one.bytes for one in spelled).decode() == text
        assert all(one.is_whole == ("\N{REPLACEMENT CHARACTER}" not in one.text) for one in spelled)


def test_special_tokens_have_their_name(tokenizer):
    assert TokenSpelling(tokenizer)(0).text == "<|endoftext|>"


def test_bytes_that_no_text_has_are_none(tokenizer):
    spelling = TokenSpelling(tokenizer)
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    unknown = [names[token] for token in range(512) if spelling(token).bytes is None]
    assert len(unknown) == 13  # c0, c1 and f5 to ff
    assert all(len(name) == 1 for name in unknown)


def test_sentencepiece_tokens_keep_their_space(sentencepiece):
    spelling = TokenSpelling(sentencepiece)
    vocab = sentencepiece.get_vocab()
    assert spelling(vocab["▁a"]).text == " a"
    assert spelling(vocab["b"]).text == "b"
    part = spelling(vocab["<0xC3>"])
    assert (part.bytes, part.escaped(), part.is_whole) == (b"\xc3", "\\xc3", False)
    whole = spelling(vocab["<0x41>"])
    assert (whole.text, whole.bytes, whole.is_whole) == ("A", b"A", True)


# ---- on the real engine


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
        found = choice.logprobs
        assert choice.text.startswith(tokenizer.decode(prompt, skip_special_tokens=True))
        assert "".join(found.tokens[: len(prompt)]) == tokenizer.decode(prompt)
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        expected = logprobs[:-1].gather(-1, torch.tensor(prompt[1:], dtype=int)[:, None])[:, 0]
        mine = found.token_logprobs[1 : len(prompt)]
        assert mine == pytest.approx(expected.tolist(), abs=1e-4)
        best = [max(top.values()) for top in found.top_logprobs[1 : len(prompt)]]
        assert best == pytest.approx(logprobs[:-1].max(-1).values.tolist(), abs=1e-4)
    (one,) = complete(client, prompt=first, **options).choices
    streamed = complete(client, prompt=first, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.text


def test_chat_returns_twenty_alternatives(client):
    content = chat(client, logprobs=True, top_logprobs=20).choices[0].logprobs.content
    for entry in content:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert values[0] == entry.logprob  # greedy
