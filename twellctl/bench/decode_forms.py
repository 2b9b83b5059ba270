"""The gated FFN of few tokens in the forms that bench decode compares, and what each must read.

Dense: PyTorch's three products, and our own kernels for few tokens (twell_few.py), which stream the
same bytes in two launches. TwELL: gate, and what fired of up and down. As in the decode engine each
kernel may start before the one in front of it has ended; "no overlap" is TwELL where none does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bench.contest import MUST_RUN
from twellctl.bench.results import DENSE, FEW_DENSE, TWELL
from twellctl.bench.timing import Timer
from twellctl.bundle.twell_few import (
    few_gated,
    few_gated_kernels,
    few_kernels,
    few_linear,
    takes_few,
    takes_few_dense,
)
from twellctl.bundle.twell_ffn import sparse_ffn
from twellctl.bundle.twell_launch import KernelSet, Limits, device_limits, kernels_for
from twellctl.bundle.twell_model import gated_ffns
from twellctl.bundle.twell_reasons import takes_hopper_kernels, why_not_loaded
from twellctl.bundle.twell_ways import Problem, by_rule, ways_of
from twellctl.bundle.twell_weights import FFN
from twellctl.here.own_kernels import own_kernels

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
BANDWIDTH_SAMPLES = 5


@dataclass(frozen=True)
class FewWeights:
    """One FFN as each form wants it: `ffn` by rows of neurons, and `down` `[K, N]` besides.

    `density` is what a profile would tell; None: nothing.
    """

    ffn: FFN
    down: Tensor
    density: float | None = None


Form = Callable[[Tensor, FewWeights], Tensor]


def few_weights(
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    density: float | None = None,
) -> FewWeights:
    """From weights as an nn.Linear has them, `w_down` `[K, N]` in either layout."""
    by_rows = w_down.t().contiguous()
    ffn = FFN(w_gate, w_up, by_rows, b_gate, b_up, b_down)
    return FewWeights(ffn, w_down.contiguous(), density)


def weights_of(module: nn.Module) -> FewWeights:
    """Of a gated FFN module of transformers."""
    if hasattr(module, "gate_up_proj"):
        weights, bias = module.gate_up_proj.weight.chunk(2), module.gate_up_proj.bias
        biases = (None, None) if bias is None else bias.chunk(2)
    else:
        projections = (module.gate_proj, module.up_proj)
        weights, biases = ([getattr(p, name) for p in projections] for name in ("weight", "bias"))
    down = module.down_proj
    density = getattr(module, "twell_density", None)
    return few_weights(*weights, down.weight, *biases, down.bias, density)


def why_no_few(M: int, N: int, device: torch.device) -> str | None:
    """None if the kernels for `M` tokens are loaded on `device`, else why they are not."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "the kernels need an NVIDIA GPU"
    limits = device_limits(device.index)
    if not (takes_few(M, N, limits) and takes_few_dense(M, limits)):
        return f"the kernels for {M} tokens need more shared memory than this GPU has"
    entries = (*few_kernels(M, limits), *few_gated_kernels(M))
    return why_not_loaded(own_kernels(), device.index, entries)


def few_forms(device: torch.device, with_kernels: bool) -> dict[str, tuple[str, Form]]:
    """{name: (kind, form)}; without the kernels what plain PyTorch has of both kinds."""
    if not with_kernels:
        return {MUST_RUN: (DENSE, torch_ffn), "twell plain": (TWELL, _plain_ffn)}
    here = kernels_for(own_kernels(), device.index), device_limits(device.index)
    hopper = takes_hopper_kernels(device.index)

    def sparse(x: Tensor, weights: FewWeights, overlap: bool) -> Tensor:
        problem = Problem(x.shape[0], weights.ffn.N, weights.ffn.K, here[1], hopper)
        way = by_rule(ways_of("twell", problem), problem, weights.density)
        return way.run(*here, x, weights.ffn, overlap=overlap)

    return {
        MUST_RUN: (DENSE, torch_ffn),
        FEW_DENSE: (DENSE, lambda x, w: _few_dense(*here, x, w)),
        "twell": (TWELL, lambda x, w: sparse(x, w, True)),
        "twell, no overlap": (TWELL, lambda x, w: sparse(x, w, False)),
    }


def torch_ffn(x: Tensor, weights: FewWeights) -> Tensor:
    """`[M, K]` to `[M, K]`: three products of PyTorch's."""
    ffn = weights.ffn
    gate = F.linear(x, ffn.w_gate, ffn.b_gate).relu_()
    return F.linear(gate.mul_(F.linear(x, ffn.w_up, ffn.b_up)), weights.down, ffn.b_down)


def _few_dense(kernels: KernelSet, limits: Limits, x: Tensor, weights: FewWeights) -> Tensor:
    hidden = few_gated(kernels, limits, x, weights.ffn, overlap=True)
    return few_linear(kernels, limits, hidden, weights.down, weights.ffn.b_down, overlap=True)


def _plain_ffn(x: Tensor, weights: FewWeights) -> Tensor:
    ffn = weights.ffn
    biases = ffn.b_gate, ffn.b_up, ffn.b_down
    return sparse_ffn(x, ffn.w_gate, ffn.w_up, ffn.w_down.t(), *biases, density=0.0)


# ---- floors ----


def ffn_bytes(K: int, N: int, itemsize: int, union: float = 1.0) -> int:
    """Bytes of weights that must be read: the gate, and `union` of the rows of up and down.

    `union` is the share of the neurons that fire for some token of the call; dense forms read all.
    """
    return round(K * N * itemsize * (1 + 2 * union))


def step_bytes(
    model: nn.Module, unions: tuple[float, ...] | None, rows: int, position: int, cache_bytes: int
) -> int:
    """Bytes that a step of `rows` rows must read, each with `position` tokens cached.

    All weights but the embeddings, of which there is a line a row, unless they are the LM head too;
    of up and down those of the neurons that fire (`unions` by layer; None: all); the cache, with
    `cache_bytes` a token. What a step writes or keeps between kernels is next to nothing.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embeddings is not head:
        total -= (len(embeddings) - rows) * embeddings[0].nbytes
    ffns = gated_ffns(model)
    for ffn, union in zip(ffns, unions or (1.0,) * len(ffns), strict=True):
        down = ffn.down_proj.weight
        total -= 2 * down.nbytes - (ffn_bytes(*down.shape, down.itemsize, union) - down.nbytes)
    return total + rows * position * cache_bytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that `device` reads and writes while it copies a large tensor: the median."""
    size = COPIED_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timer = Timer(lambda number: target.copy_(source), 1, device, graphed=False)
    seconds = sorted(timer.seconds() for _ in range(BANDWIDTH_SAMPLES))[BANDWIDTH_SAMPLES // 2]
    return 2 * size / seconds
