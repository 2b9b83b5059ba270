"""Every failure as an HTTP status and OpenAI's error JSON."""

import logging
import re
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from twellctl.decoding.engine import EngineClosed, EngineError, GuideError, OutOfMemory, QueueFull
from twellctl.errors import reason
from twellctl.files.strict_json import to_json
from twellctl.serving.request_fields import ApiError

log = logging.getLogger(__name__)
aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")  # what aiohttp itself has to say, see below
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


def json_response(body: dict[str, Any], **how: Any) -> web.Response:
    """An answer of JSON; `ValueError`, which becomes a 500, if it would hold NaN."""
    return web.json_response(body, dumps=to_json, **how)


@web.middleware
async def answer_errors(http: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever a handler raises, as a status and an error object."""
    try:
        return await handler(http)
    except Exception as error:
        failure = as_api_error(error, http)
        headers = dict(_HEADERS.get(failure.status, {}))
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = error.headers["Allow"]
        return json_response(failure.body(), status=failure.status, headers=headers)


def as_api_error(error: Exception, http: web.Request) -> ApiError:
    """The error that the client gets; an unexpected failure is logged too, in one line."""
    match error:
        case ApiError():
            return error
        case OutOfMemory():
            return ApiError(503, str(error), code="out_of_memory")
        case GuideError():
            return ApiError(400, str(error), code="json_schema")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case EngineClosed():
            return ApiError(503, str(error), code="stopping")
        case web.HTTPException():
            return _of_http_error(error, http)
        case web.RequestPayloadError():
            return ApiError(400, f"the body cannot be read: {reason(error)}", code="bad_body")
    said = reason(error)
    if not isinstance(error, EngineError):
        said = f"{type(error).__name__}: {said}"
    log.error("%s %s failed: %s", http.method, http.path, said)
    return ApiError(500, f"internal error: {said}", code="internal_error")


def _of_http_error(error: web.HTTPException, http: web.Request) -> ApiError:
    """An error that aiohttp itself raised for a request."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the body is too large", code="body_too_large")
        case web.HTTPNotFound():
            message = f"no such URL: {http.method} {http.path} (GET /v1 lists those there are)"
            return ApiError(404, message, code="unknown_url")
        case web.HTTPMethodNotAllowed():
            allowed = " or ".join(sorted(error.allowed_methods))
            message = f"{http.path} takes {allowed}, not {http.method}"
            return ApiError(405, message, code="method_not_allowed")
    return ApiError(error.status, error.reason)


def _shorten(record: logging.LogRecord) -> bool:
    """Malformed HTTP reaches no handler: aiohttp answers and logs it, with us in one line.

    The bytes that it quotes are left out: a query or a key may be among them.
    """
    error = record.exc_info and record.exc_info[1]
    if error:
        said = re.split(r"[:\s]*(?:b'|b\"|bytearray\()", reason(error))[0]
        record.msg, record.args = f"{record.getMessage()}: {said}", ()
        record.exc_info = None
    return True


aiohttp_log.addFilter(_shorten)
