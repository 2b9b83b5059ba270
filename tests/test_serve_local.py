"""serve-local, driven by the official openai client: answers, streams, errors, and leaving."""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from twellctl.checkpoint import open_checkpoint
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.model import load_model
from twellctl.serve_local import load_served_model, serve, serve_local
from twellctl.serving.engine import EngineClosed, EngineError, Sampling
from twellctl.serving.generation import GenerateEngine
from twellctl.serving.plan import ServedModel

PROMPT = "x = [1, 2, 3]\n"  # one that this model goes on from for long
MESSAGES = [{"role": "user", "content": "What is a list?"}]
UNDECODED = "\N{REPLACEMENT CHARACTER}"


@contextlib.contextmanager
def running(served):
    """Serve in a thread of its own; yields an openai client that never retries."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready: list[str] = []
    loop, stop, up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    def on_ready(name: str, url: str) -> None:
        ready.append(url)
        up.set()

    thread = threading.Thread(
        target=loop.run_until_complete, args=[serve(served, listener, on_ready, stop)]
    )
    thread.start()
    assert up.wait(20)
    try:
        with openai.OpenAI(base_url=ready[0], api_key="none", max_retries=0, timeout=40) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(relu_llama):
    torch.set_num_threads(1)
    return load_served_model(open_checkpoint(relu_llama))


@pytest.fixture(scope="module")
def client(served):
    with running(served) as made:
        yield made


@pytest.fixture(scope="module")
def reference(relu_llama):
    """`reference(prompt ids, count)`: the greedy tokens of a second copy of the model."""
    model = load_model(open_checkpoint(relu_llama))

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
        return done[0, len(prompt) :].tolist()

    return generate


class Scripted:
    """An engine that says what it was told to, then fails if it was told to."""

    context, vocab_size, eos_tokens = 256, 512, frozenset({0})

    def __init__(self, tokens: list[int], failure: Exception | None = None):
        self.tokens, self.failure = tokens, failure

    async def generate(self, prompt, sampling):
        for token in self.tokens:
            yield token
        if self.failure:
            raise self.failure

    def close(self) -> None:
        pass


def chat(client, **changes):
    given = {"model": "model", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**given | changes)


def complete(client, **changes):
    given = {"model": "model", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    return client.completions.create(**given | changes)


def streamed_chat(client, **changes):
    chunks = list(chat(client, stream=True, **changes))
    assert chunks[0].choices[0].delta.role == "assistant"
    return [c.choices[0].delta.content or "" for c in chunks], chunks[-1].choices[0].finish_reason


def streamed_completion(client, **changes):
    chunks = list(complete(client, stream=True, **changes))
    return [c.choices[0].text for c in chunks], chunks[-1].choices[0].finish_reason


def engine_tokens(engine, text, count, tokenizer):
    """The greedy tokens of an engine alone."""

    async def collect():
        prompt = tokenizer.encode(text)
        return [token async for token in engine.generate(prompt, Sampling(count, 0.0))]

    return asyncio.run(collect())


def post(client, body: bytes, path: str = "/v1/completions", **headers):
    """A raw POST: status and JSON, for what the client would not send."""
    url = client.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=20)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_engine_gives_the_tokens_of_generate(served, client, reference, tokenizer):
    expected = reference(tokenizer.encode(PROMPT), 60)
    assert engine_tokens(served.engine, PROMPT, 60, tokenizer) == expected


def test_an_export_is_served_alike(relu_llama, reference, tokenizer, tmp_path):
    export(relu_llama, tmp_path / "exported")
    exported = load_served_model(open_checkpoint(tmp_path / "exported"))
    try:
        assert exported.name == "exported"
        assert engine_tokens(exported.engine, PROMPT, 20, tokenizer) == reference(
            tokenizer.encode(PROMPT), 20
        )
    finally:
        exported.engine.close()


def test_engine_takes_end_tokens_but_no_habits_from_generation_config(
    relu_llama, reference, tokenizer
):
    expected = reference(tokenizer.encode(PROMPT), 20)
    model = load_model(open_checkpoint(relu_llama))
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 30
    model.generation_config.eos_token_id = [0, expected[-1]]
    engine = GenerateEngine(model, 300)
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


def test_top_k_and_top_p_narrow_the_draw_to_the_greedy_one(client):
    greedy = complete(client).choices[0].text
    assert complete(client, temperature=2, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, temperature=2, top_p=0).choices[0].text == greedy


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
    url = client.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=20)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_parameters_that_ask_for_nothing_are_taken(client):
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1}
    text = complete(client).choices[0].text
    answer = complete(client, echo=False, best_of=1, logprobs=None, user="me", **nothing)
    assert answer.choices[0].text == text
    extra = {"tools": [], "response_format": {"type": "text"}, "logprobs": False, "stop": None}
    assert chat(client, **extra, **nothing).choices == chat(client).choices


CHAT_ERRORS = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 4}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"extra_body": {"stream": "yes"}}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ({"extra_body": {"min_p": 0.1}}, "min_p"),
    ({"extra_body": {"min_p": False}}, "min_p"),
    ({"extra_body": {"prompt": "x"}}, "prompt"),
    ({"extra_body": {"temprature": 1}}, "temprature"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
]
COMPLETION_ERRORS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens"),
    ({"logprobs": 0}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"extra_body": {"messages": []}}, "messages"),
]


@pytest.mark.parametrize(
    ("ask", "changes", "param"),
    [(chat, *case) for case in CHAT_ERRORS] + [(complete, *case) for case in COMPLETION_ERRORS],
    ids=lambda value: getattr(value, "__name__", None) or json.dumps(value)[:60],
)
def test_bad_parameter_is_refused_by_name(client, ask, changes, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **changes)
    error = caught.value
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert error.code
    assert error.body["message"].isprintable()


@pytest.mark.parametrize("length", [256, 257, 400])
def test_prompt_that_leaves_no_room_is_refused(client, length):
    with pytest.raises(openai.BadRequestError, match="context is 256 tokens") as caught:
        complete(client, prompt=[5] * length, max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="context is 256 tokens") as caught:
        chat(client, messages=[{"role": "user", "content": "é" * length * 3}], max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("ask", [chat, complete])
def test_unknown_model_is_not_found(client, ask):
    with pytest.raises(openai.NotFoundError, match=r'"gpt-5".*"model"') as caught:
        ask(client, model="gpt-5")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_parameter_is_named(client, missing):
    body = {"model": "model", "prompt": "x"} | {missing: None}
    status, answer = post(client, json.dumps(body).encode())
    assert (status, answer["error"]["param"]) == (400, missing)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model": "model", "prompt": "\\ud83d"}', "valid Unicode"),
        (b'{"model": "model", "prompt": "x", "temperature": NaN}', "temperature must be"),
        (b'{"model": "model", "prompt": "x", "a": ' + b"[" * 900 + b"]" * 900 + b"}", "unknown"),
    ],
)
def test_bad_body_is_refused(client, body, told):
    status, answer = post(client, body)
    assert status == 400
    assert told in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_body_too_large(client):
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, prompt="x" * (5 << 20))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


def test_what_is_no_request_of_this_api(client):
    status, answer = post(client, b"{}", "/v1/embeddings")
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    status, answer = post(client, b"{}" * 50, **{"Content-Encoding": "gzip"})
    assert (status, answer["error"]["code"]) == (400, "bad_body")
    status, answer = post(client, b"{}", "/v1/models")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "evil.example"),
        ("Host", "127.0.0.1.evil.example:8000"),
        ("Origin", "https://evil.example"),
        ("Origin", "null"),
    ],
)
def test_other_hosts_and_origins_are_forbidden(client, header, value):
    body = json.dumps({"model": "model", "prompt": "x", "max_tokens": 1}).encode()
    status, answer = post(client, body, **{header: value})
    assert (status, answer["error"]["type"]) == (403, "invalid_request_error")


@pytest.mark.parametrize("headers", [{"Host": "localhost:1"}, {"Origin": "http://[::1]:3000"}])
def test_this_machine_is_let_in(client, headers):
    body = json.dumps({"model": "model", "prompt": "x", "max_tokens": 1}).encode()
    assert post(client, body, **headers)[0] == 200


def test_requests_at_once_are_answered_in_turn(client):
    alone = [complete(client, prompt=f"x = {i}").choices[0].text for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(lambda i: complete(client, prompt=f"x = {i}"), range(4))
        assert [answer.choices[0].text for answer in done] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_worker(served, client, stream):
    steps = []

    def slow(*_):
        steps.append(time.monotonic())
        time.sleep(0.05)

    expected = complete(client, max_tokens=1).choices[0].text
    hook = served.engine._model.register_forward_pre_hook(slow)
    try:
        if stream:
            with complete(client, max_tokens=200, stream=True) as events:
                next(iter(events))
        else:
            with pytest.raises(openai.APITimeoutError):
                complete(client.with_options(timeout=0.5), max_tokens=200)
        left = time.monotonic()
        assert complete(client, max_tokens=1).choices[0].text == expected
    finally:
        hook.remove()
    assert len([step for step in steps if step > left]) < 20  # of 200, had it gone on


def test_out_of_memory_fails_one_request_only(served, client, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")

    with monkeypatch.context() as patched:
        patched.setattr(served.engine._model, "generate", fail)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
                complete(client, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "out_of_memory")
    assert complete(client).choices[0].text


def test_unexpected_failure_is_logged_in_one_line(served, client, monkeypatch, caplog):
    def fail(*_, **__):
        raise IndexError("no such\nlayer")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(served.engine._model, "generate", fail)
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
    assert (caught.value.status_code, caught.value.type) == (500, "server_error")
    (record,) = caplog.records
    assert record.getMessage() == "POST /v1/completions failed: IndexError: no such layer"
    assert complete(client).choices[0].text


@pytest.mark.parametrize("failure", [EngineError("lost"), EngineClosed("stopping")])
def test_failure_within_a_stream_is_an_error_event(tokenizer, failure, caplog):
    tokens = tokenizer.encode("print")
    with running(ServedModel("model", tokenizer, Scripted(tokens, failure))) as client:
        got = []
        with pytest.raises(openai.APIError, match=str(failure)):
            got.extend(c.choices[0].text for c in complete(client, stream=True))
    assert "".join(got) == "print"


def test_no_half_characters_in_a_stream(tokenizer):
    text = "日本語 🏳️‍🌈 naïve ∑"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)  # most characters here are several tokens
    with running(ServedModel("model", tokenizer, Scripted([*tokens, 0]))) as client:
        pieces, reason = streamed_completion(client)
        assert UNDECODED not in "".join(pieces)
        assert ("".join(pieces), reason) == (text, "stop")
        assert "".join(streamed_chat(client)[0]) == text
        assert complete(client).usage.completion_tokens == len(tokens) + 1
    with running(ServedModel("model", tokenizer, Scripted(tokens[:2]))) as client:
        cut = complete(client).choices[0]
        assert (cut.text, cut.finish_reason) == ("", "length")


def test_end_token_is_counted_and_no_text(tokenizer):
    half = tokenizer.encode("é")[0]
    plain_end = tokenizer.encode("x")[0]  # not every model's end token is a special one
    engine = Scripted([*tokenizer.encode("print"), half, plain_end])
    engine.eos_tokens = frozenset({plain_end})
    with running(ServedModel("model", tokenizer, engine)) as client:
        answer = complete(client)
    assert answer.choices[0].text == "print" + UNDECODED  # it wrote half a character, then ended
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(engine.tokens)


def test_model_without_chat_template_names_the_other_endpoint(served, tokenizer, monkeypatch):
    monkeypatch.setattr(served.tokenizer, "chat_template", None)
    with running(ServedModel("model", served.tokenizer, Scripted([5]))) as client:
        with pytest.raises(openai.BadRequestError, match="/v1/completions") as caught:
            chat(client)
        assert caught.value.param == "messages"
        assert complete(client).choices[0].text


def test_chat_template_that_refuses_is_a_bad_request(served, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    with (
        running(ServedModel("model", served.tokenizer, Scripted([5]))) as client,
        pytest.raises(openai.BadRequestError, match="roles must alternate"),
    ):
        chat(client)


def test_what_cannot_be_served_is_refused(silu_llama, relu_llama, tmp_path):
    with pytest.raises(TwellError, match="is a SiLU model: make it ReLU with 'twellctl convert"):
        serve_local(silu_llama)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(relu_llama / name)
    with pytest.raises(TwellError, match="has no tokenizer"):
        serve_local(bare)
    for host in ("0.0.0.0", "192.168.1.1", "example.org", "::"):
        with pytest.raises(UsageError, match=f"got {host}"):
            serve_local(relu_llama, host=host)
    with pytest.raises(UsageError, match="got 70000"):
        serve_local(relu_llama, port=70000)


def test_busy_port_is_one_line(relu_llama):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TwellError, match=f"port {port} is in use"):
            serve_local(relu_llama, port=port)


def test_sigterm_ends_the_command_with_0(relu_llama):
    command = [sys.executable, "-m", "twellctl", "serve-local", str(relu_llama), "--port", "0"]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving model at http://127.0.0.1:"), process.stderr.read()
        url = line.split()[-1]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            events = complete(client, max_tokens=200, n=100, stream=True)  # a minute of work
            next(iter(events))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="stopping"):
                list(events)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_function_and_its_handler_comes_back(tokenizer, number):
    served = ServedModel("model", tokenizer, Scripted([5]))
    ready = []

    def own(*_) -> None:
        """The handler of the program that calls the function."""

    def on_ready(name: str, url: str) -> None:
        ready.append((name, url))
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()

    before = signal.signal(number, own)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        asyncio.run(asyncio.wait_for(serve(served, listener, on_ready), 20))
    assert ready == [("model", f"http://127.0.0.1:{port}/v1")]
    assert signal.signal(number, before) is own


def test_malformed_http_is_logged_in_one_line(client, caplog):
    url = client.base_url
    with (
        caplog.at_level(logging.ERROR),
        socket.create_connection((url.host, url.port), timeout=20) as connection,
    ):
        connection.sendall(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert b" 400 " in connection.recv(1000)
    assert all(record.exc_info is None for record in caplog.records)
    assert all("\n" not in record.getMessage() for record in caplog.records)
    assert caplog.records


def test_help_imports_neither_torch_nor_aiohttp():
    code = "import sys, twellctl.cli; print(sorted({'torch', 'aiohttp'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
