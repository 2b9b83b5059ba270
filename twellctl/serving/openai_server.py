"""OpenAI's endpoints for a model, over aiohttp: requests in, the engine's text out. No torch."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from twellctl.decoding.engine import EngineClosed
from twellctl.files.strict_json import to_json
from twellctl.serving.access import Access, guard, reading
from twellctl.serving.completion import Piece, complete, joined, together
from twellctl.serving.grammars import Grammars
from twellctl.serving.http_errors import answer_errors, json_response
from twellctl.serving.measured import access_log, current, measuring, note_failure
from twellctl.serving.metrics import Metrics
from twellctl.serving.openai_requests import parse_chat, parse_completion
from twellctl.serving.openai_responses import Answer, ChatAnswer, Choice, TextAnswer, Usage
from twellctl.serving.page import page_response
from twellctl.serving.plan import Plan, ServedModel, Task, engine_of, plan_chat, plan_completion
from twellctl.serving.preparing import Preparing
from twellctl.serving.request_fields import ApiError, request_object
from twellctl.serving.responses_api import ResponseAnswer, parse_response
from twellctl.serving.tools import with_calls
from twellctl.text.tokens import Detokenizer, StopStrings

Request = TypeVar("Request")
FAILING = 3  # generations in a row that the engine failed: it is no longer healthy


@dataclass(frozen=True)
class Limits:
    """How much and how long; seconds and bytes."""

    answer_seconds: float = 600
    body_seconds: float = 30  # for a request's body to arrive
    idle_seconds: float = 30  # for a request's headers to arrive, and between requests
    farewell_seconds: float = 5  # to take the answer, of a client that does not read or still sends
    body_bytes: int = 4 << 20


class Traffic:
    """Counts the answers under way, which a server that stops waits for.

    While it is `draining` no new one begins, nor one that is still at its `beginning`.
    """

    def __init__(self) -> None:
        self.draining = False
        self._beginning: set[asyncio.Timeout] = set()
        self._num_running = 0
        self.idle = asyncio.Event()  # nothing is being answered
        self.idle.set()

    def drain(self) -> None:
        """From now on only answers that are past their beginning go on."""
        self.draining = True
        for limit in self._beginning:
            if not limit.expired():
                limit.reschedule(0)

    @asynccontextmanager
    async def beginning(self, seconds: float | None = None) -> AsyncGenerator[None, None]:
        """Around what an answer waits for; `TimeoutError` after `seconds`, if those are given.

        `EngineClosed` as soon as no more answers are taken.
        """
        self._check()
        limit = asyncio.timeout(seconds)
        self._beginning.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            self._check()
            raise
        finally:
            self._beginning.discard(limit)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around one answer; raises `EngineClosed` if no more are taken."""
        self._check()
        self._num_running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self.idle.set()

    def _check(self) -> None:
        if self.draining:
            raise EngineClosed("the server is stopping")


def make_app(
    model: ServedModel,
    access: Access,
    limits: Limits,
    traffic: Traffic,
    log: Callable[[str], None] | None = None,
) -> web.Application:
    """The application: routes, limits and guards. `log` gets a line a request."""
    metrics = Metrics(model.engines)
    observers = [metrics.count, access_log(log)] if log else [metrics.count]
    endpoints = Endpoints(model, limits, traffic, metrics)
    app = web.Application(
        middlewares=[measuring(*observers), answer_errors, guard(access)],
        client_max_size=limits.body_bytes,
    )
    app.on_response_prepare.append(reading(access))
    app.on_cleanup.append(endpoints.close)
    app.router.add_get("/", page_response)
    app.router.add_get("/health", endpoints.health)
    app.router.add_get("/metrics", metrics.response)
    app.router.add_get("/v1", endpoints.listed)
    app.router.add_get("/v1/", endpoints.listed)
    app.router.add_get("/v1/models", endpoints.models)
    app.router.add_get("/v1/models/{name:.+}", endpoints.model)
    chat = partial(endpoints.answer, parse_chat, plan_chat, ChatAnswer)
    completion = partial(endpoints.answer, parse_completion, plan_completion, TextAnswer)
    response = partial(endpoints.answer, parse_response, plan_chat, ResponseAnswer)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/completions", completion)
    app.router.add_post("/v1/responses", response)
    return app


