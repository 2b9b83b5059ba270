"""The page at /: sent as one file, with headers that let it load and run nothing else."""

import base64
import hashlib
from functools import cache
from pathlib import Path

from aiohttp import web


async def page_response(http: web.Request) -> web.Response:
    """The page; nothing in it depends on the model or on who asks."""
    text, headers = _page()
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    style, script = ("\n" + "".join(map(_part, kinds)) for kinds in (["css"], ["chart.js", "js"]))
    text = _part("html").replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script></script>", f"<script>{script}</script>")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # innerHTML and its like raise an error
    }
    return text, {
        "Content-Security-Policy": "; ".join(" ".join(item) for item in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _part(kind: str) -> str:
    return Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")


def _hash(content: str) -> str:
    """The policy's name for an element of this content."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
