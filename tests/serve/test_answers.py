"""serve-local through the openai client: answers, streams, sampling, usage."""

import asyncio
from contextlib import aclosing

import openai
import pytest
import torch
from serving_client import (
    MESSAGES,
    PROMPT,
    UNDECODED,
    chat,
    complete,
    engine_tokens,
    get,
    streamed_chat,
    streamed_completion,
)

from twellctl.decoding.opening import open_engines
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.serving.completion import together


def test_engine_takes_end_tokens_but_no_habits_from_generation_config(
    relu_llama, reference, tokenizer
):
    expected = reference(tokenizer.encode(PROMPT), 20)
    model = load_model(open_checkpoint(relu_llama))
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 30
    model.generation_config.eos_token_id = [0, expected[-1]]
    [engine] = open_engines(model, [300])
    try:
        assert engine.eos_tokens == {0, expected[-1], 300}
        tokens = engine_tokens(engine, PROMPT, 60, tokenizer)
        assert tokens == expected[: expected.index(expected[-1]) + 1]
    finally:
        engine.close()


def test_greedy_completion_is_the_text_of_generate(client, reference, tokenizer):
    prompt = tokenizer.encode(PROMPT)
    expected = reference(prompt, 24)
    answer = complete(client)
    text = tokenizer.decode(expected, skip_special_tokens=True).rstrip(UNDECODED)
    assert text
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "model")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected))
    assert usage.total_tokens == len(prompt) + len(expected)


def test_greedy_chat_is_the_text_of_generate(client, reference, tokenizer):
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True
    ).input_ids
    answer = chat(client)
    text = tokenizer.decode(reference(prompt, 24), skip_special_tokens=True).rstrip(UNDECODED)
    assert text
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1, "seed": 3, "top_p": 0.9, "extra_body": {"top_k": 40}}]
)
def test_stream_joins_to_the_whole_answer(client, options):
    whole = chat(client, **options).choices[0]
    pieces, reason = streamed_chat(client, **options)
    assert ("".join(pieces), reason) == (whole.message.content, whole.finish_reason)
    assert len([piece for piece in pieces if piece]) > 3
    whole = complete(client, **options).choices[0]
    pieces, reason = streamed_completion(client, **options)
    assert ("".join(pieces), reason) == (whole.text, whole.finish_reason)
    assert len([piece for piece in pieces if piece]) > 3


def test_usage_ends_a_stream_that_asks_for_it(client):
    expected = complete(client).usage
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == expected
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    *_, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert last.usage == chat(client).usage


def test_seed_repeats_a_draw_and_no_seed_does_not(client):
    def draw(**seed):
        return complete(client, temperature=1, max_tokens=40, **seed).choices[0].text

    assert draw(seed=7) == draw(seed=7)
    assert draw(seed=7) != draw(seed=8)
    assert draw() != draw()


def test_a_draw_leaves_the_callers_random_numbers_alone(client):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    complete(client, temperature=1, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_n_choices_differ_and_count(client):
    options = {"temperature": 1, "seed": 11, "max_tokens": 30}
    answer = complete(client, n=3, **options)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    one = complete(client, **options)
    assert texts[0] == one.choices[0].text
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    streamed = {0: "", 1: "", 2: ""}
    for chunk in complete(client, n=3, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts
    both = complete(client, prompt=[PROMPT, "class A"], n=3, **options).choices
    assert [choice.index for choice in both] == list(range(6))
    assert [choice.text for choice in both[:3]] == texts


def test_every_form_of_prompt(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    text = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == text
    other = complete(client, prompt="class A").choices[0].text
    assert other != text
    for prompts in ([PROMPT, "class A"], [ids, tokenizer.encode("class A")]):
        answer = complete(client, prompt=prompts)
        assert [choice.text for choice in answer.choices] == [text, other]
        assert answer.usage.prompt_tokens == len(ids) + len(tokenizer.encode("class A"))


def test_text_parts_and_developer_are_text_and_system(client):
    plain = chat(client, messages=[{"role": "system", "content": "Be kind."}, *MESSAGES])
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]
    spelled = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert chat(client, messages=spelled).choices[0].message == plain.choices[0].message


def test_an_answer_can_be_sent_back_as_a_message(client):
    answer = chat(client).choices[0].message
    again = chat(client, messages=[*MESSAGES, answer.model_dump(), *MESSAGES], max_tokens=4)
    assert again.usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_before_it(client, stream):
    text = complete(client, max_tokens=60).choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 5]  # several tokens of this model, met across their borders
    expected = text[: text.index(stop)]
    options = {"max_tokens": 60, "stop": ["never to be met", stop]}
    if stream:
        pieces, reason = streamed_completion(client, **options)
        got = "".join(pieces)
    else:
        answer = complete(client, **options)
        got, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens < 60
    assert (got, reason) == (expected, "stop")


def test_defaults_of_max_tokens_are_openais(client):
    answer = client.completions.create(model="model", prompt=PROMPT, temperature=0)
    assert answer.usage.completion_tokens == 16
    answer = client.chat.completions.create(model="model", messages=MESSAGES, temperature=0)
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"
    answer = chat(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_prompt_may_fill_all_but_one_place(client):
    answer = client.completions.create(model="model", prompt=[5] * 255, temperature=0)
    assert answer.usage.completion_tokens == 1


def test_models_and_health(client):
    (entry,) = client.models.list().data
    assert (entry.id, entry.max_model_len) == ("model", 256)
    assert client.models.retrieve("model") == entry
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.models.retrieve("other")
    assert get(client, "/health").status == 200


def test_parameters_that_ask_for_nothing_are_taken(client):
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1}
    text = complete(client).choices[0].text
    answer = complete(client, echo=False, best_of=1, logprobs=None, user="me", **nothing)
    assert answer.choices[0].text == text
    extra = {"tools": [], "response_format": {"type": "text"}, "logprobs": False, "stop": None}
    assert chat(client, **extra, **nothing).choices == chat(client).choices


# ---- streams that are read side by side


class Source:
    def __init__(self, items, *, delay=0.0, failure=None):
        self.items, self.delay, self.failure = items, delay, failure
        self.closed = False

    async def stream(self):
        try:
            for item in self.items:
                await asyncio.sleep(self.delay)
                yield item
            if self.failure:
                raise self.failure
        finally:
            self.closed = True


async def all_of(*sources):
    async with aclosing(together([source.stream() for source in sources])) as merged:
        return [(i, x) async for given in merged for i, items in given.items() for x in items]


def test_each_keeps_its_order_and_none_waits_for_another():
    slow, fast = Source("abc", delay=0.05), Source("defg", delay=0.001)
    got = asyncio.run(all_of(slow, fast))
    assert [item for index, item in got if index == 0] == list("abc")
    assert got[:4] == [(1, "d"), (1, "e"), (1, "f"), (1, "g")]
    assert asyncio.run(all_of()) == []


def test_a_failure_ends_them_all():
    endless = Source(range(10**9), delay=0.001)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(all_of(endless, Source("ab", failure=ValueError("broken"))))
    assert endless.closed


def test_a_slow_reader_gets_more_at_a_time():
    async def read():
        sizes = []
        async with aclosing(together([Source(range(50), delay=0.002).stream()])) as merged:
            async for given in merged:
                sizes.append(len(given[0]))
                await asyncio.sleep(0.03)
        return sizes

    sizes = asyncio.run(read())
    assert sum(sizes) == 50
    assert len(sizes) < 25
