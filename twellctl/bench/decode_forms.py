"""The gated FFN of few tokens in the forms that bench decode compares, and what each must read.

Dense: PyTorch's three products, and what the decode engine has for few tokens (few_ways.py), which
streams the same bytes, and half of them where the weights are FP8. TwELL: gate, and what fired of
up and down. As in the decode engine each of our kernels may start before the one in front of it has
ended; "no overlap" is TwELL where none does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bench.contest import MUST_RUN
from twellctl.bench.dense_fp8 import why_no_dense_fp8
from twellctl.bench.results import DENSE, DENSE_FP8, FEW_DENSE, FEW_DENSE_FP8, TWELL
from twellctl.bench.timing import Timer
from twellctl.bundle.twell_dense_e4m3 import DENSE_E4M3_KERNELS
from twellctl.bundle.twell_few import (
    end_of,
    few_gated_kernels,
    few_kernels,
    takes_few,
    takes_few_dense,
)
from twellctl.bundle.twell_ffn import sparse_ffn
from twellctl.bundle.twell_fp8 import Fp8Weight, fp8_ffn, round_weight
from twellctl.bundle.twell_launch import KernelSet, device_limits, kernels_for
from twellctl.bundle.twell_model import gate_and_up, gated_ffns
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_reasons import takes_hopper_kernels, why_not_loaded
from twellctl.bundle.twell_ways import Problem, by_rule, ways_of
from twellctl.bundle.twell_weights import FFN
from twellctl.decoding.few_ways import BY_COLUMNS
from twellctl.here.own_kernels import own_kernels

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
BANDWIDTH_SAMPLES = 5


@dataclass(frozen=True)
class FewWeights:
    """One FFN as each form wants it: `ffn` by rows of neurons, and `down` `[K, N]` besides.

    `density` is what a profile would tell; None: nothing. `fp8`: the same FFN with e4m3 weights,
    where there are forms in FP8.
    """

    ffn: FFN
    down: Tensor
    density: float | None = None
    fp8: "FewWeights | None" = None

    @property
    def all(self) -> "list[FewWeights]":
        """These weights, and those in FP8."""
        return [self] if self.fp8 is None else [self, self.fp8]


Form = Callable[[Tensor, FewWeights], Tensor]


def few_weights(
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    s_gate: Tensor | None = None,
    s_up: Tensor | None = None,
    s_down: Tensor | None = None,
    *,
    density: float | None = None,
) -> FewWeights:
    """From weights as an nn.Linear has them, `w_down` `[K, N]` in either layout.

    Those in e4m3 have scales, float32 `[N, 1]`, `[N, 1]` and `[K, 1]`.
    """
    by_rows = w_down.t().contiguous()
    scales = (scale if scale is None else scale.flatten() for scale in (s_gate, s_up, s_down))
    ffn = FFN(w_gate, w_up, by_rows, b_gate, b_up, b_down, *scales)
    return FewWeights(ffn, w_down.contiguous(), density)


def rounded_weights(weights: FewWeights) -> FewWeights:
    """The same FFN in FP8, rounded as an export is; gate and up are parts of one tensor."""
    ffn = weights.ffn
    gate_up, of_gate_up = round_weight(torch.cat((ffn.w_gate, ffn.w_up)))
    down, of_down = round_weight(weights.down)
    scales = *of_gate_up.chunk(2), of_down
    biases = ffn.b_gate, ffn.b_up, ffn.b_down
    if ffn.b_gate is not None and ffn.b_up is not None:
        biases = *torch.cat((ffn.b_gate, ffn.b_up)).chunk(2), ffn.b_down
    return few_weights(*gate_up.chunk(2), down, *biases, *scales, density=weights.density)


def weights_of(module: nn.Module) -> FewWeights:
    """Of a gated FFN module of transformers, in bf16 or in FP8."""
    projections = gate_and_up(module)
    halves = 2 // len(projections)

    def parts(name: str) -> list[Tensor | None]:
        """Of gate, up and down."""
        found = (getattr(projection, name, None) for projection in projections)
        first = [part for t in found for part in ((t,) * halves if t is None else t.chunk(halves))]
        return [*first, getattr(module.down_proj, name, None)]

    density = getattr(module, "twell_density", None)
    names = ("weight", "bias", "weight_scale")
    return few_weights(*(part for name in names for part in parts(name)), density=density)


def few_pair(bf16: nn.Module, benched: nn.Module) -> FewWeights:
    """Of a gated FFN module in bf16, and in FP8 if `benched` is another one."""
    weights = weights_of(benched)
    return weights if benched is bf16 else replace(weights_of(bf16), fp8=weights)


def why_no_few(M: int, weights: FewWeights, device: torch.device) -> str | None:
    """None if the kernels for `M` tokens are loaded on `device`, else why they are not."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "the kernels need an NVIDIA GPU"
    limits, end = device_limits(device.index), end_of(weights.ffn.w_gate)
    K, N = weights.down.shape
    if end:
        if said := why_no_dense_fp8(device, torch.bfloat16, [(N, K), (K, N)]):
            return said
        if K % 128 or N % 128:
            return f"the kernels for FP8 take sizes that are multiples of 128, not {K} and {N}"
    if not (takes_few(M, N, limits, end) and takes_few_dense(M, limits, end)):
        return f"the kernels for {M} tokens need more shared memory than this GPU has"
    entries = (*few_kernels(M, limits, end), *few_gated_kernels(M, end))
    if end and takes_hopper_kernels(device.index):
        entries += DENSE_E4M3_KERNELS
    return why_not_loaded(own_kernels(), device.index, entries)


