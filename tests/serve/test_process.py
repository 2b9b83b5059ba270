"""serve-local: clients that leave, failures, signals, and what it does not start with."""

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serving_client import (
    UNDECODED,
    Scripted,
    chat,
    complete,
    printed_at_start,
    running,
    serving,
    streamed_chat,
    streamed_completion,
)

from twellctl.errors import TwellError, UsageError
from twellctl.models.answerer import open_answerer
from twellctl.serve_local import load_served_model, serve, serve_local
from twellctl.serving.plan import ServedModel


def test_many_clients_at_once_get_what_they_get_alone(client):
    alone = [complete(client, prompt=f"x = {i}").choices[0].text for i in range(8)]

    def stream(i: int) -> str | None:
        if i % 10 == 9:  # leaves
            with complete(client, prompt="y", max_tokens=200, stream=True) as events:
                next(iter(events))
            return None
        return "".join(streamed_completion(client, prompt=f"x = {i % 8}")[0])

    with ThreadPoolExecutor(20) as pool:
        for i, text in enumerate(pool.map(stream, range(60))):
            assert text in (None, alone[i % 8]), i


def test_unexpected_failure_is_logged_in_one_line(served, client, monkeypatch, caplog):
    def fail(*_, **__):
        raise IndexError("no such\nlayer")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(served.engine._scheduler.decoder, "run", fail)
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
    assert (caught.value.status_code, caught.value.type) == (500, "server_error")
    (record,) = caplog.records
    assert record.getMessage() == "POST /v1/completions failed: IndexError: no such layer"
    assert complete(client).choices[0].text


def test_no_half_characters_in_a_stream(tokenizer):
    text = "日本語 🏳️‍🌈 naïve ∑"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)  # most characters here are several tokens
    with serving(tokenizer, Scripted([*tokens, 0])) as client:
        pieces, reason = streamed_completion(client)
        assert UNDECODED not in "".join(pieces)
        assert ("".join(pieces), reason) == (text, "stop")
        assert "".join(streamed_chat(client)[0]) == text
        assert complete(client).usage.completion_tokens == len(tokens) + 1
    with serving(tokenizer, Scripted(tokens[:2])) as client:
        cut = complete(client).choices[0]
        assert (cut.text, cut.finish_reason) == ("", "length")


def test_end_token_is_counted_and_no_text(tokenizer):
    half = tokenizer.encode("é")[0]
    plain_end = tokenizer.encode("x")[0]  # not every model's end token is a special one
    engine = Scripted([*tokenizer.encode("print"), half, plain_end])
    engine.eos_tokens = frozenset({plain_end})
    with serving(tokenizer, engine) as client:
        answer = complete(client)
    assert answer.choices[0].text == "print" + UNDECODED  # it wrote half a character, then ended
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(engine.tokens)


def test_model_without_chat_template_names_the_other_endpoint(served, tokenizer, monkeypatch):
    monkeypatch.setattr(served.tokenizer, "chat_template", None)
    with serving(served.tokenizer, Scripted([5])) as client:
        with pytest.raises(openai.BadRequestError, match="/v1/completions") as caught:
            chat(client)
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match="/v1/completions") as caught:
            client.responses.create(model="model", input="Why?")
        assert caught.value.param == "input"
        assert complete(client).choices[0].text


def test_chat_template_that_refuses_is_a_bad_request(served, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    with (
        serving(served.tokenizer, Scripted([5])) as client,
        pytest.raises(openai.BadRequestError, match="roles must alternate"),
    ):
        chat(client)


def test_a_silu_model_is_served_densely(silu_llama):
    answerer = open_answerer(silu_llama)
    served, said = load_served_model(answerer), []
    answerer.checkpoint.say_if_dense(said.append)
    assert said == [f"{silu_llama} is a SiLU model: every neuron is computed for every token"]
    with running(served) as client:
        assert complete(client, prompt="x = 1", max_tokens=5).choices[0].text
    assert served.engine.stats().densities == ()


def test_busy_port_is_one_line(relu_llama):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TwellError, match=f"port {port} is in use"):
            serve_local(relu_llama, port=port)


@pytest.mark.parametrize("host", ["foo.invalid", "192.0.2.1", "ä" * 80])
def test_a_host_that_is_not_here_is_named(relu_llama, host):
    with pytest.raises(TwellError, match=f"host {host} cannot be used: .*address of this machine"):
        serve_local(relu_llama, host=host, api_key="k")


