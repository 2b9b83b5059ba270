"""/v1/responses for plain text: its requests as chats, and its answers. No HTTP, no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

from twellctl.serving.completion import Piece
from twellctl.serving.guides import parse_format, parse_named_schema
from twellctl.serving.openai_requests import DEFAULTS, ChatRequest, parse_chat
from twellctl.serving.openai_responses import Answer, Choice, Usage
from twellctl.serving.request_fields import (
    invalid,
    refuse_keys,
    refuse_others,
    required,
    unsupported,
)

SYSTEM = "instructions"
_SAME = (  # fields that mean the same in a chat request
    "model",
    "temperature",
    "top_p",
    "stream",
    "metadata",
    "user",
    "chat_template_kwargs",
    "store",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "top_k",
    "min_p",
)
_KEPT = ("role", "content")  # of an item
_LABELS = ("type", "id", "status")  # what an answer says of itself, as clients send it back
# with the values that ask for nothing; null always does
_LACKING: dict[str, tuple] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "stream_options": ({},),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def parse_response(body: dict[str, Any], defaults: dict[str, float] = DEFAULTS) -> ChatRequest:
    """A /v1/responses request as the chat that it is; raises `ApiError`."""
    refuse_others(body, {*_SAME, "text", "input", SYSTEM, "max_output_tokens"}, _LACKING)
    chat = {name: body[name] for name in _SAME if name in body}
    given = required(body, "input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise invalid("input", "must be text or a list of messages", given)
    for item in items:
        if isinstance(item, dict) and item.get("type", "message") != "message":
            raise unsupported(f"input of type {item['type']}")
    for number, item in enumerate(items):
        if isinstance(item, dict):
            refuse_keys(f"input[{number}]", item, {*_KEPT, *_LABELS})
    messages = [{"role": "system", "content": body[SYSTEM]}] if body.get(SYSTEM) else []
    for item in items:
        is_message = isinstance(item, dict)
        messages.append({key: item[key] for key in _KEPT if key in item} if is_message else item)
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    made = parse_chat(chat | {"messages": messages}, defaults)
    return replace(made, param="input", schema=_schema(body.get("text", {})))


def _schema(text: Any) -> dict[str, Any] | None:
    """The schema of answers, from the field `text`."""
    if not isinstance(text, dict):
        raise invalid("text", "must be an object", text)
    for name in text.keys() - {"format"}:
        raise unsupported(f"text.{name}")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        named = {name: value for name, value in form.items() if name != "type"}
        return parse_named_schema("text.format", named)
    return parse_format(form, "text.format")


@dataclass
class ResponseAnswer(Answer):
    """/v1/responses: one message of text, whole or in events."""

    so_far: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_events: int = 0

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        return self._response(choices[0].text, choices[0].finish_reason, usage)

    def opening(self, index: int) -> list[dict[str, Any]]:
        begun = {"response": self._response(None, None, None)}
        part = {"type": "output_text", "text": "", "annotations": []}
        return [
            self._event("created", **begun),
            self._event("in_progress", **begun),
            self._event("output_item.added", item=self._item("", None), output_index=0),
            self._event("content_part.added", part=part, **self._place()),
        ]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        self.so_far.append(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        if not piece.text:
            return []
        return [self._event("output_text.delta", delta=piece.text, logprobs=[], **self._place())]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        text, reason = "".join(self.so_far), self.finish_reason
        item = self._item(text, reason)
        kind = "completed" if reason == "stop" else "incomplete"
        return [
            self._event("output_text.done", text=text, logprobs=[], **self._place()),
            self._event("content_part.done", part=item["content"][0], **self._place()),
            self._event("output_item.done", item=item, output_index=0),
            self._event(kind, response=self._response(text, reason, usage)),
        ]

    def _event(self, kind: str, **what: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self.num_events - 1, **what}

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _item(self, text: str, reason: str | None) -> dict[str, Any]:
        status = {None: "in_progress", "stop": "completed"}.get(reason, "incomplete")
        content = [{"type": "output_text", "text": text, "annotations": []}] if reason else []
        item = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def _response(
        self, text: str | None, reason: str | None, usage: Usage | None
    ) -> dict[str, Any]:
        item = None if text is None else self._item(text, reason)
        cut = {"reason": "max_output_tokens"} if reason == "length" else None
        counts = usage and {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.options.model,
            "status": "in_progress" if item is None else item["status"],
            "output": [] if item is None else [item],
            "incomplete_details": cut,
            "error": None,
            "usage": counts,
            "temperature": self.options.sampling.temperature,
            "top_p": self.options.sampling.top_p,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        }
