"""serve-local: what it refuses, with OpenAI's errors."""

import json

import openai
import pytest
from serving_client import chat, complete, post

# values that a parameter may not have: as the client names it, and of those that it does not know
CHAT = {
    "max_tokens": (-1, 0, 2.5, True, 10**9),
    "temperature": (-0.1, 2.1, "hot"),
    "top_p": (1.5,),
    "seed": (2**63, "x"),
    "n": (0, 129),
    "stop": ([1], ["a"] * 65, "a" * 1001),
    "logprobs": (2,),
    "logit_bias": ({"5": 101}, {"x": 1}, {"512": 1}),
    "presence_penalty": (2.5,),
    "frequency_penalty": (-2.5,),
    "stream_options": ({"include_usage": True},),
    "top_logprobs": (2,),
    "tool_choice": ("required",),
    "response_format": ({"type": "xml"}, "json_object", {"type": "json_schema"}),
    "reasoning_effort": ("low",),
    "messages": ([], "hi"),
}
CHAT_MORE = {
    "top_k": (-2,),
    "repetition_penalty": (0,),
    "min_p": (1.1, False),
    "stop_token_ids": ([3],),
    "options": ({"num_ctx": 5},),
    "chat_template_kwargs": (5, {"messages": []}),
    "prompt": ("x",),
    "continue_final_message": (True,),
    "stream": ("yes",),
    "twell_densities": (True,),
    "temprature": (1,),
}


def called(**fields) -> dict:
    """A message with a call that has these fields."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [call | fields]}


MESSAGES = {
    "[0]": "hi",
    "[0].role": {"role": "robot", "content": "x"},
    "[0].content": {"role": "user"},
    "[0].function_call": {"role": "assistant", "function_call": {"name": "f"}},
    "[0].tool_calls": {"role": "assistant", "tool_calls": [3]},
    "[0].tool_calls[0].custom": called(custom={"name": "f"}),
    "[0].tool_calls[0].function.text": called(function={"name": "f", "text": "x"}),
    "[0].tool_calls[0].function.name": called(function={"name": 3}),
    "[0].name": {"role": "user", "content": "x", "name": 3},
}
COMPLETION = {
    "prompt": ("", [], [""], [[]], [1, "a"], {"a": 1}, [512], [-1], [True]),
    "max_tokens": (-1,),
    "logprobs": (6, -1),
    "echo": (1,),
    "best_of": (2,),
    "suffix": ("x",),
}
COMPLETION_MORE = {"logprobs": (True,), "top_logprobs": (1,), "messages": ([],)}


def cases(values: dict, more: dict) -> list[tuple[dict, str]]:
    found = [({name: value}, name) for name in values for value in values[name]]
    return found + [({"extra_body": {n: value}}, n) for n in more for value in more[n]]


SCHEMA = {"name": "a", "schema": {"type": "object"}}
FORMATS = {  # of the field in a request: what it may not be
    ".json_schema.schema": {"type": "json_schema", "json_schema": {"name": "a"}},
    ".json_schema.strict": {"type": "json_schema", "json_schema": SCHEMA | {"strict": "yes"}},
    ".json_schema.name": {"type": "json_schema", "json_schema": SCHEMA | {"name": 3}},
    ".json_schema.mode": {"type": "json_schema", "json_schema": SCHEMA | {"mode": "x"}},
    ".schema": {"type": "json_object", "schema": []},
    ".strict": {"type": "json_object", "strict": True},
    ".json_schema": {"type": "text", "json_schema": SCHEMA},
}
PART = {"type": "text", "text": "x", "detail": "low"}
CHAT_ERRORS = [
    *(({"response_format": form}, f"response_format{place}") for place, form in FORMATS.items()),
    ({"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0].detail"),
    *cases(CHAT, CHAT_MORE),
    *(({"messages": [message]}, f"messages{place}") for place, message in MESSAGES.items()),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"max_completion_tokens": 5, "max_tokens": 4}, "max_tokens"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"stream": True, "extra_body": {"twell_densities": 1}}, "twell_densities"),
]
COMPLETION_ERRORS = [
    *cases(COMPLETION, COMPLETION_MORE),
    ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"echo": True, "presence_penalty": 1}, "echo"),
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


def test_missing_parameter_is_named(client):
    status, answer = post(client, b'{"model": "model", "prompt": null}')
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "said"),
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
def test_bad_body_is_refused(client, body, said):
    status, answer = post(client, body)
    assert status == 400
    assert said in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_what_is_no_request_of_this_api(client):
    status, answer = post(client, b"{}", "/v1/embeddings")
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    status, answer = post(client, b"{}" * 50, **{"Content-Encoding": "gzip"})
    assert (status, answer["error"]["code"]) == (400, "bad_body")
    status, answer = post(client, b"{}", "/v1/models")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in answer["error"]["message"]
