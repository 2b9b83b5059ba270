"""twellctl bench train: forward and backward of one gated FFN with the L1 penalty, dense and TwELL.

Inputs are synthetic (`synthetic`). Plain calls, as training makes them, go through copies
of the weights in turn. A call computes y, the sum of |hidden| and, by a random gradient of y, those
of x and of all weights; y and each gradient are compared with float64. Memory is what a call takes
on top of x, the weights and y's gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from twellctl.bench.contest import (
    Contender,
    Course,
    hold,
    open_course,
    relative_error,
)
from twellctl.bench.dense_ffn import fresh_compiler
from twellctl.bench.device import device_facts
from twellctl.bench.peak_memory import passes_memory
from twellctl.bench.results import Point
from twellctl.bench.settings import TrainFfnSettings
from twellctl.bench.synthetic import (
    FfnWeights,
    make_rows,
    make_weights,
    measure_firing,
    rotated_weights,
    spread_of,
    told,
)
from twellctl.bench.timing import Timer
from twellctl.bench.train_forms import (
    ForwardPass,
    TrainedForm,
    dense_forms,
    passes_reference,
    twell_form,
)
from twellctl.bench.train_results import TrainBench
from twellctl.bench.twell_side import require_kernels
from twellctl.bundle.twell_config import SLOTS

DTYPE = torch.bfloat16
PENALTY = 0.125  # beside gradients of hidden of about 1: what goes wrong with it is seen
FORWARD_SAMPLES = 3


def bench_train_ffn(
    settings: TrainFfnSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TrainBench:
    """Measure each density at each token count; `note` is told what comes. Raises `TwellError`."""
    settings.check()
    course = open_course(settings, note, progress)
    groups = []
    for tokens in settings.tokens:
        with fresh_compiler():
            dense = dense_forms(course.device)
            for density in settings.densities:
                point = _point(settings, tokens, density, dense, course)
                groups.append((_called(settings, tokens), (point,)))
    return TrainBench(
        command="bench train",
        facts=device_facts(course.device),
        settings=told(settings),
        groups=tuple(groups),
    )


@dataclass(frozen=True)
class Problem:
    """What all candidates compute on: rows, the gradient of y, weights, the penalty's weight."""

    x: Tensor
    grad_y: Tensor
    rotated: list[FfnWeights]
    penalty: Tensor


def _point(
    settings: TrainFfnSettings,
    tokens: int,
    density: float,
    dense: list[TrainedForm],
    course: Course,
) -> Point:
    device, K, N = course.device, settings.hidden_size, settings.intermediate_size
    made = {"dtype": DTYPE, "generator": torch.Generator(device).manual_seed(settings.seed)}
    weights = make_weights(K, N, density, bias=False, **made)
    x = make_rows(tokens, K, density, spread_of(settings), **made)
    fired = measure_firing(x, weights)
    fired["slots"] = SLOTS
    problem = Problem(
        x,
        torch.randn(x.shape, **made, device=device),
        rotated_weights(weights, device),
        torch.full((1,), PENALTY, device=device),
    )
    twell = twell_form(device, fired["density"])
    forms = [*dense, twell]
    timed = {form.name: _Timed(form, problem) for form in forms}
    # without kernels it computes all the same: that is said
    without_kernels = require_kernels(("auto",), lambda _: timed[twell.name].forward(0), device)
    expected = passes_reference(x, weights, problem.grad_y, PENALTY)

    def errors_of(found: dict[str, Tensor]) -> dict[str, float]:
        return {f"{n}_error": relative_error(found[n], wanted) for n, wanted in expected.items()}

    outcome = hold(
        course,
        [Contender(form.name, form.kind, timed[form.name].both) for form in forms],
        errors_of,
        what=f"{tokens} tokens, density {density:g}",
        tokens=tokens,
        num_inputs=len(problem.rotated),
        graphs=False,
        also=lambda contender: timed[contender.name].also(device),
    )
    about = fired | {
        "density_asked": density,
        "weight_copies": len(problem.rotated),
        "penalty": PENALTY,
        "gradients_mib": (x.nbytes + 3 * weights.down.nbytes) / 2**20,
        "without_kernels": without_kernels,
    }
    return Point(tokens, about, "float64", (twell.name,), outcome)


class _Timed:
    """One form on a problem: its passes by the number of the weights, and what they take."""

    def __init__(self, form: TrainedForm, problem: Problem):
        self.form, self.problem = form, problem
        self.leaves = [form.leaves(weights) for weights in problem.rotated]

    def forward(self, number: int) -> ForwardPass:
        return self.form.forward(self.problem.x, self.leaves[number], self.problem.penalty)

    def both(self, number: int) -> dict[str, Tensor]:
        return self.forward(number).backward(self.problem.grad_y)

    def also(self, device: torch.device) -> dict[str, float]:
        """Milliseconds of the forward pass, and on a GPU the memory of both."""
        timer = Timer(self.forward, len(self.leaves), device, graphed=False)
        found = {"forward_ms": 1000 * median(timer.seconds() for _ in range(FORWARD_SAMPLES))}
        if device.type == "cuda":
            found |= passes_memory(
                lambda: self.forward(0),
                lambda passed: passed.backward(self.problem.grad_y),
                self.problem.x.nbytes,
            )
        return found


def _called(settings: TrainFfnSettings, tokens: int) -> str:
    K, N = settings.hidden_size, settings.intermediate_size
    more = spread_of(settings).describe()
    spread = f", {more}" if more else ""
    return f"training this FFN of {K} x {N} ({tokens} tokens{spread})"
