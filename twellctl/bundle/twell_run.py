"""One gated FFN by a route: the one of its ways that is the fastest here, or that a rule takes."""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_format import fires
from .twell_fp8 import Fp8Weight, fp8_linear
from .twell_launch import device_limits, kernels_for
from .twell_plan import ceil_div
from .twell_reasons import lies_well
from .twell_route import Kind, choose, density_bucket, token_bucket
from .twell_ways import Problem, Way, by_rule, ways_of
from .twell_weights import FFN, end_of

_SAMPLED_ROWS = 4096


def run_by_route(
    rows: Tensor,
    ffn: FFN,
    slots: int,
    density: float,
    sources: str,
    route: str,
    turned: Tensor | None = None,
    dense: Way | None = None,
) -> Tensor:
    """`[M, K]` to `[M, K]`, M >= 1, of what the kernels take (twell_reasons.py), `rows` `aligned`.

    `density` below 0: nobody knows it. `turned`: W_down by rows of neurons, if that of `ffn` does
    not lie so. `dense` stands in for the way of that name.
    """
    index, by_rows = rows.device.index, ffn.w_down if turned is None else turned
    in_place = lies_well(by_rows)
    here = kernels_for(sources, index), device_limits(index)
    sizes = rows.shape[0], ffn.N, ffn.K
    problem = Problem(*sizes, here[1], in_place, end_of(ffn.w_gate))
    ways, known = ways_of(route, problem), None if density < 0 else density
    if dense is not None:
        ways = [dense if way.name == "dense" else way for way in ways]

    def run(way: Way) -> Tensor:
        laid = ffn
        if way.by_rows:
            laid = replace(ffn, w_down=by_rows if in_place else aligned(by_rows))
        return way.run(*here, rows, laid, slots)

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
        any(bias is not None for bias in (ffn.b_gate, ffn.b_up, ffn.b_down)),
        token_bucket(problem.M),
        None if density is None else density_bucket(density),
        slots,
        f"{on}{problem.end} {sources[:12]}{copying}",
        ways,
    )


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it, contiguous, at an address that is a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _sampled_density(rows: Tensor, ffn: FFN) -> float:
    step = ceil_div(rows.shape[0], _SAMPLED_ROWS)
    if ffn.s_gate is None:
        gate = F.linear(rows[::step], ffn.w_gate, ffn.b_gate)
    else:
        gate = fp8_linear(rows[::step], Fp8Weight(ffn.w_gate, ffn.s_gate[:, None], ffn.b_gate))
    return fires(gate).float().mean().item()
