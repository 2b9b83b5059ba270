"""serve-local: schemas that take minutes or gigabytes hold up nobody."""

import json
import socket
import threading
import time

import openai
import psutil
import pytest
from serving_client import Scripted, chat, complete, eventually, get, serving

from twellctl.serving import grammars

MINUTES = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 9_999_991}}}
MINUTES["required"] = ["a"]
HOSTILE = {
    "many divisors": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]},
    "many properties": {"type": "object", "properties": {f"p{n}": {} for n in range(20_000)}},
    "many alternatives": {"anyOf": [{"const": f"{n:09}"} for n in range(50_000)]},
    "a long text": {"type": "string", "minLength": 100_000_000},
    "a long list": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000_000},
    "a pattern of many ends": {"type": "string", "pattern": "^(a|b)*a(a|b){5000}(c?){5000}$"},
    "a pattern of many repeats": {"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"},
    "itself": {"$ref": "#"},
    "itself and itself": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "a deep one": json.loads('{"type": "array", "items": ' * 400 + "{}" + "}" * 400),
}


@pytest.fixture(scope="module")
def client(tokenizer):
    """Of a server that gives a schema a second."""
    with pytest.MonkeyPatch.context() as patch, serving(tokenizer, Scripted([5, 0])) as made:
        patch.setattr(grammars, "SECONDS", 1)
        yield made


def form_of(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.fixture
def trials():
    """`trials()`: the processes that try grammars for this one; not those of earlier tests."""

    def found() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if "grammar_trial" in " ".join(child.cmdline())]

    before = found()
    return lambda: [trial for trial in found() if trial not in before]


def asked(client, schema: dict) -> tuple[threading.Thread, list]:
    """A thread in which an answer is asked for, and what came of it."""
    found: list = []

    def ask() -> None:
        try:
            found.append(chat(client, response_format=form_of(schema)))
        except openai.APIError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_schema_holds_up_nobody(client, schema):
    thread, found = asked(client, schema)
    while thread.is_alive():
        began = time.monotonic()
        assert get(client, "/health").status == 200
        assert complete(client).choices
        assert time.monotonic() - began < 5  # of which most is this machine's
        time.sleep(0.1)
    if isinstance(found[0], openai.APIError):
        assert (found[0].status_code, found[0].code) == (400, "json_schema")
    else:
        assert found[0].choices


def test_the_limit_of_time_is_named_and_others_go_on(client):
    within_another = {"type": "array", "items": MINUTES, "minItems": 3}
    with pytest.raises(openai.BadRequestError, match="takes more than 1 s") as caught:
        chat(client, response_format=form_of(within_another))
    assert (caught.value.param, caught.value.code) == ("response_format", "json_schema")
    assert chat(client, response_format=form_of({"type": "integer"})).choices


def test_memory_is_limited(tokenizer, monkeypatch):
    monkeypatch.setattr(grammars, "SECONDS", 60)
    monkeypatch.setattr(grammars, "BYTES", 1 << 20)
    with (
        serving(tokenizer, Scripted([5, 0])) as client,
        pytest.raises(openai.BadRequestError, match="or 1 MiB"),
    ):
        chat(client, response_format=form_of(MINUTES))


def test_a_client_that_leaves_ends_the_trial(tokenizer, trials, monkeypatch):
    monkeypatch.setattr(grammars, "SECONDS", 600)
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "response_format": form_of(MINUTES)}
    )
    with serving(tokenizer, Scripted([5, 0])) as client:
        url = client.base_url
        with socket.create_connection((url.host, url.port)) as sent:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: "
            sent.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
            assert eventually(trials)
            (trial,) = trials()
        assert eventually(lambda: not trial.is_running())
        assert chat(client, response_format=form_of({"type": "integer"})).choices


def test_a_server_ends_in_the_middle_of_a_trial(tokenizer, trials, monkeypatch):
    monkeypatch.setattr(grammars, "SECONDS", 600)
    with serving(tokenizer, Scripted([5, 0])) as client:
        thread, _ = asked(client, MINUTES)
        assert eventually(trials)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    thread.join()
    assert eventually(lambda: not trials())  # it is killed as the client hears of it


def test_a_stopping_server_takes_no_schema_that_is_still_tried(tokenizer, trials, monkeypatch):
    monkeypatch.setattr(grammars, "SECONDS", 600)
    with serving(tokenizer, Scripted([5, 0]), drain=60) as client:
        asks = [asked(client, MINUTES) for _ in range(3)]
        assert eventually(trials)
        began = time.monotonic()
        client.stop()
        for thread, _ in asks:
            thread.join()
        assert time.monotonic() - began < 10
    errors = [found for _, found in asks]
    assert [(e.status_code, e.code) for (e,) in errors] == [(503, "stopping")] * 3


def test_a_schema_has_no_extensions_of_the_library(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=form_of({"x-guidance": {"lenient": True}}))
    assert caught.value.param == "response_format.json_schema.schema.x-guidance"
