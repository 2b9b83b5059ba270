"""The front matter of a model card, as hubs read it, and its tables: others' text means nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from twellctl.errors import TwellError
from twellctl.models.carried import CARD, own_file

TWELL = "twell"  # a tag of all models
SPARSE = ["sparse", "relu"]  # tags of those whose neurons need not fire
_LICENCE = ("license", "license_name", "license_link")
_NOTHING = ("", "~", "null")
_WEB = ("http://", "https://")
_LONGEST = 500  # of what is taken from another's card


@dataclass(frozen=True)
class Metric:
    """A figure as hubs show it: what was measured on which text or task."""

    dataset: str
    kind: str
    name: str
    value: float


def front_matter(
    name: str,
    base: str | None,
    relation: str,
    source: Path,
    tags: Sequence[str],
    metrics: Sequence[Metric],
) -> str:
    """The lines between the rules: licence as in the card of `source`, `tags`, metrics, and the
    `relation` to the base as hubs call it."""
    known = _licence(source)
    if base:
        known |= {"base_model": base, "base_model_relation": relation}
    known |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    known["tags"] = [TWELL, *tags]
    if metrics:
        known["model-index"] = [{"name": name, "results": [_result(m) for m in metrics]}]
    return yaml.safe_dump(known, sort_keys=False, allow_unicode=True).rstrip("\n")


def _result(metric: Metric) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": metric.dataset, "name": metric.dataset},
        "metrics": [{"type": metric.kind, "name": metric.name, "value": round(metric.value, 6)}],
    }


def _licence(source: Path) -> dict[str, Any]:
    """What the front matter of the card of `source` says of the licence; texts and lists of them.

    Nothing else of it is read, so it may be no YAML elsewhere.
    """
    try:
        if not (card := own_file(source / CARD)).is_file():
            return {}
        with card.open(encoding="utf-8", errors="replace") as file:
            opening, *lines = map(str.rstrip, file.read(1 << 16).splitlines() or [""])
        ours = _of_licence(lines[: lines.index("---")]) if opening == "---" else []
        found = yaml.load("\n".join(ours), Loader=yaml.BaseLoader)  # all that is plain is text
    except (OSError, TwellError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {key: found[key] for key in _LICENCE if key in found and _is_sound(key, found[key])}


def _of_licence(lines: list[str]) -> list[str]:
    """The lines of its keys, with those of lists below them."""
    kept, inside = [], False
    for line in lines:
        if not line.startswith((" ", "-", "\t")):
            inside = line.partition(":")[0].strip() in _LICENCE
        if inside:
            kept.append(line)
    return kept


def _is_sound(key: str, value: Any) -> bool:
    """Whether it is text that means nothing elsewhere; a link leads to the web or a file here."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(t, str) and t not in _NOTHING and is_plain(t) for t in texts):
        return False
    if key == "license_link" and any(":" in t and not t.startswith(_WEB) for t in texts):
        return False
    return 0 < sum(map(len, texts)) <= _LONGEST


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str | None:
    """In Markdown; None where there is no row."""
    rows = list(rows)
    if not rows:
        return None
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(value: object) -> str:
    """Its text, or "?" where that would mean something in a card."""
    text = str(value)
    return text if is_plain(text) else "?"


def is_plain(text: str) -> bool:
    """Whether others' text can stand in a card without meaning anything there."""
    return text.isprintable() and not set("`|<>[]") & set(text)
