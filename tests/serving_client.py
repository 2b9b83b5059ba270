"""A server in a thread, the openai client before it, and what the tests of serving ask it."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading

import openai

from twellctl.serve_local import serve
from twellctl.serving.engine import Sampling, Token

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


class Scripted:
    """An engine that says what it was told to, then fails if it was told to."""

    context, vocab_size, eos_tokens = 256, 512, frozenset({0})

    def __init__(self, tokens: list[int], failure: Exception | None = None):
        self.tokens, self.failure = tokens, failure

    async def generate(self, prompt, sampling):
        for token in self.tokens:
            yield Token(token)
        if self.failure:
            raise self.failure

    def close(self, drain_seconds: float = 0) -> None:
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
        return [token.id async for token in engine.generate(prompt, Sampling(count, 0.0))]

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