class Endpoints:
    """The handlers."""

    def __init__(self, model: ServedModel, limits: Limits, traffic: Traffic, metrics: Metrics):
        self._model, self._limits, self._traffic = model, limits, traffic
        self._metrics, self._preparing = metrics, Preparing(list(model.engines))
        self._grammars = Grammars(model.guides, sum(engine.max_held for engine in model.engines))

    async def close(self, app: web.Application) -> None:
        """At the end of the server."""
        await self._grammars.close()

    async def listed(self, http: web.Request) -> web.Response:
        """What there is, for who opens the API's own URL."""
        routes = (route for route in http.app.router.routes() if route.method != "HEAD")
        endpoints = [f"{route.method} {route.resource.canonical}" for route in routes]
        return json_response({"object": "list", "endpoints": endpoints})

    async def health(self, http: web.Request) -> web.Response:
        if self._traffic.draining:
            return json_response({"status": "draining"}, status=503)
        failed = max(engine.stats().failed for engine in self._model.engines)
        if failed >= FAILING or self._preparing.stuck:
            return json_response({"status": "failing"}, status=503)
        return json_response({"status": "ok"})

    async def models(self, http: web.Request) -> web.Response:
        entries = [self._entry(name) for name in self._model.by_name]
        return json_response({"object": "list", "data": entries})

    async def model(self, http: web.Request) -> web.Response:
        return json_response(self._entry(http.match_info["name"]))

    def _entry(self, name: str) -> dict[str, Any]:
        """The model of this name, as /v1/models lists it; 404 if there is none."""
        engine = engine_of(self._model, name)
        return {
            "id": name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "twellctl",
            "max_model_len": engine.context,
            "twell": {
                "chat": self._model.tokenizer.chat_template is not None,
                "drafters": list(engine.drafters),
            },
        }

    async def answer(
        self,
        parse: Callable[[dict[str, Any], dict[str, float]], Request],
        make_plan: Callable[[ServedModel, Request], Plan],
        form: type[Answer],
        http: web.Request,
    ) -> web.StreamResponse:
        """What is asked, as `parse` reads it and `make_plan` sees to it, in this `form`."""

        def plan_of(body: bytes) -> Plan:
            return make_plan(self._model, parse(request_object(body), self._model.defaults))

        with self._traffic.answering():
            body = await self._body(http)
            until = asyncio.get_running_loop().time() + self._limits.answer_seconds
            async with self._time_limit(until, "the prompt was not ready", "shorten it"):
                plan = await self._preparing(body, plan_of)
                if plan.grammar is not None:
                    async with self._traffic.beginning():
                        plan = plan.guided(await self._grammars(plan.grammar))
            current().prompt_tokens = plan.prompt_tokens
            name = plan.options.model or self._model.name
            answer = form(replace(plan.options, model=name), self._model.spelling)
            if plan.options.stream:
                return await self._stream(http, plan, answer, until)
            async with self._time_limit(until):
                return await self._whole(plan, answer)

    async def _body(self, http: web.Request) -> bytes:
        if (http.content_length or 0) > self._limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes, http.content_length)
        try:
            async with self._traffic.beginning(self._limits.body_seconds):
                return await http.read()
        except TimeoutError:
            message = f"the body did not arrive within {self._limits.body_seconds:g} s"
            raise ApiError(408, message, code="body_timeout") from None

    async def _whole(self, plan: Plan, answer: Answer) -> web.Response:
        choices = [Choice(task.index) for task in plan.tasks]
        async with aclosing(self._pieces(plan)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        usage = Usage(plan.prompt_tokens, sum(choice.num_tokens for choice in choices))
        return json_response(answer.whole(choices, usage))

    async def _stream(
        self, http: web.Request, plan: Plan, answer: Answer, until: float
    ) -> web.StreamResponse:
        events = EventStream(http)
        with suppress(ConnectionError):  # the client has gone
            try:
                async with self._time_limit(until):
                    await self._send_all(events, plan, answer)
            except Exception as error:
                if isinstance(error, ConnectionError) or not events.begun:
                    raise
                await self._send_failure(events, note_failure(http, error))
        return events.response

    async def _send_all(self, events: "EventStream", plan: Plan, answer: Answer) -> None:
        usage, begun = Usage(plan.prompt_tokens), set()
        async with aclosing(self._pieces(plan)) as pieces:
            async for index, piece in pieces:
                opening = [] if index in begun else answer.opening(index)
                begun.add(index)
                for chunk in opening + answer.chunks(index, piece):
                    await events.send(chunk)
                if piece.finish_reason:
                    usage.completion_tokens += piece.num_tokens
        for chunk in answer.closing(usage):
            await events.send(chunk)
        await events.end()

    async def _send_failure(self, events: "EventStream", failure: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.farewell_seconds):
                await events.send(failure)
        except TimeoutError:  # the client does not read
            if events.http.transport:
                events.http.transport.abort()

    async def _pieces(self, plan: Plan) -> AsyncGenerator[tuple[int, Piece], None]:
        """(index of the choice, piece) of all choices, as they come.

        When they come faster than they are taken, several of a choice are one, but where each is to
        be told apart.
        """
        streams = together([self._timed(task, plan) for task in plan.tasks])
        async with aclosing(streams):
            async for given in streams:
                for index, pieces in given.items():
                    for piece in pieces if plan.options.drafters else [joined(pieces)]:
                        yield index, piece

    def _timed(self, task: Task, plan: Plan) -> AsyncGenerator[Piece, None]:
        detokenizer = Detokenizer(self._model.tokenizer, task.continued)
        stops = StopStrings(plan.options.stops)
        how = task.sampling, task.echoed
        pieces = complete(plan.engine, detokenizer, stops, task.prompt, *how)
        pieces = self._metrics.timed(pieces, plan.engine)
        return with_calls(pieces) if plan.calls else pieces

    @asynccontextmanager
    async def _time_limit(
        self,
        until: float,
        what: str = "the answer was not complete",
        cure: str = "lower max_tokens",
    ) -> AsyncGenerator[None, None]:
        """504 at `until`, a moment of the event loop's clock."""
        try:
            async with asyncio.timeout_at(until):
                yield
        except TimeoutError:
            message = f"{what} within {self._limits.answer_seconds:g} s: {cure}"
            raise ApiError(504, message, code="timeout") from None


class EventStream:
    """Server-sent events; status 200 goes out with the first, so an early failure has its own."""

    def __init__(self, http: web.Request):
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self.http = http

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: dict[str, Any]) -> None:
        named = f"event: {event['type']}\n" if "type" in event else ""  # as /v1/responses does
        await self._write(to_json(event), named)

    async def end(self) -> None:
        """OpenAI's mark after the last event."""
        await self._write("[DONE]")

    async def _write(self, data: str, named: str = "") -> None:
        if not self.response.prepared:
            await self.response.prepare(self.http)
        await self.response.write(f"{named}data: {data}\n\n".encode())
