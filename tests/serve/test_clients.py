"""serve-local as clients use it: their parameters, labels, names, and requests of other forms."""

import copy
import json

import openai
import pytest
from conftest import CHAT_TEMPLATE
from serving_client import MESSAGES, Scripted, chat, complete, post, running, serving
from transformers import GenerationConfig

from twellctl.serve_local import sampling_of
from twellctl.serving.plan import ServedModel


@pytest.fixture
def scripted(tokenizer):
    """`scripted(**settings)`: a server whose engine says one token, and keeps how it was asked."""

    def made(**settings):
        engine = Scripted([5])
        return engine, running(ServedModel("model", tokenizer, engine, **settings))

    return made


def words(client, **changes) -> str:
    return complete(client, **changes).choices[0].text


def test_penalties_and_biases_reach_the_engine(scripted):
    engine, server = scripted()
    extra = {"min_p": 0.1, "repetition_penalty": 1.3}
    with server as client:
        complete(
            client,
            frequency_penalty=-0.5,
            presence_penalty=1,
            logit_bias={"5": -100, "7": 2},
            extra_body=extra,
        )
    (got,) = engine.samplings
    assert (got.min_p, got.repetition_penalty) == (0.1, 1.3)
    assert (got.frequency_penalty, got.presence_penalty) == (-0.5, 1)
    assert got.logit_bias == ((5, -100), (7, 2))


def test_a_penalty_ends_a_loop_and_a_bias_bans_a_token(client, tokenizer):
    plain = words(client, max_tokens=60)
    tokens = tokenizer.encode(plain)
    assert len(set(tokens)) < 50
    bans = {str(token): -100 for token in set(tokens)}
    assert not {*tokenizer.encode(words(client, max_tokens=1, logit_bias=bans))} & {*tokens}
    fresh = tokenizer.encode(words(client, max_tokens=60, frequency_penalty=2))
    assert len(set(fresh)) > len(set(tokens))
    again = words(client, max_tokens=60, extra_body={"repetition_penalty": 50.0})
    assert words(client, max_tokens=60) == plain  # of one request, not of the server
    assert again != plain


def test_the_samplings_of_the_model_hold_where_a_request_names_none(scripted):
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    defaults = sampling_of(config)
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    engine, server = scripted(defaults=defaults)
    with server as client:
        client.completions.create(model="model", prompt="x")
        client.completions.create(model="model", prompt="x", temperature=1, top_p=1)
        post(client, json.dumps({"prompt": "x", "top_k": 0}).encode())
    first, second, third = engine.samplings
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.9, 20)
    assert (second.temperature, second.top_p, second.top_k) == (1, 1, 20)
    assert (third.temperature, third.top_k) == (0.6, 0)
    config = GenerationConfig(do_sample=False, temperature=0.6, repetition_penalty=1.1)
    assert sampling_of(config) == {"repetition_penalty": 1.1}


