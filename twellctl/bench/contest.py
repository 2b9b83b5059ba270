"""Candidates for the same work, warmed up, compared with a reference, timed by turns."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twellctl.bench.results import TWELL, Candidate, Outcome
from twellctl.bench.timing import GRAPHS_BELOW, Call, Timer, by_turns
from twellctl.errors import TwellError, first_line

EAGER, COMPILE = "eager", "compile"  # under torch.compile
MUST_RUN = "dense eager"
SMALL_ROW = 0.1  # of the median norm


@dataclass(frozen=True)
class Contender:
    """One way to compute. `call(i)` does so with the inputs of number i and returns the result."""

    name: str
    kind: str
    call: Call


@dataclass(frozen=True)
class Course:
    """How a contest is held; `note` receives what comes, `progress(done, total)` of samples."""

    device: torch.device
    rounds: int
    note: Callable[[str], None]
    progress: Callable[[int, int], None]


def hold(
    course: Course,
    contenders: list[Contender],
    errors_of: Callable[[Any], dict[str, float]],
    *,
    what: str,
    tokens: int,
    num_inputs: int = 1,
    graphs: bool = True,
) -> Outcome:
    """Measure all contenders on `tokens` rows a call; `errors_of(result)` judges inputs 0.

    `graphs` False never replays CUDA graphs. Of the dense ones all but eager may fail, and are left
    out then. Raises `TwellError`.
    """
    timers: dict[str, Timer] = {}
    errors: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    for contender in contenders:
        name = contender.name
        course.note(f"{what}: {name}")
        try:
            result = contender.call(0)
            errors[name] = errors_of(result)
            del result
            graphed = graphs and tokens < GRAPHS_BELOW
            timers[name] = Timer(contender.call, num_inputs, course.device, graphed=graphed)
        except TwellError:
            raise
        except Exception as error:  # whatever a compiler may say
            if contender.kind == TWELL or name == MUST_RUN:
                raise TwellError(f"{name} failed ({what}): {first_line(error)}") from error
            skipped[name] = first_line(error)
            course.note(f"{name} is left out: {skipped[name]}")
    samples = by_turns(timers, course.rounds, course.progress)
    kinds = {contender.name: contender.kind for contender in contenders}
    candidates = tuple(
        Candidate(name, kinds[name], tuple(taken), errors[name]) for name, taken in samples.items()
    )
    return Outcome(timers[MUST_RUN].how, candidates, skipped)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected`."""
    difference = (found.to(expected.dtype) - expected).norm()
    return float(difference / expected.norm().clamp_min(1e-30))


def relative_errors(y: Tensor, expected: Tensor) -> dict[str, float]:
    """Of `y` `[R, K]`: over all rows, and in the worst row that is not next to nothing."""
    difference = (y.to(expected.dtype) - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    overall = relative_error(y, expected)
    # a row in which one neuron just fires is all rounding, on every side
    compared = size > SMALL_ROW * size.median()
    by_row = difference[compared] / size[compared]
    worst = float(by_row.max()) if len(by_row) else overall
    return {"error": overall, "worst_row_error": worst}


def dense_modes(device: torch.device) -> list[str]:
    """What a device is measured under; on the CPU nothing is compiled."""
    return [EAGER, COMPILE] if device.type == "cuda" else [EAGER]


def compiled(function: Callable, name: str) -> Callable:
    """`function` in the mode of that name, for one shape; itself for "eager"."""
    return function if name == EAGER else torch.compile(function, dynamic=False)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before counts inside, and a silent return to eager is an error."""
    torch._dynamo.reset()
    settings = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(settings):
        yield
    torch._dynamo.reset()
