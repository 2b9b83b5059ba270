"""The bodies of OpenAI's chat and completion requests, read strictly: nothing asked for is ignored.

What this server does not do is refused with 400 and the parameter's name, unless its value asks for
nothing. No HTTP, no torch.
"""

from dataclasses import dataclass
from typing import Any

from twellctl.decoding.engine import MAX_TOP_LOGPROBS
from twellctl.serving.request_fields import (
    check_text,
    flag,
    invalid,
    number,
    required,
    unknown,
    unsupported,
    whole,
)

MAX_CHOICES = 128
MAX_COMPLETION_LOGPROBS = 5
MAX_STOPS = 4
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_COMMON = {
    "max_completion_tokens",
    "max_tokens",
    "model",
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "twell_densities",
}
# Parameters that change no text, by OpenAI's own word: labels, and hints to caches.
_LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
# Known ones that this server lacks, with the values that ask for nothing. Null always does.
_LACKING: dict[str, tuple] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    # spelled so by other servers
    "ignore_eos": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
}
_LACKING_IN_CHAT: dict[str, tuple] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_LACKING_IN_COMPLETIONS: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
}


@dataclass(frozen=True)
class Options:
    """What chat and completion requests share; the defaults are OpenAI's."""

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    top_logprobs: int | None  # None: no log-probabilities
    densities: bool


@dataclass(frozen=True)
class ChatRequest:
    messages: list[dict[str, str]]
    options: Options


@dataclass(frozen=True)
class CompletionRequest:
    prompts: list[str | list[int]]
    options: Options


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """A /v1/chat/completions request; raises `ApiError`."""
    own = {"messages", "logprobs", "top_logprobs"}
    _refuse_others(body, own, lacking=_LACKING | _LACKING_IN_CHAT)
    messages = required(body, "messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message", messages)
    checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return ChatRequest(checked, _options(body, _chat_logprobs(body)))


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """A /v1/completions request; raises `ApiError`."""
    _refuse_others(body, {"prompt", "logprobs"}, lacking=_LACKING | _LACKING_IN_COMPLETIONS)
    prompt = required(body, "prompt")
    prompts = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not isinstance(prompts, list) or not all(
        isinstance(p, str) or _is_tokens(p) for p in prompts
    ):
        raise invalid("prompt", "must be text, a list of tokens, or a list of either", prompt)
    if not prompts or not all(prompts):
        raise invalid("prompt", "must not be empty", prompt)
    for text in prompts:
        if isinstance(text, str):
            check_text("prompt", text)
    top_logprobs = whole(body, "logprobs", None, at_least=0, at_most=MAX_COMPLETION_LOGPROBS)
    options = _options(body, top_logprobs)
    if len(prompts) * options.n > MAX_CHOICES:
        must = f"times n must be at most {MAX_CHOICES} choices"
        raise invalid("prompt", must, len(prompts) * options.n)
    return CompletionRequest(prompts, options)


def _refuse_others(body: dict[str, Any], own: set[str], lacking: dict[str, tuple]) -> None:
    for name, value in body.items():
        if name in own or name in _COMMON or name in _LABELS:
            continue
        if name not in lacking:
            raise unknown(name)
        if not any(_same(value, nothing) for nothing in lacking[name]):
            raise unsupported(name)


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON values: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _options(body: dict[str, Any], top_logprobs: int | None) -> Options:
    return Options(
        model=check_text("model", required(body, "model")),
        max_tokens=_max_tokens(body),
        temperature=number(body, "temperature", 1.0, at_most=2),
        top_p=number(body, "top_p", 1.0, at_most=1),
        top_k=max(whole(body, "top_k", 0, at_least=-1), 0),
        seed=whole(body, "seed", None, at_least=-(2**63), at_most=2**63 - 1),
        stops=_stops(body.get("stop", [])),
        n=whole(body, "n", 1, at_least=1, at_most=MAX_CHOICES),
        stream=flag(body, "stream"),
        include_usage=_include_usage(body),
        top_logprobs=top_logprobs,
        densities=_only_streamed(body, "twell_densities"),
    )


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    wanted = flag(body, "logprobs")
    top = whole(body, "top_logprobs", None, at_least=0, at_most=MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "is only for logprobs: true", top)
    return (top or 0) if wanted else None


def _only_streamed(body: dict[str, Any], name: str) -> bool:
    if flag(body, name) and not flag(body, "stream"):
        raise invalid(name, "is only for stream: true", True)
    return flag(body, name)


def _max_tokens(body: dict[str, Any]) -> int | None:
    old = whole(body, "max_tokens", None, at_least=1)
    new = whole(body, "max_completion_tokens", None, at_least=1)
    if None not in (old, new) and old != new:
        must = f"must equal max_completion_tokens ({new}) if both are given"
        raise invalid("max_tokens", must, old)
    return old if new is None else new


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or "" in stops:
        raise invalid("stop", f"must be text or a list of up to {MAX_STOPS} texts", stop)
    return tuple(check_text("stop", text) for text in stops)


def _include_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options", "must be an object", options)
    if options and not flag(body, "stream"):
        raise invalid("stream_options", "is only for stream: true", options)
    options = {name: value for name, value in options.items() if value is not None}
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise unknown(f"stream_options.{name}")
    if flag(options, "include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation")
    return flag(options, "include_usage")


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, "must be an object", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
    for name, value in message.items():
        # clients send back the messages they got, empty fields included
        if name not in ("role", "content") and value not in (None, []):
            raise unsupported(f"{where}.{name}")
    return {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if not isinstance(content, list):
        return check_text(where, content)
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise invalid(where, 'may only hold parts like {"type": "text", "text": "..."}', part)
    return "".join(check_text(where, part["text"]) for part in content)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
