"""What bench decode found of whole models: forms at each batch size, floors, JSON, the sentence."""

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from twellctl.bench.results import DENSE, DENSE_FP8, SCHEMA_VERSION, TWELL, finite

# standard deviations of the logits; rounding in bf16 stays far below, a token at random far above
ALLOWED_SHORTFALL = 0.25
ALLOWED_SHORTFALL_FP8 = 0.5  # the judge rounds inputs, which steps in FP8 leave as they are


@dataclass(frozen=True)
class DecodeForm:
    """One form of the model at one batch size. `step_seconds` of the steps that count, two or more.

    `density`: the mean share of neurons that fired for a row, `union` that for some row of a step,
    both in the text that this form wrote. `shortfall` as in `Judged`; None: a fitted model without
    its map, which writes noise, is not judged. `floor_seconds`: what reading
    the weights and the cache of a step takes at the device's copy bandwidth. `chosen`: which of the
    engine's own forms its steps took; None: it has one. `in_fp8`: whether its weights are FP8.
    """

    name: str
    kind: str
    step_seconds: tuple[float, ...]
    density: float
    union: float
    shortfall: float | None
    floor_bytes: int
    floor_seconds: float
    chosen: str | None = None
    in_fp8: bool = False

    @property
    def allowed_shortfall(self) -> float:
        return ALLOWED_SHORTFALL_FP8 if self.in_fp8 else ALLOWED_SHORTFALL

    @property
    def seconds(self) -> float:
        return median(self.step_seconds)

    @property
    def steps_per_second(self) -> float:
        return 1 / self.seconds

    def to_json(
        self, batch: int, dense: "DecodeForm", dense_fp8: "DecodeForm | None"
    ) -> dict[str, Any]:
        """Its figures, `over_dense` relative to `dense`, `over_fp8` to `dense_fp8`."""
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
            "over_fp8": dense_fp8 and dense_fp8.seconds / self.seconds,
            "density": self.density,
            "union": self.union,
            "shortfall": None if self.shortfall is None else finite(self.shortfall),
            "floor_bytes": self.floor_bytes,
            "floor_steps_per_second": 1 / self.floor_seconds,
            "of_floor": self.floor_seconds / self.seconds,
        }


@dataclass(frozen=True)
class DecodePoint:
    """All forms at one batch size; `skipped`: why others were left out."""

    batch: int
    forms: tuple[DecodeForm, ...]
    skipped: dict[str, str]

    @property
    def dense(self) -> DecodeForm:
        """The dense form in our engine, over which ratios are."""
        return next(form for form in self.forms if form.name == DENSE)

    @property
    def dense_fp8(self) -> DecodeForm | None:
        """The same in FP8, if it was run."""
        return next((form for form in self.forms if form.kind == DENSE_FP8), None)

    @property
    def twell(self) -> DecodeForm | None:
        return next((form for form in self.forms if form.kind == TWELL), None)

    def over_dense(self, form: DecodeForm) -> float:
        """How many times as fast as the dense form."""
        return self.dense.seconds / form.seconds

    def over_fp8(self, form: DecodeForm) -> float | None:
        """How many times as fast as the dense form in FP8, if that was run."""
        return None if self.dense_fp8 is None else self.dense_fp8.seconds / form.seconds

    @property
    def wrong(self) -> list[str]:
        """Of forms that chose what the model would not have chosen, in words."""
        return [
            f"{form.name} chose a token {form.shortfall:.2g} standard deviations of the logits "
            f"below the likeliest at batch {self.batch}, where rounding explains "
            f"{form.allowed_shortfall:g}"
            for form in self.forms
            if form.shortfall is not None and not form.shortfall <= form.allowed_shortfall
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "forms": {
                form.name: form.to_json(self.batch, self.dense, self.dense_fp8)
                for form in self.forms
            },
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class DecodeModel:
    """One model: what to call it, facts about it, its points.

    `without_twell`: why neither TwELL nor the dense form in FP8 was run, if so.
    """

    what: str
    described: dict[str, Any]
    points: tuple[DecodePoint, ...]
    without_twell: str | None

    def sentence(self, place: str) -> str:
        """Like "on this GPU it decodes 1.41x as fast as dense bf16 and 1.07x as fast as dense FP8
        at batch 1 (484 steps/s), 1.03x and 0.87x at 16 (249)".
        """
        if self.without_twell is None:
            first, *others = (point for point in self.points if point.twell)
            rivals = ("dense bf16", "dense FP8")
            named = zip(_ratios(first), rivals, strict=False)
            parts = [" and ".join(f"{ratio} as fast as {rival}" for ratio, rival in named)]
            parts[0] += f" at batch {first.batch} ({first.twell.steps_per_second:.0f} steps/s)"
            parts += [
                f"{' and '.join(_ratios(p))} at {p.batch} ({p.twell.steps_per_second:.0f})"
                for p in others
            ]
            return f"on this {place} {self.what} decodes {', '.join(parts)}"
        parts = [
            f"{point.dense.steps_per_second:.4g} steps/s at batch {point.batch}"
            for point in self.points
        ]
        return (
            f"on this {place} {self.what} decodes at {', '.join(parts)} in its dense form; TwELL "
            f"and dense FP8 were not run: {self.without_twell}"
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


def _ratios(point: DecodePoint) -> list[str]:
    """Of TwELL over the dense form, and over that in FP8 if it was run."""
    found = (point.over_dense(point.twell), point.over_fp8(point.twell))
    return [f"{ratio:.2f}x" for ratio in found if ratio is not None]
