"""OpenAI's endpoints for one model, over aiohttp: requests in, the engine's text out. No torch."""

import asyncio
import json
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web

from twellctl.serving.completion import complete
from twellctl.serving.http_guards import answer_errors, as_api_error, only_local
from twellctl.serving.openai_requests import parse_chat, parse_completion
from twellctl.serving.openai_responses import (
    Answer,
    ChatAnswer,
    Choice,
    TextAnswer,
    Usage,
    model_entry,
)
from twellctl.serving.plan import Plan, ServedModel, Task, check_name, plan_chat, plan_completion
from twellctl.serving.request_fields import parse_json
from twellctl.serving.text_tokens import Detokenizer, StopStrings

MAX_BODY = 4 << 20


def make_app(model: ServedModel) -> web.Application:
    """The application: routes, limits and guards."""
    endpoints = Endpoints(model)
    app = web.Application(middlewares=[answer_errors, only_local], client_max_size=MAX_BODY)
    app.router.add_get("/health", endpoints.health)
    app.router.add_get("/v1/models", endpoints.models)
    app.router.add_get("/v1/models/{name:.+}", endpoints.model)
    app.router.add_post("/v1/chat/completions", endpoints.chat)
    app.router.add_post("/v1/completions", endpoints.completions)
    return app


class Endpoints:
    """The handlers."""

    def __init__(self, model: ServedModel):
        self._model = model

    async def health(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._entry()]})

    async def model(self, http: web.Request) -> web.Response:
        check_name(self._model, http.match_info["name"])
        return web.json_response(self._entry())

    async def chat(self, http: web.Request) -> web.StreamResponse:
        request = parse_chat(parse_json(await http.read()))
        plan = await asyncio.to_thread(plan_chat, self._model, request)
        return await self._answer(http, plan, ChatAnswer(self._model.name))

    async def completions(self, http: web.Request) -> web.StreamResponse:
        request = parse_completion(parse_json(await http.read()))
        plan = await asyncio.to_thread(plan_completion, self._model, request)
        return await self._answer(http, plan, TextAnswer(self._model.name))

    def _entry(self) -> dict[str, Any]:
        return model_entry(self._model.name, self._model.created, self._model.engine.context)

    async def _answer(self, http: web.Request, plan: Plan, answer: Answer) -> web.StreamResponse:
        if plan.options.stream:
            return await self._stream(http, plan, answer)
        usage = Usage(plan.prompt_tokens)
        choices = [await self._choice(task, plan, usage) for task in plan.tasks]
        return web.json_response(answer.whole(choices, usage))

    async def _choice(self, task: Task, plan: Plan, usage: Usage) -> Choice:
        texts = []
        async with self._pieces(task, plan) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
        usage.completion_tokens += piece.num_tokens
        return Choice(task.index, "".join(texts), piece.finish_reason)

    async def _stream(self, http: web.Request, plan: Plan, answer: Answer) -> web.StreamResponse:
        events = EventStream(http)
        with suppress(ConnectionError):  # the client has gone
            try:
                await self._send_all(events, plan, answer)
            except Exception as error:
                if isinstance(error, ConnectionError) or not events.begun:
                    raise
                await events.send(as_api_error(error, http).body())
        return events.response

    async def _send_all(self, events: "EventStream", plan: Plan, answer: Answer) -> None:
        usage = Usage(plan.prompt_tokens)
        for task in plan.tasks:
            chunks = answer.opening(task.index)
            async with self._pieces(task, plan) as pieces:
                async for piece in pieces:
                    for chunk in chunks + answer.chunks(task.index, piece):
                        await events.send(chunk)
                    chunks = []
            usage.completion_tokens += piece.num_tokens
        if plan.options.include_usage:
            await events.send(answer.usage_chunk(usage))
        await events.end()

    def _pieces(self, task: Task, plan: Plan) -> aclosing:
        detokenizer = Detokenizer(self._model.tokenizer, task.continued)
        stops = StopStrings(plan.options.stops)
        engine = self._model.engine
        return aclosing(complete(engine, detokenizer, stops, task.prompt, task.sampling))


class EventStream:
    """Server-sent events; status 200 goes out with the first, so an early failure has its own."""

    def __init__(self, http: web.Request):
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self._http = http

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(json.dumps(event))

    async def end(self) -> None:
        """OpenAI's mark after the last event."""
        await self._write("[DONE]")

    async def _write(self, data: str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._http)
        await self.response.write(f"data: {data}\n\n".encode())
