"""The page at /: sent as one file, with headers that let it load and run nothing else."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from aiohttp import web


def page_response() -> web.Response:
    """The page; nothing in it depends on the model or on who asks."""
    text, headers = _page()
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    text, style = _part("html"), _part("css")
    script = "".join(_part(kind) for kind in ("chart.js", "js"))
    text = text.replace("<style></style>", f"<style>\n{style}</style>")
    text = text.replace("<script></script>", f"<script>\n{script}</script>")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
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


def _hash(text: str, tag: str) -> str:
    """The policy's name for the page's only element of this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