def test_labels_that_change_no_text_are_taken(client):
    labels = {"keep_alive": "5m", "cache_prompt": True, "options": {}, "skip_special_tokens": True}
    labels |= {"service_tier": "flex", "request_id": "x"}
    wanted = chat(client).choices
    assert chat(client, store=True, top_logprobs=0, extra_body=labels).choices == wanted
    part = {"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "id": "m1"}
    assert chat(client, messages=[message]).choices == wanted
    assert chat(client, stop=["", "never"]).choices == wanted
    assert words(client, stop=[f"never {i}" for i in range(40)]) == words(client)


def test_messages_of_tools_reach_the_template(scripted, tokenizer, monkeypatch):
    seen = []
    render = type(tokenizer).apply_chat_template

    def noted(self, messages, **how):
        seen.append((messages, how))
        return render(self, messages, **how)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", noted)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "name": "Ann", "content": "so?"},
    ]
    _, server = scripted(template={"enable_thinking": True, "date": "today"})
    with server as client:
        chat(client, messages=messages)
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        chat(client, messages=MESSAGES, extra_body=extra)
    (messages, how), (_, other) = seen
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (messages[2]["role"], messages[2]["tool_call_id"], messages[3]["name"]) == (
        "tool",
        "c1",
        "Ann",
    )
    assert (how["enable_thinking"], how["date"]) == (True, "today")
    assert (other["enable_thinking"], other["date"]) == (False, "today")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED = 'So.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def with_tools(tokenizer):
    """`with_tools(text)`: a server whose template has tools, and whose model answers `text`."""

    def made(text: str):
        other = copy.deepcopy(tokenizer)
        other.chat_template = "{% if tools %}{{ tools }} <tool_call>{% endif %}" + CHAT_TEMPLATE
        engine = Scripted([*tokenizer.encode(text), 0])
        return serving(other, engine)

    return made


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(with_tools, stream):
    with with_tools(CALLED) as client:
        if stream:
            chunks = [c.choices[0] for c in chat(client, tools=TOOLS, stream=True)]
            text = "".join(chunk.delta.content or "" for chunk in chunks)
            (calls,) = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
            ended = chunks[-1].finish_reason
        else:
            (choice,) = chat(client, tools=TOOLS, tool_choice="auto").choices
            text, calls, ended = choice.message.content, choice.message.tool_calls, "tool_calls"
            assert choice.finish_reason == "tool_calls"
        (call,) = calls
        assert (text, ended, call.function.name) == ("So.", "tool_calls", "weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        for changes in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = chat(client, **changes).choices[0].message
            assert (message.content, message.tool_calls) == (CALLED, None)


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", "a <tool", "<tool_call>[]"])
def test_what_is_no_call_is_text(with_tools, text):
    with with_tools(text) as client:
        for stream in (False, True):
            if stream:
                chunks = [c.choices[0] for c in chat(client, tools=TOOLS, stream=True)]
                got = "".join(chunk.delta.content or "" for chunk in chunks)
                assert chunks[-1].finish_reason == "stop"
            else:
                got = chat(client, tools=TOOLS).choices[0].message.content
            assert got == text


def test_tools_of_a_template_that_has_none_are_refused_by_name(client):
    for changes in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match=r"tool.* not supported") as caught:
            chat(client, **changes)
        assert caught.value.param in ("tools", "tool_choice")


def test_an_answer_that_was_begun_is_gone_on_with(served, client, tokenizer):
    begun = [*MESSAGES, {"role": "assistant", "content": "A list is"}]
    got = chat(client, messages=begun, extra_body={"continue_final_message": True})
    text = tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    assert text.endswith("A list is")
    assert got.choices[0].message.content == words(client, prompt=text)


def test_other_names_of_the_model(scripted):
    _, server = scripted(names=("gpt-3.5-turbo",))
    with server as client:
        assert [entry.id for entry in client.models.list().data] == ["model", "gpt-3.5-turbo"]
        assert client.models.retrieve("gpt-3.5-turbo").id == "gpt-3.5-turbo"
        assert chat(client, model="gpt-3.5-turbo").model == "gpt-3.5-turbo"
        for body in ({"prompt": "x"}, {"prompt": "x", "model": ""}):
            status, answer = post(client, json.dumps(body).encode())
            assert (status, answer["model"]) == (200, "model")
        with pytest.raises(openai.NotFoundError):
            chat(client, model="gpt-4")


@pytest.mark.parametrize("given", ["What is a list?", MESSAGES])
def test_responses_are_chats(client, given):
    wanted = chat(client).choices[0].message.content
    how = {"model": "model", "input": given, "temperature": 0, "max_output_tokens": 24}
    answer = client.responses.create(**how)
    assert answer.output_text == wanted
    assert (answer.status, answer.usage.output_tokens) == ("incomplete", 24)
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**how, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == wanted
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == wanted
    answer = client.responses.create(**how | {"instructions": "Be brief."})
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert answer.output_text == chat(client, messages=system).choices[0].message.content


def test_a_response_that_ends_by_itself_is_complete(tokenizer):
    engine = Scripted([*tokenizer.encode("so it is"), 0])
    with serving(tokenizer, engine) as client:
        answer = client.responses.create(model="model", input="x")
        assert (answer.output_text, answer.status) == ("so it is", "completed")
        with client.responses.stream(model="model", input="x") as stream:
            assert [e.type for e in stream][-1] == "response.completed"
            assert stream.get_final_response().output_text == "so it is"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "strict": True}}}, "text.format.strict"),
        ({"input": [{"role": "user", "content": "x", "phase": 1}]}, "input[0].phase"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input of type item_reference"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 10**9}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
def test_what_responses_do_not_do_is_refused_by_name(client, changes, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "model", "input": "x"} | changes)
    assert caught.value.param == param
