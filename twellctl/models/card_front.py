"""The front matter of a model card: what hubs read of a model, as YAML."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from twellctl.errors import TwellError
from twellctl.models.carried import CARD, own_file

TAGS = ["twell", "sparse", "relu"]
_LICENCE = ("license", "license_name", "license_link")
_LONGEST = 500  # of what is taken from another's card


@dataclass(frozen=True)
class Metric:
    """A figure as hubs show it: what was measured on which text or task."""

    dataset: str
    kind: str
    name: str
    value: float


def front_matter(name: str, base: str | None, source: Path, metrics: Sequence[Metric]) -> str:
    """The lines between the rules: licence as in the card of `source`, base, tags, metrics."""
    known = _licence(source)
    if base:
        known |= {"base_model": base, "base_model_relation": "finetune"}
    known |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": TAGS}
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

    Nothing if there is no such card, or if it is no YAML.
    """
    try:
        with own_file(source / CARD).open(encoding="utf-8", errors="replace") as file:
            opening, *lines = map(str.rstrip, file.read(1 << 16).splitlines() or [""])
        front = yaml.safe_load("\n".join(lines[: lines.index("---")])) if opening == "---" else None
    except (OSError, TwellError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    found = {key: front.get(key) for key in _LICENCE} if isinstance(front, dict) else {}
    return {key: value for key, value in found.items() if _is_text(value)}


def _is_text(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts) and 0 < sum(map(len, texts)) <= _LONGEST
