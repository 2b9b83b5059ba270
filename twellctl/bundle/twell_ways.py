"""The ways to compute one gated FFN, in one table: who takes what, and what is taken unmeasured.

The route "auto" may go by all ways that take a problem, "twell" by those over what fires (`own`),
"dense" is one way. Which of them numbers of tokens go is a plan (twell_choice.py): measured where a
model is opened, else by the rule here. `run_by_plan` computes an FFN so.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .twell_choice import WayPlan
from .twell_config import ROUTES
from .twell_dense import gated_ffn
from .twell_few import FEW_TOKENS, few_pairs, few_union, takes_few
from .twell_few_walk import suits_few_walk, takes_few_walk
from .twell_launch import KernelSet, device_limits, kernels_for
from .twell_plan import Limits
from .twell_reasons import lies_well
from .twell_sequence import hopper_ffn
from .twell_weights import FFN

# as found on an H200; unmeasured, dense products are taken from this density on, and up to this
# number of tokens
DENSE_FROM, SPARSE_ABOVE = 0.02, 2048
# the same of few tokens, for which there are kernels of their own: up to this number
FEW_DENSE_FROM, FEW_SPARSE_UPTO = 0.1, 16
_MOST_MEASURED = 8192  # tokens; with more of them all ways take longer alike


@dataclass(frozen=True)
class Problem:
    """M tokens, N neurons and inputs of K on a device.

    `in_place`: W_down lies as the kernels read it; else each call copies it. `kind`: of its weights
    (twell_spec.KINDS).
    """

    M: int
    N: int
    K: int
    limits: Limits
    in_place: bool = True
    kind: str = "bf16"

    @property
    def few(self) -> bool:
        """Whether it goes by the kernels for few tokens."""
        return takes_few(self.M, self.N, self.limits, self.kind)


@dataclass(frozen=True)
class Way:
    """One way. `own`: over what fires. `suits`: whether it is the one, by the rule.

    `run(kernels, limits, x, ffn, slots)`; those for few tokens also take what `Onto` has.
    """

    name: str
    takes: Callable[[Problem], bool]
    run: Callable[..., Tensor]
    own: bool = True
    by_rows: bool = True  # whether it reads W_down by rows of neurons
    suits: Callable[[Problem, float | None], bool] = lambda problem, density: True


def _without_slots(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda kernels, limits, x, ffn, slots=0, **how: run(kernels, limits, x, ffn, **how)


def _dense(kernels: object, limits: object, x: Tensor, ffn: FFN, slots: int) -> Tensor:
    return gated_ffn(x, ffn)


WAYS = (
    Way(
        "pairs",
        lambda p: p.limits.hopper and p.few and takes_few_walk(p.M, p.N, p.K, p.limits, p.kind),
        _without_slots(few_pairs),
        suits=lambda p, density: suits_few_walk(p.M, p.N, p.K, density, p.kind),
    ),
    Way("union", lambda p: p.few, _without_slots(few_union)),
    Way("lists", lambda p: p.limits.hopper and not p.few and p.kind == "bf16", hopper_ffn),
    Way("dense", lambda p: True, _dense, own=False, by_rows=False),
)
_FEW = "pairs", "union"
FEW_WAYS = tuple(way for way in WAYS if way.name in _FEW)


def ways_of(route: str, problem: Problem) -> list[Way]:
    """The ways of a route that take `problem`, in order; if there is none, the dense one."""
    if route == "dense":
        found = [way for way in WAYS if way.name == route and way.takes(problem)]
    else:
        found = [way for way in WAYS if (way.own or route == "auto") and way.takes(problem)]
    return found or [WAYS[-1]]


def tops_of(problem: Problem) -> list[int]:
    """Numbers of tokens, ascending, up to each of which one way serves: the powers of two, and
    where other ways begin."""

    def taken(M: int) -> list[str]:
        return [way.name for way in ways_of("auto", replace(problem, M=M))]

    borders = {M for M in range(1, FEW_TOKENS + 1) if taken(M) != taken(M + 1)}
    return sorted({1 << i for i in range(_MOST_MEASURED.bit_length())} | borders)


# ---- unmeasured ----


def by_rule(ways: Sequence[Way], problem: Problem, density: float | None) -> Way:
    """The one of `ways` that is taken unmeasured; `density` None: it is not known."""
    own = next((way for way in ways if way.own and way.suits(problem, density)), None)
    dense = next((way for way in ways if not way.own), None)
    if own is None or (dense is not None and not _pays(own, problem, density)):
        return dense or ways[-1]
    return own


def _pays(way: Way, problem: Problem, density: float | None) -> bool:
    """Whether a way over what fires is taken in the place of dense products."""
    if problem.few and problem.in_place:
        fires_little = density is None or density < FEW_DENSE_FROM
        return way.name == "pairs" or (problem.M <= FEW_SPARSE_UPTO and fires_little)
    return problem.M > SPARSE_ABOVE and density is not None and density < DENSE_FROM


@functools.cache
def plan_by_rule(route: str, problem: Problem, density: float | None) -> WayPlan:
    """Of all numbers of tokens, whatever `problem.M` is."""

    def name(M: int) -> str:
        one = replace(problem, M=M)
        return by_rule(ways_of(route, one), one, density).name

    return WayPlan.of(tops_of(problem), name)


# ---- the operator ----


def run_by_plan(
    rows: Tensor,
    ffn: FFN,
    slots: int,
    density: float,
    sources: str,
    route: str,
    dense: Way | None = None,
) -> Tensor:
    """`[M, K]` to `[M, K]`, M >= 1, of what the kernels take (twell_reasons.py), `rows` `aligned`.

    `route`: one of ROUTES, of which the rule makes a plan, or a plan as text. `density` below 0:
    nobody knows it. `dense` stands in for the way of that name: that of an engine, whose weights
    stay as they are, so that kernels for few tokens may overlap. `ValueError` if the way of a plan
    does not take so many tokens here.
    """
    index = rows.device.index
    here = kernels_for(sources, index), device_limits(index)
    in_place = lies_well(ffn.by_neurons)
    problem = Problem(rows.shape[0], ffn.N, ffn.K, here[1], in_place, ffn.kind)
    if route in ROUTES:
        plan = plan_by_rule(route, replace(problem, M=1), None if density < 0 else density)
    else:
        plan = WayPlan.parse(route)
    name = plan.name(problem.M)
    way = next((way for way in WAYS if way.name == name and way.takes(problem)), None)
    if way is None:
        raise ValueError(f"the way {name!r} does not take {problem.M} tokens here")
    return run_way(way, here, rows, ffn, slots, dense)


def run_way(
    way: Way,
    here: tuple[KernelSet, Limits],
    rows: Tensor,
    ffn: FFN,
    slots: int,
    dense: Way | None = None,
) -> Tensor:
    """`way` on a device with these kernels and limits; the rest as of `run_by_plan`."""
    if dense is not None and not way.own:
        way = dense
    copies = way.by_rows and not lies_well(ffn.by_neurons)
    laid = replace(ffn, turned=aligned(ffn.by_neurons)) if copies else ffn
    early = {"overlap": True} if dense is not None and way.name in _FEW else {}
    return way.run(*here, rows, laid, slots, **early)


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it, contiguous, at an address that is a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
