"""Answers that follow a JSON schema: `response_format` as grammars of llguidance. No torch.

https://github.com/guidance-ai/llguidance says which of JSON Schema it knows. And those that begin
with given tokens.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from packaging.version import Version

from twellctl.decoding.engine import Guide
from twellctl.errors import bounded
from twellctl.files.strict_json import to_json
from twellctl.here.machine import version_of
from twellctl.serving.request_fields import ApiError, invalid, unknown, unsupported

FIELD = "response_format"
_OBJECT = {"type": "object"}
# Between two words of JSON: a space, or a new line and its indent. A model that may go on with
# spaces may never stop.
_SPACE = r"( |\n {0,24})?"
_EXTENSION = "x-guidance"
_LEAST = Version("1.9")  # older ones do not take _SPACE


def parse_format(given: Any) -> dict[str, Any] | None:
    """The JSON schema that the answer must follow; None: any text. Raises `ApiError`."""
    must = 'must be {"type": "text"}, "json_object", or "json_schema" with {"schema": {...}}'
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text" or given is None:
        return None
    if kind == "json_object":
        return _OBJECT
    form = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(form, dict) or not isinstance(form.get("schema"), dict):
        raise invalid(FIELD, must, given)
    return form["schema"]


def no_schema(why: str) -> ApiError:
    """The error for a schema that no answer can follow here."""
    return ApiError(
        400, f"{FIELD}: {bounded(' '.join(why.split()), 300)}", param=FIELD, code="json_schema"
    )


class Guides:
    """Of one model: `tokenizer`, tokens 0 to `vocab_size - 1`, and those that end a text."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Iterable[int]):
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(ends)
        self._lock = threading.Lock()
        self._known: Any = None

    def grammar(self, schema: dict[str, Any]) -> str:
        """The grammar of texts that follow `schema`; `ApiError` if no schema can be followed here.

        Whether it is a schema, and how long it takes, shows when it is built.
        """
        found = version_of("llguidance")
        if found is None or Version(found) < _LEAST:
            why = "no llguidance here is new enough"
            raise unsupported(FIELD, f"{why}: pip install 'llguidance>=1.9'")
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise unsupported(FIELD, "this model's tokenizer is not from the tokenizers library")
        if _EXTENSION in schema:  # the library's own, which may loosen what the schema says
            raise unknown(f"{FIELD}.{_EXTENSION}")
        from llguidance import LLMatcher

        try:
            return LLMatcher.grammar_from_json_schema(
                to_json(schema), {"whitespace_pattern": _SPACE}
            )
        except ValueError as error:  # it is too deep, for example
            raise no_schema(str(error)) from None

    def tokens(self) -> dict[str, Any]:
        """What `grammar_trial` must know of the tokens."""
        tokenizer = self._tokenizer.backend_tokenizer.to_str()
        return {"tokenizer": tokenizer, "vocab_size": self._vocab_size, "ends": self._ends}

    def build(self, grammar: str) -> Callable[[], Guide]:
        """What gives each text its guide. It can take long: `Grammars` tries it before."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0)
        matcher.compute_bitmask()  # the first one takes longest
        refused = min(token for token in range(self._vocab_size) if token not in self._ends)
        return lambda: _Following(matcher.deep_copy(), refused)

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

    A step that takes more than the library's limits ends this text with an error: its matcher would
    let the text end there. So one token may be next, and it is then refused.
    """

    def __init__(self, matcher: Any, refused: int):
        self._matcher, self._refused = matcher, refused

    def compute_bitmask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return (1 << self._refused).to_bytes(len(mask), "little")
        return mask

    def consume_token(self, token: int) -> bool:
        return self._matcher.consume_token(token)


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