def test_a_port_that_is_not_allowed_is_named(relu_llama, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", denied)
    with pytest.raises(TwellError, match="port 80 cannot be used: Permission denied"):
        serve_local(relu_llama, port=80)


def test_sigterm_ends_the_command_with_0(started, relu_llama):
    process = started("serve-local", relu_llama, "--port=0", "--drain=0")
    screen = printed_at_start(process)
    url = screen["API"]
    assert screen == {
        "page": url.removesuffix("v1"),
        "API": url,
        "model": "model",
        "device": "cpu, float32",
        "engine": "transformers' own code (the decode kernels need an NVIDIA GPU)",
        "context": "256 tokens",
        "running": "64 concurrent choices at most (--max-running)",
    }
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        events = complete(client, max_tokens=200, n=100, stream=True)  # seconds of work
        next(iter(events))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(events)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, "")
    beware, line = err.splitlines()  # the second is the access log's
    assert beware.endswith("was converted and not fine-tuned: what it writes is noise")
    assert re.search(r" 127\.0\.0\.1 POST /v1/completions 503 \d+\+\d+ tokens \d+ ms$", line)


def test_while_it_serves_threads_take_short_turns(relu_llama):
    seen, before = [], sys.getswitchinterval()

    def on_ready(served: ServedModel, url: str) -> None:
        seen.append(sys.getswitchinterval())
        os.kill(os.getpid(), signal.SIGTERM)

    serve_local(relu_llama, port=0, drain=0, on_ready=on_ready)
    assert seen == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_function_and_its_handler_comes_back(tokenizer, number):
    served = ServedModel("model", tokenizer, Scripted([5]))
    ready = []

    def own(*_) -> None:
        """The handler of the program that calls the function."""

    def on_ready(served: ServedModel, url: str) -> None:
        ready.append((served.name, url))
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()

    before = signal.signal(number, own)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        asyncio.run(asyncio.wait_for(serve(served, listener, on_ready), 20))
    assert ready == [("model", f"http://127.0.0.1:{port}")]
    assert signal.signal(number, before) is own


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models?api_key=geheim" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthoriz ation: Bearer geheim\r\n\r\n",
    ],
)
def test_malformed_http_is_logged_in_one_line_that_quotes_nothing(client, caplog, sent):
    url = client.base_url
    with (
        caplog.at_level(logging.ERROR),
        socket.create_connection((url.host, url.port), timeout=20) as connection,
    ):
        connection.sendall(sent)
        assert b" 400 " in connection.recv(1000)
    (record,) = caplog.records
    said = record.getMessage()
    assert record.exc_info is None
    assert "geheim" not in said
    assert "\n" not in said
    assert said.startswith("Error handling request")
    assert len(said) > len("Error handling request from 127.0.0.1: ")


def test_a_late_ctrl_c_changes_nothing_of_an_end(started, relu_llama):
    process = started("serve-local", relu_llama, "--port=0")
    printed_at_start(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)  # it has ended its work, and takes longer to end itself
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 0


ENDLESS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd") + "x"
ENDLESS += "{% endfor %}" * 4


def test_a_template_without_an_end_does_not_keep_a_server_from_ending(
    started, relu_llama, tmp_path
):
    folder = shutil.copytree(relu_llama, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(ENDLESS)
    process = started("serve-local", folder, "--port=0")
    url = printed_at_start(process)["API"]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=0.2) as client:
        for _ in range(8):  # more than there were threads; each leaves
            with pytest.raises(openai.APITimeoutError):
                chat(client)
        assert complete(client.with_options(timeout=20)).choices[0].text
        with pytest.raises(openai.APITimeoutError):
            chat(client)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("host", "said"),
    [("[::1]", "leave brackets out"), ("127.0.0.1:9000", "--port"), ("", "must be a name")],
)
def test_a_host_is_no_url(relu_llama, host, said):
    with pytest.raises(UsageError, match=said):
        serve_local(relu_llama, host=host)


def test_more_side_by_side_than_the_cache_holds_is_no_matter(relu_llama):
    engine = load_served_model(open_answerer(relu_llama), max_running=10**11).engine
    try:
        assert engine.stats().capacity < 10**6
    finally:
        engine.close()
