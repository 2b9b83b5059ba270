"""What bench decode found of whole models: forms at each batch size, floors, JSON, the sentence."""

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from twellctl.bench.decode_chart import chart_of
from twellctl.bench.results import Rivals, Run, compared, finite
from twellctl.report.charts import BarChart

# standard deviations of the logits; rounding in bf16 stays far below, a token at random far above
ALLOWED_SHORTFALL = 0.25
ALLOWED_SHORTFALL_FP8 = 0.5  # the judge rounds inputs, which steps in FP8 leave as they are


@dataclass(frozen=True)
class Stage:
    """Microseconds from the end of the stage before to the end of this one, means over layers.

    `mean` of the blocks that have part in it, `least` and `most` of one block.
    """

    name: str
    mean: float
    least: float
    most: float

    def to_json(self) -> dict[str, Any]:
        return {"us": self.mean, "us_least": self.least, "us_most": self.most}


@dataclass(frozen=True)
class DecodeForm:
    """One form of the model at one batch size. `step_seconds` of the steps that count, two or more.

    `density`: the mean share of neurons that fired for a row, `union` that for some row of a step,
    both in the text that this form wrote. `shortfall` as in `Judged`; None: a fitted model without
    its map, which writes noise, is not judged. `floor_seconds`: what reading the weights and the
    cache of a step takes at the device's copy bandwidth; `weight_bytes`: what all weights take of
    memory. `way`: that its steps went; None: its decoder has no plan. `in_fp8`: whether its weights
    are FP8. `stages` of a layer, if they were asked for and one kernel makes the step.
    """

    name: str
    kind: str
    step_seconds: tuple[float, ...]
    density: float
    union: float
    shortfall: float | None
    floor_bytes: int
    floor_seconds: float
    weight_bytes: int
    way: str | None = None
    in_fp8: bool = False
    stages: tuple[Stage, ...] = ()

    @property
    def allowed_shortfall(self) -> float:
        return ALLOWED_SHORTFALL_FP8 if self.in_fp8 else ALLOWED_SHORTFALL

    @property
    def seconds(self) -> float:
        return median(self.step_seconds)

    @property
    def steps_per_second(self) -> float:
        return 1 / self.seconds

    def to_json(self, point: "DecodePoint") -> dict[str, Any]:
        """Its figures at a `point`, compared with the others there."""
        low, *_, high = quantiles(self.step_seconds, n=10)
        return {
            "kind": self.kind,
            "way": self.way,
            "steps_per_second": self.steps_per_second,
            "tokens_per_second": point.batch * self.steps_per_second,
            "ms": 1000 * self.seconds,
            "ms_p10": 1000 * low,
            "ms_p90": 1000 * high,
            "steps": len(self.step_seconds),
            "over_dense": point.over_dense(self),
            "over_fp8": point.over_fp8(self),
            "density": self.density,
            "union": self.union,
            "shortfall": None if self.shortfall is None else finite(self.shortfall),
            "weight_bytes": self.weight_bytes,
            "floor_bytes": self.floor_bytes,
            "floor_steps_per_second": 1 / self.floor_seconds,
            "of_floor": self.floor_seconds / self.seconds,
            "stages": {stage.name: stage.to_json() for stage in self.stages},
        }


@dataclass(frozen=True)
class DecodePoint(Rivals):
    """All forms at one batch size; `skipped`: why others were left out."""

    batch: int
    forms: tuple[DecodeForm, ...]
    skipped: dict[str, str]

    @property
    def candidates(self) -> tuple[DecodeForm, ...]:
        return self.forms

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
            "forms": {form.name: form.to_json(self) for form in self.forms},
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
            points = [point for point in self.points if point.twell]
            rates = [f"{point.twell.steps_per_second:.0f}" for point in points]
            pairs = zip(points, rates, strict=True)
            places = [f"{point.batch} ({rate})" for point, rate in pairs]
            places[0] = f"batch {points[0].batch} ({rates[0]} steps/s)"
            ratios = compared(points, ("dense bf16", "dense FP8"), places)
            return f"on this {place} {self.what} decodes {ratios}"
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
            "what": self.what,
            "model": self.described,
            "without_twell": self.without_twell,
            "points": [point.to_json() for point in self.points],
        }


@dataclass(frozen=True)
class DecodeBench(Run):
    """A run of `bench decode`; `bandwidth` in bytes a second."""

    bandwidth: float
    models: tuple[DecodeModel, ...]

    @property
    def sentences(self) -> list[str]:
        return [model.sentence(self.place) for model in self.models]

    @property
    def wrong(self) -> list[str]:
        return [words for model in self.models for point in model.points for words in point.wrong]

    def to_chart(self) -> BarChart:
        """Steps per second of each form by the rows of a step, and what its bytes allow."""
        return chart_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        models = [model.to_json() for model in self.models]
        return self.as_json("bench decode", bandwidth_gb_s=self.bandwidth / 1e9, models=models)
