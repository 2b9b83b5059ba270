"""The ways to compute one gated FFN, in one table: who takes what, and what is taken unmeasured.

The route "auto" is the fastest of all ways that take a problem, "twell" of those over what fires
(`own`), "dense" is one way. What is the fastest is measured (twell_route.py, and
for steps of the decode engine decoding/step_forms.py); where nothing may be measured, a rule
decides. `run_by_route` computes an FFN so.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .twell_dense import gated_ffn, linear
from .twell_few import few_pairs, few_union, takes_few
from .twell_few_walk import suits_few_walk, takes_few_walk
from .twell_format import fires
from .twell_launch import device_limits, kernels_for
from .twell_plan import Limits, ceil_div
from .twell_reasons import lies_well
from .twell_route import Kind, choose, density_bucket, token_bucket
from .twell_sequence import hopper_ffn
from .twell_weights import FFN

# as found on an H200; unmeasured, dense products are taken from this density on, and up to this
# number of tokens
DENSE_FROM, SPARSE_ABOVE = 0.02, 2048
# the same of few tokens, for which there are kernels of their own: up to this number
FEW_DENSE_FROM, FEW_SPARSE_UPTO = 0.1, 16


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


def by_rule(ways: Sequence[Way], problem: Problem, density: float | None) -> Way:
    """The one of `ways` that is taken unmeasured; `density` None: it is not known."""
    own = next(way for way in ways if way.own and way.suits(problem, density))
    others = [way for way in ways if not way.own]
    return others[-1] if others and not _pays(own, problem, density) else own


def _pays(way: Way, problem: Problem, density: float | None) -> bool:
    """Whether a way over what fires is taken in the place of dense products."""
    if problem.few and problem.in_place:
        fires_little = density is None or density < FEW_DENSE_FROM
        return way.name == "pairs" or (problem.M <= FEW_SPARSE_UPTO and fires_little)
    return problem.M > SPARSE_ABOVE and (density is None or density < DENSE_FROM)


_SAMPLED_ROWS = 4096


def run_by_route(
    rows: Tensor,
    ffn: FFN,
    slots: int,
    density: float,
    sources: str,
    route: str,
    dense: Way | None = None,
) -> Tensor:
    """`[M, K]` to `[M, K]`, M >= 1, of what the kernels take (twell_reasons.py), `rows` `aligned`.

    `density` below 0: nobody knows it. `dense` stands in for the way of that name: that of an
    engine, whose weights stay as they are, so that kernels for few tokens may overlap.
    """
    index, in_place = rows.device.index, lies_well(ffn.by_neurons)
    here = kernels_for(sources, index), device_limits(index)
    problem = Problem(rows.shape[0], ffn.N, ffn.K, here[1], in_place, ffn.kind)
    ways, known = ways_of(route, problem), None if density < 0 else density
    if dense is not None:
        ways = [dense if way.name == "dense" else way for way in ways]

    def run(way: Way) -> Tensor:
        copies = way.by_rows and not in_place
        laid = replace(ffn, turned=aligned(ffn.by_neurons)) if copies else ffn
        early = {"overlap": True} if dense is not None and way.name in _FEW else {}
        return way.run(*here, rows, laid, slots, **early)

    if len(ways) == 1:
        return run(ways[0])
    runs = {way.name: functools.partial(run, way) for way in ways}
    with torch.cuda.device(index):  # whose stream is timed, or captured
        name = choose(
            _kind(problem, ffn, index, slots, known, sources, tuple(runs)),
            torch.cuda.is_current_stream_capturing(),
            runs,
            lambda: by_rule(ways, problem, known).name,
            lambda: _sampled_density(rows, ffn),
        )
    return runs[name]()


def _kind(
    problem: Problem,
    ffn: FFN,
    index: int,
    slots: int,
    density: float | None,
    sources: str,
    ways: tuple[str, ...],
) -> Kind:
    on, copying = (
        "hopper" if problem.limits.hopper else "few",
        "" if problem.in_place else " copying",
    )
    return Kind(
        torch.cuda.get_device_name(index),
        ffn.K,
        ffn.N,
        any(weight.bias is not None for weight in ffn.weights),
        token_bucket(problem.M),
        None if density is None else density_bucket(density),
        slots,
        f"{on} {problem.kind} {sources[:12]}{copying}",
        ways,
    )


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it, contiguous, at an address that is a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _sampled_density(rows: Tensor, ffn: FFN) -> float:
    step = ceil_div(rows.shape[0], _SAMPLED_ROWS)
    return fires(linear(rows[::step], ffn.gate)).float().mean().item()
