"""serve-local: what it refuses, with OpenAI's errors."""

import json

import openai
import pytest
from serving_client import chat, complete, post

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
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"min_p": 1.1}}, "min_p"),
    ({"extra_body": {"stop_token_ids": [3]}}, "stop_token_ids"),
    ({"extra_body": {"options": {"num_ctx": 5}}}, "options"),
    ({"extra_body": {"chat_template_kwargs": 5}}, "chat_template_kwargs"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls"),
    ({"extra_body": {"stream": "yes"}}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"extra_body": {"twell_densities": True}}, "twell_densities"),
    ({"stream": True, "extra_body": {"twell_densities": 1}}, "twell_densities"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"extra_body": {"min_p": False}}, "min_p"),
    ({"extra_body": {"prompt": "x"}}, "prompt"),
    ({"extra_body": {"temprature": 1}}, "temprature"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
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
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"extra_body": {"logprobs": True}}, "logprobs"),
    ({"extra_body": {"top_logprobs": 1}}, "top_logprobs"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"echo": True, "presence_penalty": 1}, "echo"),
    ({"echo": 1}, "echo"),
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


def test_missing_parameter_is_named(client):
    status, answer = post(client, b'{"model": "model", "prompt": null}')
    assert (status, answer["error"]["param"]) == (400, "prompt")


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
