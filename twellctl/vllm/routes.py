"""Which way each FFN goes in a serving engine: settled before anything is served.

An engine warms up with tokens that are not like real ones, and captures graphs in which nothing can
be loaded or measured. So kernels are loaded, and the ways of every number of tokens are measured,
when the weights are there: over random weights of the same shapes that fire as the profile says.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twellctl.bundle.twell_dense import rounded_weight
from twellctl.bundle.twell_ffn import (
    known_choices,
    reasons_said,
    sparse_ffn,
    sparse_ffn_of_engine,
)
from twellctl.bundle.twell_model import by_rows_of_neurons
from twellctl.bundle.twell_route import density_bucket, requested, token_bucket
from twellctl.bundle.twell_ways import WAYS, Way
from twellctl.bundle.twell_weights import FFN, plain_weight
from twellctl.firing.synthetic import make_rows, make_weights

ENGINES = "vllm"  # the way that goes through the linear layers of the engine
_DENSE = {ENGINES, *(way.name for way in WAYS if not way.own)}
_BY_THE_ENGINE = "densely, by vLLM's own FP8 linear layers"


@dataclass(frozen=True)
class Layer:
    """One FFN: inputs of K, N neurons; `biases`: whether gate and up have them, and down."""

    K: int
    N: int
    biases: tuple[bool, bool]
    tile: int
    slots: int
    density: float


def engines_way(dense: Callable[[], Tensor]) -> Way:
    """The dense way of FP8 weights: `dense` computes y `[M, K]` of the x at hand, as vLLM does."""
    return Way(
        ENGINES,
        takes=lambda problem: True,
        run=lambda *problem: dense(),
        own=False,
        by_rows=False,
    )


class Settled(NamedTuple):
    """What was settled: whether all goes densely, and how it goes and why, in words."""

    densely: bool
    how: str


def token_counts(captured: Iterable[int], most: int) -> list[int]:
    """Numbers of tokens to settle: those of captured graphs, and all kinds of others up to `most`.

    One choice serves numbers up to a power of two that have the same ways. The lowest of them may
    have fewer ways than the highest, so both are settled; what has no choice yet is measured.
    """
    powers = [1 << n for n in range(token_bucket(most).bit_length() - 1)]
    lowest = [power + 1 for power in powers if power < most]
    return sorted({*captured, *powers, *lowest, most})


def settle(
    layers: Sequence[Layer],
    counts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    sources: str,
    *,
    graphs: bool = True,
    dense: Callable[[Tensor], Way] | None = None,
) -> Settled:
    """Load the kernels and measure all ways of `layers`, for all `counts` of tokens.

    `sources` as `sparse_ffn` takes it; `graphs`: whether the engine captures CUDA graphs. `dense`:
    makes the `engines_way` of x, of FFNs of these sizes, if their weights are FP8; None for bf16.
    """
    if device.type != "cuda":
        why = "the kernels need an NVIDIA GPU"
        in_bf16 = Settled(True, f"densely, in plain PyTorch: {why}")
        return in_bf16 if dense is None else densely_in_fp8(why)
    with reasons_said() as said:
        for layer in {_kind(layer): layer for layer in layers}.values():
            _run(layer, counts, device, dtype, sources, dense)
    if said and dense is not None:
        return densely_in_fp8(said[0].split(": ", 1)[1])  # of plain PyTorch it speaks before
    if said:
        return Settled(True, f"densely: {said[0]}")
    if (route := requested("auto")) != "auto":
        return Settled(route in _DENSE, f"on the route {route}, as TWELL_ROUTE says")
    return _measured(layers, graphs, dense is not None, max(counts))


def densely_in_fp8(why: str) -> Settled:
    """FP8 weights, of which the kernels take none: `why`."""
    return Settled(True, f"{_BY_THE_ENGINE}: {why}")


def _kind(layer: Layer) -> Layer:
    """What choices tell apart: of densities, steps."""
    return replace(layer, density=density_bucket(layer.density))


@torch.no_grad()
def _run(
    layer: Layer,
    counts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    sources: str,
    dense: Callable[[Tensor], Way] | None = None,
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    density = min(max(layer.density, 1e-4), 1.0)
    made = make_weights(
        layer.K, layer.N, density, bias=any(layer.biases), dtype=dtype, generator=generator
    )
    w_gate, w_up, w_down, b_gate, b_up, b_down = made.split
    in_gate, in_down = layer.biases
    biases = (b_gate if in_gate else None, b_up if in_gate else None, b_down if in_down else None)
    pairs = zip((w_gate, w_up, w_down), biases, strict=True)
    if dense is None:
        gate, up, down = (plain_weight(*pair) for pair in pairs)
        ffn = FFN(gate, up, replace(down, values=by_rows_of_neurons(w_down)))
        run = sparse_ffn
    else:
        gate, up, down = (rounded_weight("e4m3", *pair) for pair in pairs)
        ffn = FFN(gate, up, down, down.values.t().contiguous())

        def run(x: Tensor, ffn: FFN, **numbers: Any) -> Tensor:
            return sparse_ffn_of_engine(dense(x), x, ffn, **numbers)

    x = make_rows(max(counts), layer.K, dtype=dtype, generator=generator)
    numbers = {"tile": layer.tile, "slots": layer.slots, "density": layer.density}
    for count in counts:
        run(x[:count], ffn, **numbers, sources=sources)


def _measured(layers: Sequence[Layer], graphs: bool, in_fp8: bool, most: int) -> Settled:
    kinds = {(kind.K, kind.N, kind.slots, kind.density) for kind in map(_kind, layers)}
    ways: dict[int, set[str]] = {}  # by the most tokens of a bucket
    for kind, choice in known_choices().items():
        of_these = (kind.K, kind.N, kind.slots, kind.density) in kinds
        if of_these and (ENGINES in kind.ways) == in_fp8:
            name = choice.graph if graphs else choice.eager
            ways.setdefault(kind.tokens, set()).add(name)
    if set().union(*ways.values()) <= _DENSE:
        how = "densely, which was measured to be the fastest for every number of tokens"
        return Settled(True, how)
    if in_fp8 and most > max(ways):  # where there was nothing to choose
        ways[most] = {ENGINES}
    return Settled(False, f"over the kernels as measured: {'; '.join(_ranges(ways))}")


def _ranges(ways: Mapping[int, set[str]]) -> Iterator[str]:
    first = 1
    for names, buckets in groupby(sorted(ways), lambda tokens: sorted(ways[tokens])):
        *_, last = buckets
        yield f"{first}-{last} tokens {', '.join(names)}"
        first = last + 1
