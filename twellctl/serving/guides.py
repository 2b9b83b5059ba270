"""Answers that follow a JSON schema: `response_format` as grammars of llguidance. No torch.

https://github.com/guidance-ai/llguidance says which of JSON Schema it knows. And those that begin
with given tokens.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from twellctl.decoding.engine import Guide, GuideError
from twellctl.errors import bounded
from twellctl.files.strict_json import to_json
from twellctl.here.machine import version_of
from twellctl.serving.request_fields import (
    ApiError,
    check_text,
    invalid,
    refuse_keys,
    unknown,
    unsupported,
)

FIELD = "response_format"
GRAMMAR = "%llguidance {}\n"  # how one begins
_OBJECT = {"type": "object"}
# Between two words of JSON: a space, or a new line and its indent. A model that may go on with
# spaces may never stop.
_SPACE = r"( |\n {0,24})?"
_EXTENSION = "x-guidance"
_LEAST = Version("1.9")  # older ones do not take _SPACE


def parse_format(given: Any, where: str = FIELD) -> dict[str, Any] | None:
    """The JSON schema that the answer must follow; None: any text. Raises `ApiError`.

    `json_object` may have a schema, as in llama.cpp's API. Schemas are followed, `strict` or not.
    """
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        refuse_keys(where, given, {"type"})
        return None
    if kind == "json_object":
        refuse_keys(where, given, {"type", "schema"})
        return parse_schema(f"{where}.schema", given.get("schema"), _OBJECT)
    if kind == "json_schema" and isinstance(given.get("json_schema"), dict):
        refuse_keys(where, given, {"type", "json_schema"})
        return parse_named_schema(f"{where}.json_schema", given["json_schema"])
    must = 'must be {"type": "text"}, "json_object", or "json_schema" with {"schema": {...}}'
    raise invalid(where, must, given)


def parse_named_schema(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """The schema of {"name", "description", "strict", "schema"}; raises `ApiError`."""
    refuse_keys(where, given, {"name", "description", "strict", "schema"})
    for name in ("name", "description"):
        check_text(f"{where}.{name}", given.get(name) or "")
    if not isinstance(given.get("strict"), bool | None):
        raise invalid(f"{where}.strict", "must be true or false", given["strict"])
    return parse_schema(f"{where}.schema", given.get("schema"))


def parse_schema(where: str, given: Any, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """`given`, or the `default` for null, if it can be a JSON schema; raises `ApiError`."""
    schema = default if given is None else given
    if not isinstance(schema, dict):
        raise invalid(where, "must be an object", given)
    if _EXTENSION in schema:  # the library's own, which may loosen what the schema says
        raise unknown(f"{where}.{_EXTENSION}")
    return schema


@dataclass(frozen=True)
class Grammar:
    """What an answer must follow, as llguidance reads it, and the parameter that asks for it."""

    text: str
    param: str

    def error(self, why: str) -> ApiError:
        """The error for a schema in it that no answer can follow here; `why` as llguidance says."""
        # a place in the grammar comes before it; then its lines, or the state of the library
        said = re.sub(r"^at \d+\(\d+\): ", "", why)
        said = re.split(r"\n +\d+ \| |\s<(?:state|backtrace)>", said)[0]
        said = bounded(" ".join(said.split()), 300)
        return ApiError(400, f"{self.param}: {said}", param=self.param, code="json_schema")


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """The grammar of answers that follow `schema`."""
    return Grammar(f"{GRAMMAR}start: {json_rule(schema)}\n", FIELD)


def json_rule(schema: dict[str, Any]) -> str:
    """A part of a grammar: JSON that follows `schema`."""
    return f"%json {to_json(schema | {_EXTENSION: {'whitespace_pattern': _SPACE}})}"


class Guides:
    """Of one model: `tokenizer`, tokens 0 to `vocab_size - 1`, and those that end a text."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Iterable[int]):
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(ends)
        self._lock = threading.Lock()
        self._known: Any = None
        self._tokens: dict[str, Any] | None = None

    def check(self, param: str) -> None:
        """`ApiError` if no answer can follow a grammar here."""
        if why_not := self._why_not():
            raise unsupported(param, why_not)

    def _why_not(self) -> str:
        found = version_of("llguidance")
        if found is None or Version(found) < _LEAST:
            return "no llguidance here is new enough: pip install 'llguidance>=1.9'"
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return "this model's tokenizer is not from the tokenizers library"
        return ""

    def prepare(self) -> None:
        """Read the tokens now: it takes a second in which no other thread of Python runs."""
        if not self._why_not():
            self._vocabulary()

    def mark(self, text: str) -> str:
        """A part of a grammar: `text`, or the token that it is by itself, like <tool_call>."""
        token = self._tokenizer.backend_tokenizer.token_to_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def tokens(self) -> dict[str, Any]:
        """What `grammar_trial` must know of the tokens."""
        if self._tokens is None:
            tokenizer = self._tokenizer.backend_tokenizer.to_str()
            sizes = {"vocab_size": self._vocab_size, "ends": self._ends}
            self._tokens = {"tokenizer": tokenizer} | sizes
        return self._tokens

    def build(self, grammar: Grammar) -> Callable[[], Guide]:
        """What gives each text its guide. It can take long: `Grammars` tries it before."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary(), grammar.text, log_level=0)
        matcher.compute_bitmask()  # the first one takes longest
        return lambda: _Following(matcher.deep_copy(), grammar)

    def _vocabulary(self) -> Any:
        """The tokens as llguidance knows them, made for the first who asks."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._known is None:
                known = self.tokens()
                self._known = LLTokenizer(
                    known["tokenizer"], n_vocab=self._vocab_size, eos_token=self._ends
                )
        return self._known


class _Following:
    """A `Guide` of one text that follows a grammar.

    A step that takes more than the library's limits is a `GuideError`: its matcher would let the
    text end there.
    """

    def __init__(self, matcher: Any, grammar: Grammar):
        self._matcher, self._grammar = matcher, grammar

    def compute_bitmask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def consume_token(self, token: int) -> bool:
        taken = self._matcher.consume_token(token)
        self._check()
        return taken

    def _check(self) -> None:
        if self._matcher.is_error():
            said = self._grammar.error(self._matcher.get_error()).message
            raise GuideError(f"{said}; make it simpler")


class Given:
    """A `Guide` of a text that begins with `tokens`, and goes on freely."""

    def __init__(self, tokens: Sequence[int], vocab_size: int):
        self._tokens, self._place, self._bytes = tokens, 0, -(-vocab_size // 8)

    def compute_bitmask(self) -> bytes:
        if self._place >= len(self._tokens):
            return b"\xff" * self._bytes
        return (1 << self._tokens[self._place]).to_bytes(self._bytes, "little")

    def consume_token(self, token: int) -> bool:
        self._place += 1
        return True
