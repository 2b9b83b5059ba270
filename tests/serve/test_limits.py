"""serve-local: sizes and times that are bounded, clients that leave or stall, and stopping."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time

import openai
import pytest
from other_processes import SLOW_STEPS
from serving_client import (
    PROMPT,
    Scripted,
    chat,
    complete,
    eventually,
    get,
    post,
    printed_at_start,
    running,
    serving,
)

from twellctl.decoding.engine import OutOfMemory, QueueFull
from twellctl.errors import UsageError
from twellctl.models.answerer import open_answerer
from twellctl.serve_local import load_served_model, serve_local
from twellctl.serving.openai_server import Limits


def test_a_body_of_100_mb_is_refused(tokenizer):
    with serving(tokenizer, Scripted([5])) as client:
        url = client.base_url
        connection = http.client.HTTPConnection(url.host, url.port, timeout=20)
        pieces, headers = [b"x" * (1 << 20)] * 100, {"Transfer-Encoding": "chunked"}
        with contextlib.suppress(ConnectionError):  # the server need not take it all
            connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "body_too_large"
        connection.close()
        assert complete(client).choices[0].text


def test_a_length_that_is_too_large_is_refused_before_the_body(tokenizer):
    with serving(tokenizer, Scripted([5])) as client, raw(client) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        connection.sendall(b"Content-Length: 104857600\r\n\r\n")
        assert b" 413 " in connection.recv(1000)


def raw(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)


def test_a_body_that_does_not_come_is_a_timeout(tokenizer):
    limits = Limits(body_seconds=0.2)
    with serving(tokenizer, Scripted([5]), limits=limits) as client, raw(client) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        connection.sendall(b'Content-Length: 100\r\n\r\n{"model"')
        answer = connection.recv(1000)
        assert b" 408 " in answer
        assert b"body_timeout" in answer


def test_a_body_that_does_not_come_keeps_no_server_from_stopping(tokenizer):
    with serving(tokenizer, Scripted([5] * 10, delay=0.1), drain=20) as client:
        events = iter(complete(client, max_tokens=10, stream=True))
        done = [next(events)]
        with raw(client) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            connection.sendall(b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
            assert b" 100 " in connection.recv(1000)
            connection.sendall(b'{"model"')
            began = time.monotonic()
            client.stop()
            answer = connection.recv(1000)
            done += events
            assert connection.recv(1000) == b""
            assert time.monotonic() - began < 5
    assert b" 503 " in answer
    assert b"stopping" in answer
    assert len([chunk for chunk in done if chunk.choices[0].text]) == 10


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc", b"GET"])
def test_headers_that_do_not_come_are_not_waited_for(tokenizer, sent):
    limits = Limits(idle_seconds=0.3)
    with serving(tokenizer, Scripted([5]), limits=limits) as client, raw(client) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert connection.recv(1000) == b""
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"/ GET HTTP/1.1\r\n\r\n",
        b"\r\n\r\n\r\n\x00",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\x00\r\n\r\n",
        os.urandom(4000),
    ],
    ids=range(10),
)
def test_malformed_http_hurts_nobody_else(tokenizer, sent):
    with serving(tokenizer, Scripted([5]), limits=Limits(idle_seconds=1)) as client:
        with raw(client) as connection:
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1000)
            except ConnectionError:
                answer = b""
            assert answer == b"" or re.match(rb"HTTP/1.[01] 4", answer)
        assert complete(client).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(tokenizer, stream):
    engine = Scripted([5] * 200, delay=0.05)
    with serving(tokenizer, engine, limits=Limits(answer_seconds=0.4)) as client:
        with pytest.raises(openai.APIError, match=r"within 0.4 s") as caught:
            list(complete(client, max_tokens=200, stream=stream))
        assert caught.value.code == "timeout"
        assert eventually(lambda: engine.num_running == 0)
        assert engine.num_generated < 20


def test_a_client_that_does_not_read_is_cut_off(tokenizer):
    engine = Scripted([5] * 10**6)
    engine.context = 10**7
    limits = Limits(answer_seconds=1, farewell_seconds=0.2)
    asked = {"model": "model", "prompt": "x", "max_tokens": 10**6, "stream": True}
    body = json.dumps(asked).encode()
    with serving(tokenizer, engine, limits=limits) as client, raw(client) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert eventually(lambda: engine.num_running == 1)
        assert eventually(lambda: engine.num_running == 0)
        made = engine.num_generated
        time.sleep(0.3)
        assert engine.num_generated == made < 10**6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_all_its_choices(tokenizer, stream, n):
    engine = Scripted([5] * 200, delay=0.02)
    with serving(tokenizer, engine) as client:
        if stream:
            with complete(client, max_tokens=200, stream=True, n=n) as events:
                next(iter(events))
                assert engine.num_running == n
        else:
            with pytest.raises(openai.APITimeoutError):
                complete(client.with_options(timeout=0.3), max_tokens=200, n=n)
        assert eventually(lambda: engine.num_running == 0)
        assert engine.num_generated < 100 * n


def test_a_full_queue_says_when_to_come_again(tokenizer):
    engine = Scripted([], QueueFull("64 generations wait already: try again later"))
    with serving(tokenizer, engine) as client:
        for ask in (chat, complete):
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match="64 generations wait") as caught:
                    ask(client, stream=stream, n=2)
                assert caught.value.code == "queue_full"
                assert int(caught.value.response.headers["Retry-After"]) >= 1


def test_more_choices_than_there_is_ever_room_for_are_a_bad_request(relu_llama):
    served = load_served_model(open_answerer(relu_llama), max_running=1, max_waiting=1)
    with running(served) as client:
        for ask in (chat, complete):
            with pytest.raises(openai.BadRequestError, match="n must be at most 2 ") as caught:
                ask(client, n=3)
            assert caught.value.param == "n"
            assert len(ask(client, n=2).choices) == 2
        with pytest.raises(openai.BadRequestError, match="times n must be at most 2 ") as caught:
            complete(client, prompt=[[5], [6]], n=2)
        assert caught.value.param == "prompt"


def test_out_of_memory_ends_one_request_only(tokenizer):
    class Small(Scripted):
        async def generate(self, prompt, sampling):
            if len(prompt) > 20:
                raise OutOfMemory("out of memory: shorten the prompt")
            async for token in super().generate(prompt, sampling):
                yield token

    engine = Small([5] * 20, delay=0.02)
    with serving(tokenizer, engine) as client:
        other = iter(complete(client, prompt=[5], max_tokens=20, stream=True))
        next(other)
        with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
            complete(client, prompt=[[5], [5] * 21])
        assert (caught.value.status_code, caught.value.code) == (503, "out_of_memory")
        assert len(list(other)) >= 19


def test_stopping_lets_running_answers_finish(tokenizer):
    engine = Scripted([5] * 60, delay=0.02)
    done = []
    with serving(tokenizer, engine, drain=20) as client:
        events = iter(complete(client, max_tokens=60, stream=True))
        done.append(next(events))
        body, seen = b'{"model": "model", "prompt": "x", "max_tokens": 1}', []
        probe = threading.Thread(
            target=lambda: seen.append((get(client, "/health"), post(client, body)))
        )
        reader = threading.Thread(target=lambda: done.extend(events))
        reader.start()
        threading.Timer(0.2, probe.start).start()
        client.stop()
        reader.join(20)
        assert eventually(lambda: not probe.is_alive())
    assert len([chunk for chunk in done if chunk.choices[0].text]) == 60
    assert done[-1].choices[0].finish_reason == "length"
    health, refused = seen[0]
    assert (health.status, json.loads(health.body)) == (503, {"status": "draining"})
    assert (refused[0], refused[1]["error"]["code"]) == (503, "stopping")


def test_an_engine_that_only_fails_is_not_healthy(tokenizer):
    engine = Scripted([5])
    with serving(tokenizer, engine) as client:
        for engine.failed, status in ((2, 200), (3, 503), (0, 200)):
            assert get(client, "/health").status == status
        engine.failed = 3
        assert json.loads(get(client, "/health").body) == {"status": "failing"}


def test_stopping_waits_no_longer_than_drain_allows(tokenizer):
    engine = Scripted([5] * 200, delay=0.05)
    with serving(tokenizer, engine, drain=0.3) as client:
        events = iter(complete(client, max_tokens=200, stream=True))
        next(events)
        began = time.monotonic()
        client.stop()
        with pytest.raises(openai.APIError, match="stopping"):
            list(events)
        assert time.monotonic() - began < 5
    assert engine.num_running == 0


def test_a_public_command_drains_then_hurries(started, relu_llama):
    words = "serve-local", relu_llama, "--port=0", "--host=0.0.0.0", "--no-access-log"
    process = started(*words, code=SLOW_STEPS, TWELL_API_KEY="geheim")
    url = printed_at_start(process)["API"].replace("0.0.0.0", "127.0.0.1")
    options = {"base_url": url, "max_retries": 0, "timeout": 40}
    with (
        openai.OpenAI(api_key="wrong", **options) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        complete(stranger)
    with openai.OpenAI(api_key="geheim", **options) as client:
        events = iter(complete(client, prompt=PROMPT, max_tokens=200, stream=True))
        next(events)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert json.loads(get(client, "/health").body) == {"status": "draining"}
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(events)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, "")
    noise = "was converted and not fine-tuned: what it writes is noise"
    assert err == f"beware: {relu_llama} {noise}\n"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("timeout", 0),
        ("timeout", float("nan")),
        ("drain", -1),
        ("max_running", 0),
        ("max_waiting", 0),
        ("port", 70000),
    ],
)
def test_settings_out_of_range_are_refused(relu_llama, setting, value):
    with pytest.raises(UsageError, match=f"{setting.replace('_', '-')} must be .*got {value}"):
        serve_local(relu_llama, **{setting: value})
