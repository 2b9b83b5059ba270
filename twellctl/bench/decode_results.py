"""What bench decode found of whole models: forms at each batch size, floors, JSON, the sentence."""

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from twellctl.bench.results import SCHEMA_VERSION, TWELL

ALLOWED_SHORTFALL = 0.25  # standard deviations of the logits; rounding in bf16 stays far below


@dataclass(frozen=True)
class DecodeForm:
    """One form of the model at one batch size. `step_seconds` of the steps that count, two or more.

    `density`: the mean share of neurons that fired for a row, `union` that for some row of a step,
    both in the text that this form wrote. `shortfall` as in `Judged`. `floor_seconds`: what reading
    the weights and the cache of a step takes at the device's copy bandwidth. `chosen`: which of the
    engine's own forms its steps took; None: it has one.
    """

    name: str
    kind: str
    step_seconds: tuple[float, ...]
    density: float
    union: float
    shortfall: float
    floor_bytes: int
    floor_seconds: float
    chosen: str | None = None

    @property
    def seconds(self) -> float:
        return median(self.step_seconds)

    @property
    def steps_per_second(self) -> float:
        return 1 / self.seconds

    def to_json(self, batch: int, dense: "DecodeForm") -> dict[str, Any]:
        """Its figures, `over_dense` relative to `dense`."""
        low, *_, high = quantiles(self.step_seconds, n=10)
        return {
            "kind": self.kind,
            "chosen": self.chosen,
            "steps_per_second": self.steps_per_second,
            "tokens_per_second": batch * self.steps_per_second,
            "ms": 1000 * self.seconds,
            "ms_p10": 1000 * low,
            "ms_p90": 1000 * high,
            "steps": len(self.step_seconds),
            "over_dense": dense.seconds / self.seconds,
            "density": self.density,
            "union": self.union,
            "shortfall": _finite(self.shortfall),
            "floor_bytes": self.floor_bytes,
            "floor_steps_per_second": 1 / self.floor_seconds,
            "of_floor": self.floor_seconds / self.seconds,
        }


@dataclass(frozen=True)
class DecodePoint:
    """All forms at one batch size. `ffn_seconds`: the FFNs of all layers alone, by form."""

    batch: int
    forms: tuple[DecodeForm, ...]
    ffn_seconds: dict[str, float]
    skipped: dict[str, str]

    @property
    def dense(self) -> DecodeForm:
        """The dense form in our engine, over which ratios are."""
        return next(form for form in self.forms if form.name.startswith("dense"))

    @property
    def twell(self) -> DecodeForm | None:
        return next((form for form in self.forms if form.kind == TWELL), None)

    def over_dense(self, form: DecodeForm) -> float:
        """How many times as fast as the dense form."""
        return self.dense.seconds / form.seconds

    @property
    def wrong(self) -> list[str]:
        """Of forms that chose what the model would not have chosen, in words."""
        return [
            f"{form.name} chose a token {form.shortfall:.2g} standard deviations of the logits "
            f"below the likeliest at batch {self.batch}, where rounding explains "
            f"{ALLOWED_SHORTFALL:g}"
            for form in self.forms
            if not form.shortfall <= ALLOWED_SHORTFALL
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "forms": {form.name: form.to_json(self.batch, self.dense) for form in self.forms},
            "ffn_ms": {name: 1000 * seconds for name, seconds in self.ffn_seconds.items()},
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class DecodeModel:
    """One model: what to call it, facts about it, its points; why TwELL was not run, if so."""

    what: str
    described: dict[str, Any]
    points: tuple[DecodePoint, ...]
    without_twell: str | None

    def sentence(self, place: str) -> str:
        """Like "on this GPU it decodes 1.41x faster than its dense form at batch 1: ..."."""
        if self.without_twell is None:
            parts = [_ratio(point) for point in self.points if point.twell]
            return f"on this {place} {self.what} decodes {'; '.join(parts)}"
        parts = [
            f"{point.dense.steps_per_second:.4g} steps/s at batch {point.batch}"
            for point in self.points
        ]
        return (
            f"on this {place} {self.what} decodes at {', '.join(parts)} in its dense form; TwELL "
            f"was not run: {self.without_twell}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.described,
            "without_twell": self.without_twell,
            "points": [point.to_json() for point in self.points],
        }


@dataclass(frozen=True)
class DecodeBench:
    """A whole run; `bandwidth` in bytes a second."""

    facts: dict[str, Any]
    settings: dict[str, Any]
    bandwidth: float
    models: tuple[DecodeModel, ...]

    @property
    def sentences(self) -> list[str]:
        place = "CPU" if self.facts["device"] == "CPU" else "GPU"
        return [model.sentence(place) for model in self.models]

    @property
    def wrong(self) -> list[str]:
        return [words for model in self.models for point in model.points for words in point.wrong]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "bench decode",
            **self.facts,
            "settings": self.settings,
            "bandwidth_gb_s": self.bandwidth / 1e9,
            "models": [model.to_json() for model in self.models],
            "sentences": self.sentences,
        }


def _ratio(point: DecodePoint) -> str:
    twell = point.twell
    ratio = point.over_dense(twell)
    faster = "faster than" if round(ratio, 2) > 1 else "as fast as"
    said = f"{ratio:.2f}x {faster} its dense form at batch {point.batch}"
    return f"{said}: {twell.steps_per_second:.0f} steps/s"


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None
