"""The bodies of OpenAI's chat and completion requests, read strictly: nothing asked for is ignored.

What this server does not do is refused with 400 and the parameter's name, unless its value asks for
nothing. No HTTP, no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from twellctl.decoding.engine import MAX_TOP_LOGPROBS, Sampling
from twellctl.serving.guides import FIELD, parse_format
from twellctl.serving.request_fields import (
    check_text,
    flag,
    invalid,
    number,
    refuse_keys,
    refuse_others,
    required,
    unknown,
    unsupported,
    whole,
)
from twellctl.serving.tools import CHOICE, PARALLEL, TOOLS, Calling, parse_tools
from twellctl.text.messages import ROLES, TEXTS, with_object
from twellctl.text.tokens import Messages

MAX_CHOICES = 128
MAX_COMPLETION_LOGPROBS = 5
MAX_STOPS, MAX_STOP = 64, 1000  # texts, characters of one
MAX_BIASES = 1024

_COMMON = {"model", "n", "seed", "stop", "stream", "stream_options", "temperature", "logit_bias"}
_COMMON |= {"max_tokens", "max_completion_tokens", "min_p", "top_k", "top_p"}
_COMMON |= {"frequency_penalty", "presence_penalty", "repetition_penalty"}
_COMMON |= {"twell_densities", "twell_drafters"}
# Parameters that change no text: labels, and hints to caches, by OpenAI's and others' word.
_LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
_LABELS |= {"cache_prompt", "id_slot", "keep_alive", "request_id", "service_tier", "store"}
# Known ones that this server lacks, with the values that ask for nothing. Null always does.
_LACKING: dict[str, tuple] = {
    # spelled so by other servers
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "options": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
_LACKING_IN_CHAT: dict[str, tuple] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_LACKING_IN_COMPLETIONS: dict[str, tuple] = {"best_of": (1,), "suffix": ("",)}
# fields of a message besides role and content; those not passed on to the template change no text
_PASSED_ON = {"name", "reasoning_content", "tool_call_id", "tool_calls"}
_LABELS_OF_MESSAGES = {"annotations", "cache_control", "id", "parsed"}
_LABELS_OF_CALLS = {"id", "index", "type"}
_LABELS_OF_PARTS = {"annotations", "cache_control", "id", "logprobs"}
_OURS = {"messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message"}
# what generation_config.json may say, and OpenAI's values
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Options:
    """What chat and completion requests share; the defaults are the server's.

    `drafters`: a stream says of each token who drafted it.
    """

    model: str | None  # None: the one that is served
    max_tokens: int | None
    sampling: Sampling  # of all choices; the prompt decides of its `max_tokens`
    stops: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    drafters: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """`template`: what else the chat template is to know; `goes_on`: the last message is open.

    `calling`: the functions that the model may call; `schema` is the JSON schema of the answer;
    `param` is what the client calls its messages.
    """

    messages: Messages
    options: Options
    template: dict[str, Any]
    goes_on: bool = False
    calling: Calling = field(default_factory=Calling)
    schema: dict[str, Any] | None = None
    param: str = "messages"


@dataclass(frozen=True)
class CompletionRequest:
    """`echo`: the answer begins with the prompt."""

    prompts: list[str | list[int]]
    options: Options
    echo: bool = False


def parse_chat(body: dict[str, Any], defaults: dict[str, float] = DEFAULTS) -> ChatRequest:
    """A /v1/chat/completions request; raises `ApiError`.

    `defaults`: for what of `DEFAULTS` it does not name.
    """
    own = {"messages", "logprobs", "top_logprobs", "chat_template_kwargs", "continue_final_message"}
    own |= {TOOLS, CHOICE, PARALLEL, FIELD}
    refuse_others(body, own | _COMMON | _LABELS, lacking=_LACKING | _LACKING_IN_CHAT)
    messages = required(body, "messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message", messages)
    checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    template = body.get("chat_template_kwargs", {})
    if not isinstance(template, dict) or template.keys() & _OURS:
        must = f"must be an object without {', '.join(sorted(_OURS))}"
        raise invalid("chat_template_kwargs", must, template)
    goes_on = flag(body, "continue_final_message")
    if goes_on and (checked[-1]["role"] != "assistant" or not checked[-1]["content"]):
        must = "needs a last message of the assistant with text"
        raise invalid("continue_final_message", must, goes_on)
    options = _options(body, _chat_logprobs(body), defaults)
    schema = parse_format(body.get(FIELD))
    return ChatRequest(checked, options, template, goes_on, parse_tools(body), schema)


def parse_completion(
    body: dict[str, Any], defaults: dict[str, float] = DEFAULTS
) -> CompletionRequest:
    """A /v1/completions request; raises `ApiError`. `defaults` as in `parse_chat`."""
    taken = {"prompt", "logprobs", "echo"} | _COMMON | _LABELS
    refuse_others(body, taken, lacking=_LACKING | _LACKING_IN_COMPLETIONS)
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
    echo = flag(body, "echo")
    options = _options(body, top_logprobs, defaults, least=0 if echo else 1)
    for name in ("frequency_penalty", "presence_penalty") if echo else ():
        if getattr(options.sampling, name):
            raise unsupported("echo", f"it cannot be combined with {name}")
    if len(prompts) * options.n > MAX_CHOICES:
        must = f"times n must be at most {MAX_CHOICES} choices"
        raise invalid("prompt", must, len(prompts) * options.n)
    return CompletionRequest(prompts, options, echo)


def _options(
    body: dict[str, Any], top_logprobs: int | None, defaults: dict, least: int = 1
) -> Options:
    """`least`: tokens that may be asked for."""
    defaults = DEFAULTS | defaults
    sampling = Sampling(
        max_tokens=0,
        temperature=number(body, "temperature", defaults["temperature"], at_most=2),
        top_p=number(body, "top_p", defaults["top_p"], at_most=1),
        top_k=max(whole(body, "top_k", int(defaults["top_k"]), at_least=-1), 0),
        min_p=number(body, "min_p", defaults["min_p"], at_most=1),
        repetition_penalty=number(
            body, "repetition_penalty", defaults["repetition_penalty"], at_least=0.01, at_most=100
        ),
        frequency_penalty=number(body, "frequency_penalty", 0.0, at_least=-2, at_most=2),
        presence_penalty=number(body, "presence_penalty", 0.0, at_least=-2, at_most=2),
        logit_bias=_logit_bias(body.get("logit_bias", {})),
        seed=whole(body, "seed", None, at_least=-(2**63), at_most=2**63 - 1),
        top_logprobs=top_logprobs,
        densities=_only_streamed(body, "twell_densities"),
    )
    return Options(
        check_text("model", body["model"]) if body.get("model") else None,
        _max_tokens(body, least),
        sampling,
        _stops(body.get("stop", [])),
        whole(body, "n", 1, at_least=1, at_most=MAX_CHOICES),
        flag(body, "stream"),
        _include_usage(body),
        _only_streamed(body, "twell_drafters"),
    )


def _logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    must = f"must be an object of at most {MAX_BIASES} numbers from -100 to 100, by token"
    if not isinstance(given, dict) or len(given) > MAX_BIASES:
        raise invalid("logit_bias", must, given)
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in given):
        raise invalid("logit_bias", must, given)
    return tuple(
        (int(token), number(given, token, 0.0, at_least=-100, at_most=100, shown="logit_bias"))
        for token in given
    )


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    wanted = flag(body, "logprobs")
    top = whole(body, "top_logprobs", None, at_least=0, at_most=MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs", "is only for logprobs: true", top)
    return (top or 0) if wanted else None


def _only_streamed(body: dict[str, Any], name: str) -> bool:
    """A flag that only a request for a stream may set."""
    if flag(body, name) and not flag(body, "stream"):
        raise invalid(name, "is only for stream: true", True)
    return flag(body, name)


def _max_tokens(body: dict[str, Any], least: int) -> int | None:
    old = whole(body, "max_tokens", None, at_least=least)
    new = whole(body, "max_completion_tokens", None, at_least=least)
    if None not in (old, new) and old != new:
        must = f"must equal max_completion_tokens ({new}) if both are given"
        raise invalid("max_tokens", must, old)
    return old if new is None else new


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"must be text or a list of up to {MAX_STOPS} texts", stop)
    for text in stops:
        if len(check_text("stop", text)) > MAX_STOP:  # each token is looked for in all of it
            raise invalid("stop", f"may only hold texts of up to {MAX_STOP} characters", text)
    return tuple(filter(None, stops))


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


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, "must be an object", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
    made: dict[str, Any] = {"role": ROLES[role], "content": _content(message, f"{where}.content")}
    for name, value in message.items():
        # clients send back the messages they got, empty fields included
        if name in ("role", "content", *_LABELS_OF_MESSAGES) or value in (None, [], ""):
            continue
        if name not in _PASSED_ON:
            raise unsupported(f"{where}.{name}")
        read = _tool_calls if name == "tool_calls" else check_text
        made[name] = read(f"{where}.{name}", value)
    return made


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    calls = calls if isinstance(calls, list) else [calls]
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise invalid(where, "must be a list of calls of functions", calls)
        refuse_keys(f"{where}[{place}]", call, {"function", *_LABELS_OF_CALLS})
        inner = f"{where}[{place}].function"
        refuse_keys(inner, function, {"name", "arguments", "parsed_arguments"})
        check_text(f"{inner}.name", function.get("name"))
    return list(map(with_object, calls))


def _content(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""  # of one that called tools, for example
    if not isinstance(content, list):
        return check_text(where, content)
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            raise invalid(where, 'may only hold parts like {"type": "text", "text": "..."}', part)
        refuse_keys(f"{where}[{index}]", part, {"type", "text", *_LABELS_OF_PARTS})
    return "".join(check_text(where, part.get("text")) for part in content)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
