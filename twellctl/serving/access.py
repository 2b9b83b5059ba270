"""Who is answered: the Host and Origin headers that are taken, and the key.

A browser lets any web page send requests to any address, this machine's own included. Such a
request tells the page's home in its Origin, and the name that led here in its Host. A page's owner
can make his own names point here (DNS rebinding), but not a bare IP address. So a Host must be a
loopback name, a name that was allowed, or, beyond loopback, an IP address; an Origin must be a
loopback name, an allowed name or the Host's own. All else gets 403, whatever key it brings. Pages
of those origins may read the answers (CORS).
"""

import hmac
import ipaddress
import re
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from twellctl.serving.request_fields import ApiError

OPEN_PATHS = {"/", "/health"}  # these need no key
# Nothing but a name and a port: of more, others could read another name than we do
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{0,5})?", re.ASCII)
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://" + _HOST.pattern, re.ASCII)


@dataclass(frozen=True)
class Access:
    """What is asked of a client."""

    key: str | None = None  # None: no key is asked
    hosts: frozenset[str] = frozenset()  # names of this server besides loopback, in lower case
    beyond_loopback: bool = False  # other machines can reach the address

    def check_names(self, http: web.Request) -> None:
        """Raises `ApiError` for requests from another host or site, which no key lets in."""
        host, origin = http.headers.get("Host"), http.headers.get("Origin")
        host_name, origin_name = _host_name(host or ""), _host_name(origin or "", _ORIGIN)
        is_own = is_loopback(host_name) or host_name in self.hosts
        if host is not None and not (is_own or (self.beyond_loopback and is_address(host_name))):
            message = f"the Host header names another machine than this server: {host[:100]!r}"
            raise ApiError(403, message + _remedy(host_name), code="forbidden_host")
        is_friendly = is_loopback(origin_name) or origin_name in self.hosts
        if origin is not None and not (is_friendly or origin_name == host_name != ""):
            message = f"the Origin header names another site than this server: {origin[:100]!r}"
            raise ApiError(403, message + _remedy(origin_name), code="forbidden_origin")

    def check_key(self, http: web.Request) -> None:
        """Raises `ApiError` for requests without the key, where one is needed."""
        if self.key is None or http.path in OPEN_PATHS:
            return
        scheme, _, given = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            message = "a key is needed: send the header 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")
        # bytes: text is only compared in constant time if it is ASCII
        given_bytes = given.strip().encode(errors="surrogateescape")
        if not hmac.compare_digest(given_bytes, self.key.encode()):
            raise ApiError(401, "the key is not this server's", code="invalid_api_key")


def guard(access: Access):
    """The middleware that lets in whom `access` does."""

    @web.middleware
    async def checked(http: web.Request, handler: Handler) -> web.StreamResponse:
        access.check_names(http)
        asks_first = "Access-Control-Request-Method" in http.headers
        if http.method == "OPTIONS" and asks_first:  # a browser does so, without the key
            return web.Response(status=204, headers=_what_pages_may_send(http))
        access.check_key(http)
        return await handler(http)

    return checked


def reading(access: Access):
    """What an answer says as it begins: the page that asked may read it, if `access` takes it."""

    async def allow(http: web.Request, response: web.StreamResponse) -> None:
        if (origin := http.headers.get("Origin")) is None:
            return
        try:
            access.check_names(http)
        except ApiError:
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"

    return allow


def _what_pages_may_send(http: web.Request) -> dict[str, str]:
    headers = http.headers.get("Access-Control-Request-Headers", "")
    allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
    return allowed | ({"Access-Control-Allow-Headers": headers} if headers else {})


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine and reachable from nowhere else."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether `host` is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_name(given: str, form: re.Pattern[str] = _HOST) -> str:
    """The name or address in a Host or Origin header, in lower case; "" in one of another form."""
    match = form.fullmatch(given)
    return (match["address"] or match["name"]).lower() if match else ""


def _remedy(name: str) -> str:
    return f"; if it is yours, start serve-local with --allow-host {name}" if name else ""
