"""What a bench found: points (one shape, one density), their candidates, JSON and the sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SCHEMA_VERSION = 2
DENSE, DENSE_FP8, TWELL = "dense", "dense FP8", "twell"
ROUNDING = 2  # times the error of dense eager are rounding
ROUNDING_OF = {"worst_row_error": 4}


@dataclass(frozen=True)
class Candidate:
    """One way to compute, measured. `samples` are seconds a call, one a round.

    `errors` are relative to the reference: "error" over all its rows, "worst_row_error" in the
    worst of them, or what else is compared.
    """

    name: str
    kind: str
    samples: tuple[float, ...]
    errors: dict[str, float]

    @property
    def seconds(self) -> float:
        return median(self.samples)


class Rivals:
    """Measures of the same work: how many times as fast as the dense ones others are."""

    @property
    def candidates(self) -> Sequence[Any]:
        """Each of a `kind`, of so many `seconds`."""
        raise NotImplementedError

    @property
    def dense(self) -> Any:
        """The fastest of its kind, as the others are; None where there is none."""
        return self._fastest(DENSE)

    @property
    def dense_fp8(self) -> Any:
        return self._fastest(DENSE_FP8)

    @property
    def twell(self) -> Any:
        return self._fastest(TWELL)

    def _fastest(self, kind: str) -> Any:
        found = (one for one in self.candidates if one.kind == kind)
        return min(found, key=lambda one: one.seconds, default=None)

    def over_dense(self, one: Any) -> float:
        return self.dense.seconds / one.seconds

    def over_fp8(self, one: Any) -> float | None:
        return None if self.dense_fp8 is None else self.dense_fp8.seconds / one.seconds

    def ratios(self, one: Any) -> list[str]:
        """Over the dense one, and over that in FP8 if there is one."""
        found = (self.over_dense(one), self.over_fp8(one))
        return [f"{ratio:.2f}x" for ratio in found if ratio is not None]


def compared(measured: Sequence[Rivals], rivals: Sequence[str], places: Sequence[str]) -> str:
    """TwELL's ratios at each of `places`, the rivals named at the first."""
    ratios = [each.ratios(each.twell) for each in measured]
    first = zip(ratios[0], rivals, strict=False)
    parts = [" and ".join(f"{ratio} as fast as {rival}" for ratio, rival in first)]
    parts += [" and ".join(other) for other in ratios[1:]]
    return ", ".join(f"{part} at {place}" for part, place in zip(parts, places, strict=True))


@dataclass(frozen=True)
class Outcome:
    """All candidates for the same work, and `timed_by` what.

    `skipped` says of dense candidates that could not run why not.
    """

    timed_by: str
    candidates: tuple[Candidate, ...]
    skipped: dict[str, str]


@dataclass(frozen=True)
class Point(Rivals):
    """One token count. `about` holds what was measured of the inputs, JSON-ready.

    `reference` is the dtype that errors are relative to.
    """

    tokens: int
    about: dict[str, Any]
    reference: str
    outcome: Outcome

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.outcome.candidates

    @property
    def wrong(self) -> list[str]:
        """Of TwELL candidates whose error is not one of rounding, in words."""
        eager = next(c for c in self.candidates if c.name == "dense eager")
        allowed = {
            name: (ROUNDING_OF.get(name, ROUNDING) * error + 1e-6, f"dense eager has {error:.2g}")
            for name, error in eager.errors.items()
        }
        return [
            f"{c.name} has a relative {name.replace('_', ' ')} of {c.errors[name]:.2g} at "
            f"{self.tokens} tokens, where {words}"
            for c in self.candidates
            for name, (most, words) in allowed.items()
            if c.kind == TWELL and not c.errors[name] <= most
        ]

    def to_json(self) -> dict[str, Any]:
        """`about`, then a dict a candidate."""
        return {
            "tokens": self.tokens,
            **self.about,
            "timed_by": self.outcome.timed_by,
            "reference": self.reference,
            "fastest_dense": self.dense.name,
            "twell": self.twell.name,
            "over_fastest_dense": self.over_dense(self.twell),
            "candidates": {c.name: self._candidate_json(c) for c in self.candidates},
            "skipped": self.outcome.skipped,
        }

    def _candidate_json(self, candidate: Candidate) -> dict[str, Any]:
        errors = {name: finite(error) for name, error in candidate.errors.items()}
        return {
            "kind": candidate.kind,
            "ms": 1000 * candidate.seconds,
            "ms_samples": [1000 * sample for sample in candidate.samples],
            "tokens_per_ms": self.tokens / candidate.seconds / 1000,
            "over_fastest_dense": self.over_dense(candidate),
            **errors,
        }


@dataclass(frozen=True)
class Run:
    """What both benches report: where and how."""

    facts: dict[str, Any]
    settings: dict[str, Any]

    @property
    def sentences(self) -> list[str]:
        """What a user wants to know."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        return "CPU" if self.facts["device"] == "CPU" else "GPU"

    def as_json(self, command: str, **found: Any) -> dict[str, Any]:
        about = {"schema_version": SCHEMA_VERSION, "command": command, **self.facts}
        return about | {"settings": self.settings, **found, "sentences": self.sentences}


@dataclass(frozen=True)
class Bench(Run):
    """A run of `bench model`: `what` was measured ("this model"), and its points."""

    what: str
    points: tuple[Point, ...]

    @property
    def sentences(self) -> list[str]:
        """Like "on this GPU this model is 1.31x as fast as compiled bf16 at 131072 tokens, 1.42x at
        256".
        """
        points = sorted(self.points, key=lambda point: -point.tokens)
        rivals = [f"{_called(points)} bf16"]
        places = [f"{points[0].tokens} tokens", *(str(point.tokens) for point in points[1:])]
        return [f"on this {self.place} {self.what} is {compared(points, rivals, places)}"]

    @property
    def wrong(self) -> list[str]:
        return [words for point in self.points for words in point.wrong]

    def to_json(self) -> dict[str, Any]:
        return self.as_json("bench model", points=[point.to_json() for point in self.points])


def _called(points: Sequence[Point]) -> str:
    """The fastest dense candidates in a word or two."""
    modes = {point.dense.name.split()[1] for point in points}
    words = {"eager": "eager", "compile": "compiled"}
    return words[modes.pop()] if len(modes) == 1 else "the fastest dense"


def finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if abs(number) < float("inf") else None
