"""The front matter of a model card: what hubs read of a model, as YAML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from twellctl.errors import TwellError
from twellctl.models.carried import CARD, own_file

TAGS = ["twell", "sparse", "relu"]
_LICENCE_LINE = re.compile(r"(license|license_name|license_link): *([\"']?)([\w.+:/ -]{1,200})\2 *")


@dataclass(frozen=True)
class Metric:
    """A figure as hubs show it: what was measured on which text or task."""

    dataset: str
    kind: str
    name: str
    value: float


def front_matter(name: str, base: str | None, source: Path, metrics: Sequence[Metric]) -> str:
    """The lines between the rules: licence as in the card of `source`, base, tags, metrics."""
    known: dict[str, Any] = {}
    if base:
        known |= {"base_model": base, "base_model_relation": "finetune"}
    known |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": TAGS}
    if metrics:
        known["model-index"] = [{"name": name, "results": [_result(m) for m in metrics]}]
    text = yaml.safe_dump(known, sort_keys=False, allow_unicode=True).rstrip("\n")
    return "\n".join([*_licence(source), text])


def _result(metric: Metric) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": metric.dataset, "name": metric.dataset},
        "metrics": [{"type": metric.kind, "name": metric.name, "value": round(metric.value, 6)}],
    }


def _licence(source: Path) -> list[str]:
    """The lines on the licence that stand in the front matter of the card of `source`."""
    try:
        with own_file(source / CARD).open(encoding="utf-8", errors="replace") as file:
            opening, *lines = file.read(1 << 16).splitlines() or [""]
    except (OSError, TwellError):
        return []
    if opening.strip() != "---" or "---" not in lines:
        return []
    front = lines[: lines.index("---")]
    return [line.strip() for line in front if _LICENCE_LINE.fullmatch(line)]
