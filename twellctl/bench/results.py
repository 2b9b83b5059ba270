"""What a bench found: points (one shape, one density), their candidates, JSON and the sentence."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

SCHEMA_VERSION = 1
DENSE, TWELL = "dense", "twell"
FEW_DENSE = "dense few"  # over our own kernels for few tokens
ROUNDING = 2  # times the error of dense eager are rounding
ROUNDING_OF = {"worst_row_error": 4}


@dataclass(frozen=True)
class Candidate:
    """One way to compute, measured. `samples` are seconds a call, one a round.

    `errors` are relative to the reference: "error" over all its rows, "worst_row_error" in the
    worst of them, or what else is compared. `joules` are those of one call, `also` other figures.
    """

    name: str
    kind: str
    samples: tuple[float, ...]
    errors: dict[str, float]
    joules: float | None = None
    also: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return median(self.samples)


@dataclass(frozen=True)
class Outcome:
    """All candidates for the same work, and `timed_by` what.

    `skipped` says of dense candidates that could not run why not.
    """

    timed_by: str
    candidates: tuple[Candidate, ...]
    skipped: dict[str, str]


@dataclass(frozen=True)
class Point:
    """One token count. `about` holds what was measured of the inputs, JSON-ready.

    `reference` is the dtype that errors are relative to. `headline` are the names of the candidates
    over TwELL of whose fastest the sentence speaks.
    """

    tokens: int
    about: dict[str, Any]
    reference: str
    headline: tuple[str, ...]
    outcome: Outcome

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.outcome.candidates

    @property
    def fastest_dense(self) -> Candidate:
        return min((c for c in self.candidates if c.kind == DENSE), key=lambda c: c.seconds)

    @property
    def twell(self) -> Candidate:
        """The candidate over TwELL of which the sentence speaks."""
        named = (c for c in self.candidates if c.name in self.headline)
        return min(named, key=lambda c: c.seconds)

    def over_dense(self, candidate: Candidate) -> float:
        """How many times as fast as the fastest dense candidate."""
        return self.fastest_dense.seconds / candidate.seconds

    @property
    def eager(self) -> Candidate:
        return next(c for c in self.candidates if c.name == "dense eager")

    @property
    def wrong(self) -> list[str]:
        """Of TwELL candidates whose error is not one of rounding, in words."""
        return [
            f"{c.name} has a relative {name.replace('_', ' ')} of {found:.2g} at {self.tokens} "
            f"tokens, where dense eager has {self.eager.errors[name]:.2g}"
            for c in self.candidates
            for name, found in c.errors.items()
            if c.kind == TWELL
            and not found <= ROUNDING_OF.get(name, ROUNDING) * self.eager.errors[name] + 1e-6
        ]

    def to_json(self) -> dict[str, Any]:
        """`about`, then a dict a candidate."""
        return {
            "tokens": self.tokens,
            **self.about,
            "timed_by": self.outcome.timed_by,
            "reference": self.reference,
            "fastest_dense": self.fastest_dense.name,
            "twell": self.twell.name,
            "over_fastest_dense": self.over_dense(self.twell),
            "candidates": {c.name: self._candidate_json(c) for c in self.candidates},
            "skipped": self.outcome.skipped,
        }

    def _candidate_json(self, candidate: Candidate) -> dict[str, Any]:
        energy = {}
        if candidate.joules is not None:
            energy["mj_per_token"] = 1000 * candidate.joules / self.tokens
            if self.eager.joules:
                energy["energy_over_dense_eager"] = candidate.joules / self.eager.joules
        errors = {name: _finite(error) for name, error in candidate.errors.items()}
        return {
            "kind": candidate.kind,
            "ms": 1000 * candidate.seconds,
            "ms_samples": [1000 * sample for sample in candidate.samples],
            "tokens_per_ms": self.tokens / candidate.seconds / 1000,
            "over_fastest_dense": self.over_dense(candidate),
            **errors,
            **candidate.also,
            **energy,
        }


@dataclass(frozen=True)
class Bench:
    """A whole run: `what` was measured ("this model"), where, how, and its points.

    `groups` puts the points that one sentence compares under what it calls them.
    """

    command: str
    facts: dict[str, Any]
    settings: dict[str, Any]
    groups: tuple[tuple[str, tuple[Point, ...]], ...]

    @property
    def points(self) -> list[Point]:
        return [point for _, points in self.groups for point in points]

    @property
    def sentences(self) -> list[str]:
        """What a user wants to know: speed, a sentence a group; energy, where it was measured."""
        place = "CPU" if self.facts["device"] == "CPU" else "GPU"
        found = []
        for what, points in self.groups:
            found.append(sentence(what, points, place))
            found += [energy_sentence(point) for point in points if point.twell.joules is not None]
        return found

    @property
    def wrong(self) -> list[str]:
        return [words for point in self.points for words in point.wrong]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            **self.facts,
            "settings": self.settings,
            "points": [point.to_json() for point in self.points],
            "sentences": self.sentences,
        }


def sentence(what: str, points: tuple[Point, ...], place: str = "GPU") -> str:
    """Like "on this GPU this model is 1.31x faster than compiled dense at 131072 tokens, ..."."""
    ordered = sorted(points, key=lambda point: -point.tokens)
    first, *others = [(point.over_dense(point.twell), point.tokens) for point in ordered]
    faster = "faster than" if round(first[0], 2) > 1 else "as fast as"
    parts = [f"{first[0]:.2f}x {faster} {_called(points)} at {first[1]} tokens"]
    parts += [f"{ratio:.2f}x at {tokens}" for ratio, tokens in others]
    return f"on this {place} {what} is {', '.join(parts)}"


def energy_sentence(point: Point) -> str:
    """Like "at 131072 tokens it takes 6.62 mJ a token, dense eager 7.53 (-12.1 %)..."."""

    def millijoules(candidate: Candidate) -> float:
        return 1000 * candidate.joules / point.tokens

    ours, others = millijoules(point.twell), [point.eager]
    if point.fastest_dense is not point.eager:
        others.append(point.fastest_dense)
    compared = (
        f"{c.name} {millijoules(c):.3g} ({100 * (ours / millijoules(c) - 1):+.1f} %)"
        for c in others
    )
    return f"at {point.tokens} tokens it takes {ours:.3g} mJ a token, {', '.join(compared)}"


def _called(points: tuple[Point, ...]) -> str:
    """The fastest dense candidates in one word, if one will do."""
    fastest = [point.fastest_dense.name for point in points]
    if any(name == FEW_DENSE for name in fastest):
        return "the fastest dense"
    if not any(name.startswith("dense eager") for name in fastest):
        return "compiled dense"
    only_eager = all(
        candidate.kind == TWELL or candidate.name.startswith("dense eager")
        for point in points
        for candidate in point.candidates
    )
    return "eager dense" if only_eager else "the fastest dense"


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None
