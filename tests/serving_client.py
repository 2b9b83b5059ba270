"""A server in a thread, the openai client before it, and what the tests of serving ask it."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from email.message import Message

import openai

from twellctl.decoding.engine import EngineClosed, EngineStats, Sampling, Token
from twellctl.serve_local import serve
from twellctl.serving.plan import ServedModel

PROMPT = "x = [1, 2, 3]\n"  # one that this model goes on from for long
MESSAGES = [{"role": "user", "content": "What is a list?"}]
UNDECODED = "\N{REPLACEMENT CHARACTER}"


@contextlib.contextmanager
def running(served, *, api_key="none", **settings):
    """Serve in a thread of its own; yields an openai client that never retries.

    `settings`: those of `serve`. The client's `stop()` is what a signal does.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ready: list[str] = []
    loop, stop, up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    def on_ready(served, url: str) -> None:
        ready.append(f"{url}/v1")
        up.set()

    thread = threading.Thread(
        target=loop.run_until_complete, args=[serve(served, listener, on_ready, stop, **settings)]
    )
    thread.start()
    assert up.wait(20)
    try:
        options = {"base_url": ready[0], "api_key": api_key, "max_retries": 0, "timeout": 40}
        plain = openai.DefaultHttpxClient(verify=False)  # to read certificates takes 50 ms
        with openai.OpenAI(**options, http_client=plain) as client:
            client.stop = lambda: loop.call_soon_threadsafe(stop.set)
            yield client
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


def serving(tokenizer, engine, **settings):
    """`running` of a model that is called "model"."""
    return running(ServedModel("model", tokenizer, engine), **settings)


def printed_at_start(process) -> dict[str, str]:
    """What a server says on its stdout once it is up, by name."""
    lines = [process.stdout.readline() for _ in range(7)]
    assert all(lines), process.stderr.read()
    return dict(line.rstrip("\n").split(maxsplit=1) for line in lines)


class Scripted:
    """An engine that says `tokens`, then raises `failure`, if any.

    Log-probabilities and densities of a token follow from its number and place; `delay`: seconds
    before each.
    """

    context, vocab_size, eos_tokens = 256, 512, frozenset({0})
    drafters = ()
    max_held = 320

    def __init__(
        self,
        tokens: list[int],
        failure: Exception | None = None,
        *,
        delay: float = 0,
        num_layers: int = 3,
    ):
        self.tokens, self.failure = tokens, failure
        self.delay, self.num_layers = delay, num_layers
        self.samplings: list[Sampling] = []
        self.num_running = self.num_generated = 0
        self.closed, self.failed = False, 0

    async def generate(self, prompt, sampling):
        self.samplings.append(sampling)
        self.num_running += 1
        try:
            for place, token in enumerate(self.tokens):
                await asyncio.sleep(self.delay)
                if self.closed:
                    raise EngineClosed("the server is stopping")
                self.num_generated += 1
                yield self.described(place, token, sampling)
            if self.failure:
                raise self.failure
        finally:
            self.num_running -= 1

    def described(self, place: int, token: int, sampling: Sampling) -> Token:
        logprob, top, densities = None, (), None
        if sampling.top_logprobs is not None:
            logprob = self.logprob(token)
            others = [((token + i) % self.vocab_size, logprob - i / 2) for i in range(20)]
            top = tuple(others[: sampling.top_logprobs])
        if sampling.densities:
            densities = self.densities(place)
        return Token(token, logprob, top, densities)

    def logprob(self, token: int) -> float:
        return -(token % 5) / 4

    def densities(self, place: int) -> tuple[float, ...]:
        return tuple((place + 1) * (layer + 1) / 1000 for layer in range(self.num_layers))

    def stats(self) -> EngineStats:
        densities = self.densities(0) if self.num_generated else ()
        stats = (self.num_running, 5, 64, 11, self.num_generated, 0.25, densities)
        return EngineStats(*stats, self.failed)

    def close(self) -> None:
        self.closed = True


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


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes


def eventually(true, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def get(client, path: str, method: str = "GET", **headers) -> Answer:
    """A raw request without a body, and without the client's key."""
    url = client.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def post(client, body: bytes, path: str = "/v1/completions", **headers):
    """A raw POST: status and JSON, for what the client would not send."""
    url = client.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=20)
    try:
        encoded = {name: value.encode() for name, value in headers.items()}
        connection.request("POST", path, body, {"Content-Type": "application/json"} | encoded)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
