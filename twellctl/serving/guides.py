"""Answers that follow a JSON schema: `response_format` as grammars of llguidance. No torch.

https://github.com/guidance-ai/llguidance says which of JSON Schema it knows. And those that begin
with given tokens.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from packaging.version import Version

from twellctl.decoding.engine import Guide
from twellctl.files.strict_json import to_json
from twellctl.here.machine import version_of
from twellctl.serving.request_fields import ApiError, invalid, unsupported

FIELD = "response_format"
_OBJECT = {"type": "object"}
# Between two words of JSON: a space, or a new line and its indent. A model that may go on with
# spaces may never stop.
_SPACE = r"( |\n {0,24})?"
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


class Guides:
    """Of one model: `tokenizer`, tokens 0 to `vocab_size - 1`, and those that end a text."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Iterable[int]):
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(ends)
        self._lock = threading.Lock()
        self._known: Any = None

    def __call__(self, schema: dict[str, Any]) -> Callable[[], Guide]:
        """What gives each text its guide; `ApiError` for a schema that is none."""
        found = version_of("llguidance")
        if found is None or Version(found) < _LEAST:
            why = "no llguidance here is new enough"
            raise unsupported(FIELD, f"{why}: pip install 'llguidance>=1.9'")
        from llguidance import LLMatcher

        known = self._vocabulary()
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                to_json(schema), {"whitespace_pattern": _SPACE}
            )
            wrong = LLMatcher.validate_grammar(grammar, known)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            message = f"{FIELD}: {' '.join(wrong.split())[:300]}"
            raise ApiError(400, message, param=FIELD, code="json_schema")
        return lambda: LLMatcher(known, grammar, log_level=0)

    def _vocabulary(self) -> Any:
        """The tokens as llguidance knows them, made for the first who asks."""
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise unsupported(FIELD, "this model's tokenizer is not from the tokenizers library")
        with self._lock:
            if self._known is None:
                self._known = LLTokenizer(
                    backend.to_str(), n_vocab=self._vocab_size, eos_token=self._ends
                )
        return self._known


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