def few_forms(
    device: torch.device, *, with_kernels: bool, dense_fp8: bool, twell_in_fp8: bool
) -> dict[str, tuple[str, Form]]:
    """{name: (kind, form)}; without the kernels what plain PyTorch has of dense and TwELL.

    `dense_fp8`: with the dense form in FP8; `twell_in_fp8`: TwELL runs over FP8 weights.
    """
    name = "twell FP8" if twell_in_fp8 else "twell"
    if not with_kernels:
        plain = _plain_fp8_ffn if twell_in_fp8 else _plain_ffn
        return {MUST_RUN: (DENSE, torch_ffn), f"{name} plain": (TWELL, plain)}
    here = kernels_for(own_kernels(), device.index), device_limits(device.index)
    hopper = takes_hopper_kernels(device.index)

    def sparse(x: Tensor, weights: FewWeights, overlap: bool) -> Tensor:
        weights = weights.fp8 if twell_in_fp8 else weights
        N, K, end = weights.ffn.N, weights.ffn.K, end_of(weights.ffn.w_gate)
        problem = Problem(x.shape[0], N, K, here[1], hopper, end=end)
        way = by_rule(ways_of("twell", problem), problem, weights.density)
        return way.run(*here, x, weights.ffn, overlap=overlap)

    few: dict[str, tuple[str, Form]] = {FEW_DENSE: (DENSE, lambda x, w: _few_dense(*here, x, w))}
    if dense_fp8:
        few[FEW_DENSE_FP8] = (DENSE_FP8, lambda x, w: _few_dense(*here, x, w.fp8))
    return {
        MUST_RUN: (DENSE, torch_ffn),
        **few,
        name: (TWELL, lambda x, w: sparse(x, w, True)),
        f"{name}, no overlap": (TWELL, lambda x, w: sparse(x, w, False)),
    }


def torch_ffn(x: Tensor, weights: FewWeights) -> Tensor:
    """`[M, K]` to `[M, K]`: three products of PyTorch's."""
    ffn = weights.ffn
    gate = F.linear(x, ffn.w_gate, ffn.b_gate).relu_()
    return F.linear(gate.mul_(F.linear(x, ffn.w_up, ffn.b_up)), weights.down, ffn.b_down)


def _few_dense(kernels: KernelSet, limits: Limits, x: Tensor, weights: FewWeights) -> Tensor:
    ffn = replace(weights.ffn, w_down=weights.down)
    return BY_COLUMNS.run(kernels, limits, x, ffn, overlap=True)


def _plain_ffn(x: Tensor, weights: FewWeights) -> Tensor:
    ffn = weights.ffn
    biases = ffn.b_gate, ffn.b_up, ffn.b_down
    return sparse_ffn(x, ffn.w_gate, ffn.w_up, ffn.w_down.t(), *biases, density=0.0)


def _plain_fp8_ffn(x: Tensor, weights: FewWeights) -> Tensor:
    """As the kernels for few tokens compute it: inputs are not rounded."""
    return fp8_ffn(x, *fp8_parts(weights.fp8), round_inputs=False)


def fp8_parts(weights: FewWeights) -> list[Fp8Weight]:
    """Gate, up and down of weights in FP8, as twell_fp8.py takes them."""
    ffn = weights.ffn
    parts = (
        (ffn.w_gate, ffn.s_gate, ffn.b_gate),
        (ffn.w_up, ffn.s_up, ffn.b_up),
        (weights.down, ffn.s_down, ffn.b_down),
    )
    return [Fp8Weight(values, scale[:, None], bias) for values, scale, bias in parts]


# ---- floors ----


def ffn_bytes(K: int, N: int, itemsize: int, union: float = 1.0) -> int:
    """Bytes of weights that must be read: the gate, and `union` of the rows of up and down.

    `union` is the share of the neurons that fire for some token of the call; dense forms read all.
    """
    return round(K * N * itemsize * (1 + 2 * union))


def step_bytes(model: nn.Module, unions: tuple[float, ...] | None, rows: int) -> int:
    """Bytes of weights that a step of `rows` rows must read.

    All weights but the embeddings, of which there is a line a row, unless they are the LM head too;
    of up and down those of the neurons that fire (`unions` by layer; None: all). The cache comes on
    top. What a step writes or keeps between kernels is next to nothing.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embeddings is not head:
        total -= (len(embeddings) - rows) * embeddings[0].nbytes
    ffns = gated_ffns(model)
    for ffn, union in zip(ffns, unions or (1.0,) * len(ffns), strict=True):
        down = ffn.down_proj.weight
        total -= 2 * down.nbytes - (ffn_bytes(*down.shape, down.itemsize, union) - down.nbytes)
    return total


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
