"""serve-local: templates and tokenizers that take long hold up neither others nor the end."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import openai
import pytest
from serving_client import Scripted, chat, complete, eventually, get, serving

from twellctl.decoding.engine import QueueFull
from twellctl.serving import preparing
from twellctl.serving.openai_server import Limits
from twellctl.text.tokens import encode_text, longest_token, surely_more

BODIES = [b"a small one", bytes(preparing.SMALL_BYTES + 1)]


class Odd:
    """A tokenizer that calls `before` with each text that it encodes."""

    def __init__(self, tokenizer, before):
        self._tokenizer, self._before = tokenizer, before

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **how):
        self._before(text)
        return self._tokenizer.encode(text, **how)


def reading(tokenizer, before=lambda text: None, engine=None, **settings):
    return serving(Odd(tokenizer, before), engine or Scripted([5]), **settings)


@pytest.mark.parametrize("route", [complete, chat])
def test_a_prompt_far_beyond_the_context_is_not_tokenised(tokenizer, route):
    def before(text):
        assert len(text) < 1 << 14

    with reading(tokenizer, before) as client:
        field = "prompt" if route is complete else "messages"
        text = "a" * 4_000_000
        given = text if route is complete else [{"role": "user", "content": text}]
        with pytest.raises(openai.BadRequestError, match="context is 256 tokens") as caught:
            route(client, **{field: given})
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)


def test_what_is_surely_too_long_is_and_what_is_not_is_not(tokenizer):
    longest = longest_token(tokenizer)
    for text in ("def f(x):\n    return x\n" * 40, " " * 3000, "é" * 100):
        tokens = len(encode_text(tokenizer, text))
        for most in (tokens, tokens + 1, 2 * tokens):
            assert not surely_more(tokenizer, text, most, longest)
    assert surely_more(tokenizer, "x" * (16 * longest + 1), 16, longest)
    assert surely_more(tokenizer, "q" * 2000, 100, 10**9)  # by its beginning


def test_a_small_prompt_does_not_wait_for_a_large_one(tokenizer):
    goes_on = threading.Event()

    def before(text):
        if len(text) > 500:
            goes_on.wait(20)

    texts = ["def f(x):\n" * 60 + " " * preparing.SMALL_BYTES]
    assert len(json.dumps(texts)) > preparing.SMALL_BYTES
    engine = Scripted([5])
    engine.context = 10**6
    with reading(tokenizer, before, engine) as client:
        thread = threading.Thread(target=complete, args=[client], kwargs={"prompt": texts})
        thread.start()
        began = time.monotonic()
        assert complete(client).choices[0].text
        assert time.monotonic() - began < 5
        assert thread.is_alive()
        goes_on.set()
        thread.join()


def test_a_prompt_that_is_never_ready_is_ended_and_stopped(tokenizer):
    rounds = []

    def before(text):
        while text == "for ever":
            rounds.append(1)
            time.sleep(0.01)

    with reading(tokenizer, before, limits=Limits(answer_seconds=0.5)) as client:
        with pytest.raises(openai.APIError, match=r"prompt was not ready within 0.5 s") as caught:
            complete(client, prompt="for ever")
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert complete(client).choices[0].text  # the thread is free again
        done = len(rounds)
        time.sleep(0.1)
        assert len(rounds) == done


def test_prompts_that_are_made_ready_count_as_waiting():
    engine, goes_on = Scripted([5]), threading.Event()
    engine.max_held = 7  # of which five wait, by what it says

    async def ask():
        ready = preparing.Preparing([engine])
        first = [asyncio.create_task(ready(body, lambda body: goes_on.wait(20))) for body in BODIES]
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFull, match="2 prompts wait already"):
            await ready(b"small", len)
        first[0].cancel()
        await asyncio.sleep(0)
        second = asyncio.create_task(ready(b"small", len))
        goes_on.set()
        assert (await second, await first[1]) == (5, True)

    asyncio.run(ask())


def test_health_reports_that_no_prompt_gets_through(tokenizer, monkeypatch):
    monkeypatch.setattr(preparing, "STUCK_SECONDS", 0.2)
    goes_on = threading.Event()
    with reading(tokenizer, lambda text: goes_on.wait(20)) as client:
        assert get(client, "/health").status == 200
        thread = threading.Thread(target=complete, args=[client])
        thread.start()
        assert eventually(lambda: get(client, "/health").status == 503)
        goes_on.set()
        thread.join()
        assert get(client, "/health").status == 200


def test_a_server_ends_though_a_prompt_is_never_ready(tokenizer):
    goes_on, left = threading.Event(), []

    def ask(client):
        with pytest.raises(openai.APIError) as caught:
            complete(client)
        left.append(caught)

    began = time.monotonic()
    with reading(tokenizer, lambda text: goes_on.wait(60)) as client:
        thread = threading.Thread(target=ask, args=[client])
        thread.start()
        assert eventually(lambda: any(t.name == preparing.THREAD for t in threading.enumerate()))
    assert time.monotonic() - began < 15
    goes_on.set()
    thread.join()
    assert left


def test_no_thread_here_keeps_the_process_from_ending():
    """As where a tokenizer is in the midst of megabytes, which nothing can stop."""
    code = (
        "import asyncio, time\n"
        "from twellctl.serving.preparing import in_daemon_thread\n"
        "async def main():\n"
        "    in_daemon_thread(lambda: time.sleep(60))\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=40)
