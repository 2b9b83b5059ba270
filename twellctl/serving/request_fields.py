"""A client's JSON, read field by field; what is wrong becomes OpenAI's error. No HTTP, no torch."""

import json
import math
from typing import Any, overload


class ApiError(Exception):
    """What the client gets instead of an answer: an HTTP status and OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        """The error object as JSON goes out."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def request_object(content: bytes) -> dict[str, Any]:
    """The request's JSON object without its nulls, which stand for a default."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else error
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_shown(body)}")
    return {name: value for name, value in body.items() if value is not None}


def required(body: dict[str, Any], name: str) -> Any:
    """The field's value; an error if it is not there."""
    if name not in body:
        raise ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    return body[name]


def flag(body: dict[str, Any], name: str) -> bool:
    """A boolean field, false by default."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, "must be true or false", value)
    return value


@overload
def whole(
    body: dict[str, Any], name: str, default: int, *, at_least: int, at_most: float = math.inf
) -> int: ...


@overload
def whole(
    body: dict[str, Any], name: str, default: None, *, at_least: int, at_most: float = math.inf
) -> int | None: ...


def whole(
    body: dict[str, Any],
    name: str,
    default: int | None,
    *,
    at_least: int,
    at_most: float = math.inf,
) -> int | None:
    """An integer field within its bounds."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(name, "must be a whole number", value)
    if not at_least <= value <= at_most:
        bounds = f">= {at_least}" if at_most == math.inf else f"{at_least} to {at_most}"
        raise invalid(name, f"must be {bounds}", value)
    return value


def number(
    body: dict[str, Any],
    name: str,
    default: float,
    *,
    at_least: float = 0,
    at_most: float,
    shown: str | None = None,
) -> float:
    """A number field within its bounds; `shown`: what errors call it."""
    value = body.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(shown or name, "must be a number", value)
    if not at_least <= value <= at_most:  # NaN is not either
        raise invalid(shown or name, f"must be {at_least} to {at_most}", value)
    return float(value)


def check_text(param: str, value: Any) -> str:
    """`value` if it is text that a tokenizer can take."""
    if not isinstance(value, str):
        raise invalid(param, "must be text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(param, "must be valid Unicode (no lone surrogates)", value) from None
    return value


def invalid(param: str, must: str, value: Any) -> ApiError:
    """The error for a value: what it must be, and what was seen."""
    return ApiError(400, f"{param} {must}, got {_shown(value)}", param=param, code="invalid_value")


def refuse_others(body: dict[str, Any], taken: set[str], lacking: dict[str, tuple]) -> None:
    """The errors for all but `taken`; those `lacking` may have the values that ask for nothing."""
    for name, value in body.items():
        if name not in taken and name not in lacking:
            raise unknown(name)
        if name not in taken and not any(_same(value, nothing) for nothing in lacking[name]):
            raise unsupported(name)


def refuse_keys(where: str, given: dict[str, Any], taken: set[str]) -> None:
    """The errors for all fields of a nested object but `taken`; null asks for nothing."""
    for name, value in given.items():
        if name not in taken and value is not None:
            raise unknown(f"{where}.{name}")


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON values: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def unknown(param: str) -> ApiError:
    """The error for a parameter that nobody knows."""
    message = f"unknown parameter {_shown(param)}"
    return ApiError(400, message, param=param, code="unknown_parameter")


def unsupported(param: str, why: str = "") -> ApiError:
    """The error for a parameter that OpenAI knows and this server does not do."""
    message = f"{param} is not supported by this server{why and f', {why}'}: leave it out"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _shown(value: Any) -> str:
    text = ""
    for part in json.JSONEncoder().iterencode(value):  # as far as it is shown: it may be megabytes
        text += part
        if len(text) > 60:
            return text[:57] + "..."
    return text
