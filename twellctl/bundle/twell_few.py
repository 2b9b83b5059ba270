"""The gated FFN and a linear layer for few tokens, 1 to 64: bound by how fast weights stream in.

    few_pairs:   the gate product -> few_walk, where few neurons fire, on Hopper (twell_few_walk.py)
    few_union:   few_hidden (gate product, what fires, up of that)  ->  few_down
    few_gated:   gate and up of the dense form
    few_linear:  one product

Nothing is read back by the host, so a CUDA graph can hold it all. What the kernels do stands in
kernels/tile/few_product.cuh and in their heads.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from . import twell_spec as spec
from .twell_few_walk import LINEAR_TOKENS, few_walk_entries, launch_few_walk
from .twell_launch import KernelSet
from .twell_plan import Limits, ceil_div
from .twell_weights import FFN, Onto, Weight

FEW_TOKENS = 64
_BLOCK = 32 * spec.FEW_WARPS
_DOWN_STATIC = 32  # bytes of shared memory that few_down declares; the other kernels have none
_ANY_LENGTH = 1 << 20  # of x: too long to stay


@dataclass(frozen=True)
class Launch:
    """An entry, and its dynamic shared memory in bytes."""

    name: str
    smem_bytes: int


@dataclass(frozen=True)
class FewPlan:
    """The launches for so many tokens."""

    octets: int
    linear: Launch
    ahead: Launch  # the same product, with more weights under way before it may begin
    gated: Launch
    hidden: Launch
    down: Launch


@lru_cache(maxsize=4096)
def plan_few(M: int, N: int, K: int, limits: Limits, kind: str) -> FewPlan:
    """For 1 to FEW_TOKENS tokens, N neurons (or outputs), inputs of K and a kind of weights."""
    octets = _octets(M)
    down = f"few_down_wide_{octets}" if M > 2 else "few_down"
    at_hand = 160 + 260 * 8 * octets
    return FewPlan(
        octets,
        _linear(M, N, K, False, limits, kind),
        _linear(M, N, K, True, limits, kind),
        _product("few_gated", M, K, 32 * octets, limits, kind),
        _product("few_hidden", M, K, at_hand, limits, kind),
        _down(spec.entry(down, kind), N, limits, kind),
    )


def _octets(M: int) -> int:
    return next(octets for octets in spec.FEW_OCTETS if 8 * octets >= M)


def _down(name: str, N: int, limits: Limits, kind: str) -> Launch:
    """few_down.cu: Down::kBytes, and its list."""
    sizes = spec.few_down_entries(limits.capability, kind)[name]
    weights = 32 * spec.KINDS[kind].bits * sizes.tiles
    stages = spec.FEW_DOWN_STAGES * (weights + 256 * max(sizes.octets, 2))
    list_bytes = ceil_div(2 * min(N, sizes.listed), 16) * 16
    size = list_bytes + spec.FEW_WARPS * max(stages, 512 * sizes.tiles * sizes.octets)
    return Launch(name, size)


def _linear(M: int, N: int, K: int, ahead: bool, limits: Limits, kind: str) -> Launch:
    """few_linear: as _product, or where there is much shared memory another of its builds."""
    octets, entries = _octets(M), spec.few_entries("few_linear", limits.capability, kind)
    plain = _product("few_linear", M, K, 0, limits, kind)
    other = spec.entry(f"few_linear_{octets}_{'ahead' if ahead else 'short'}", kind)
    if spec.shared_kb(limits.capability) < 227 or other not in entries:
        return plain
    row_blocks = max(1, ceil_div(ceil_div(N, spec.FEW_ROWS), limits.num_sms))
    # stages that hold all of a block's weights
    wanted = row_blocks * ceil_div(K, 64 * spec.FEW_WARPS)
    stages = entries[plain.name if ahead else other].stages
    if wanted <= stages if ahead else wanted > stages:
        return plain
    size = product_bytes(entries[other], M, K)
    return Launch(other, size) if size <= limits.smem_bytes else plain


def _product(kernel: str, M: int, K: int, more_bytes: int, limits: Limits, kind: str) -> Launch:
    """x stays if that fits."""
    octets, entries = _octets(M), spec.few_entries(kernel, limits.capability, kind)
    name = spec.entry(f"{kernel}_{octets}", kind)
    size = product_bytes(entries[name], M, K) + more_bytes
    if octets in spec.FEW_STAYING and size > limits.smem_bytes:
        name = spec.entry(f"{kernel}_{octets}_long", kind)
        size = product_bytes(entries[name], M, K) + more_bytes
    return Launch(name, size)


def product_bytes(sizes: spec.FewSizes, M: int, K: int) -> int:
    """few_sizes.cuh: kBytes and x_bytes of its Sizes."""
    kind, octets, stays, at_once, passes, stages, halves = sizes
    wider = 16 // spec.KINDS[kind].bits  # x is
    stage = (2 * at_once + (0 if stays else octets * wider)) * 512 * halves
    x_row = 64 * halves * wider  # of a slab
    powers = 32 if spec.KINDS[kind].in_f16 and octets == 1 else 0  # of a warp's rows of x
    x = ceil_div(2 * K, x_row * spec.FEW_WARPS) * M * x_row + powers if stays else 0
    return spec.FEW_WARPS * (stages * stage + passes * at_once * octets * 512 + x)


def few_kernels(limits: Limits, kind: str) -> tuple[str, ...]:
    """All entries of the FFN for few tokens over such weights on this device."""
    walks = few_walk_entries(kind) if limits.hopper else ()
    families = ("few_hidden", "few_linear") if walks else ("few_hidden",)  # a walk's gate product
    products = (spec.few_entries(family, limits.capability, kind) for family in families)
    return (*chain(*products), *spec.few_down_entries(limits.capability, kind), *walks)


def few_dense_kernels(limits: Limits, kind: str) -> tuple[str, ...]:
    """All entries of `few_linear` and `few_gated`; the decode engine alone launches the latter."""
    families = ("few_linear", "few_gated")
    return tuple(chain(*(spec.few_entries(family, limits.capability, kind) for family in families)))


def takes_few(M: int, N: int, limits: Limits, kind: str) -> bool:
    """Whether `few_union` takes `M` tokens of any length on this device."""
    if not 1 <= M <= FEW_TOKENS:
        return False
    plan = plan_few(M, N, _ANY_LENGTH, limits, kind)
    return _fits(limits, plan.hidden, plan.down)


def takes_few_dense(M: int, limits: Limits, kind: str) -> bool:
    """Whether `few_gated` and `few_linear` take `M` inputs, of any length."""
    if not 1 <= M <= FEW_TOKENS:
        return False
    plan = plan_few(M, 0, _ANY_LENGTH, limits, kind)
    return _fits(limits, plan.linear, plan.gated)


def _fits(limits: Limits, *launches: Launch) -> bool:
    return all(launch.smem_bytes + _static(launch.name) <= limits.smem_bytes for launch in launches)


def _static(name: str) -> int:
    return _DOWN_STATIC if name.startswith("few_down") else 0


def few_union(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
) -> Tensor:
    """`[M, K]` to `[M, K]`, M from 1 to FEW_TOKENS, bf16, contiguous: over all that fires."""
    overlap = onto.get("overlap", False)
    M, N, K = x.shape[0], ffn.N, ffn.K
    plan = plan_few(M, N, K, limits, ffn.kind)
    blocks = ceil_div(N, spec.FEW_ROWS)
    hidden = x.new_empty(N, 8 * plan.octets)
    fired = torch.empty(ceil_div(blocks, 2) * 2, dtype=torch.int16, device=x.device)
    kernels.launch(
        plan.hidden.name,
        (min(blocks, limits.num_sms),),
        _BLOCK,
        {
            "x": x,
            "w_gate": ffn.gate.values,
            "w_up": ffn.up.values,
            "w_down": ffn.by_neurons,
            "b_gate": ffn.gate.bias,
            "b_up": ffn.up.bias,
            "M": M,
            "N": N,
            "K": K,
            "hidden": hidden,
            "fired": fired,
            "counts": onto.get("counts"),
            "gate_scale": ffn.gate.scales,
            "up_scale": ffn.up.scales,
        },
        plan.hidden.smem_bytes,
        overlap=overlap,
    )
    y = torch.empty_like(x)
    kernels.launch(
        plan.down.name,
        (K // spec.few_down_entries(limits.capability, ffn.kind)[plan.down.name].own_columns,),
        _BLOCK,
        {
            "w_down": ffn.by_neurons,
            "hidden": hidden,
            "fired": fired,
            "b_down": ffn.down.bias,
            "residual": onto.get("residual"),
            "M": M,
            "N": N,
            "K": K,
            "y": y,
            "scale": ffn.down.scales,
        },
        plan.down.smem_bytes,
        overlap=overlap,
    )
    return y


def few_pairs(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
) -> Tensor:
    """The same for what `takes_few_walk`: each token over what fires for it.

    Torch has no product of a rounded weight and inputs that are not rounded.
    """
    if by_linear := x.shape[0] <= LINEAR_TOKENS or ffn.gate.is_rounded:
        overlap = onto.get("overlap", False)
        gate = few_linear(kernels, limits, x, ffn.gate, overlap=overlap)
    else:
        gate = F.linear(x, ffn.gate.values, ffn.gate.bias)
    onto["overlap"] = by_linear
    return launch_few_walk(kernels, limits, x, gate, ffn, **onto)


def few_linear(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    weight: Weight,
    *,
    residual: Tensor | None = None,
    wide: bool = False,
    ahead: bool = False,
    overlap: bool = False,
) -> Tensor:
    """`x W^T + b (+ residual)`: `[M, K]` to `[M, N]`, M from 1 to FEW_TOKENS, bf16.

    K is a multiple of what the kind of `weight` asks for (twell_spec.KINDS).
    `wide`: the result is float32, not rounded, and there is no `residual`. `ahead`: it overlaps
    short kernels that leave shared memory for more of its weights. The result is the same.
    """
    M, N, K = x.shape[0], weight.N, weight.K
    plan = plan_few(M, N, K, limits, weight.kind)
    y = x.new_empty(M, N, dtype=torch.float32 if wide else x.dtype)
    launch = plan.ahead if ahead else plan.linear
    kernels.launch(
        launch.name,
        (min(ceil_div(N, spec.FEW_ROWS), limits.num_sms),),
        _BLOCK,
        {
            "x": x,
            "weight": weight.values,
            "bias": weight.bias,
            "residual": residual,
            "M": M,
            "N": N,
            "K": K,
            "y": None if wide else y,
            "y32": y if wide else None,
            "scale": weight.scales,
        },
        launch.smem_bytes,
        overlap=overlap,
    )
    return y


def few_gated(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    counts: Tensor | None = None,
    overlap: bool = False,
    is_silu: bool = False,
) -> Tensor:
    """The dense hidden state, `[M, K]` to `[M, N]`; `counts` and `overlap` as in `Onto`.

    `is_silu`: SiLU stands in the place of ReLU, without `counts`.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    plan = plan_few(M, N, K, limits, ffn.kind)
    hidden = x.new_empty(M, N)
    kernels.launch(
        plan.gated.name,
        (min(ceil_div(N, spec.FEW_ROWS), limits.num_sms),),
        _BLOCK,
        {
            "x": x,
            "w_gate": ffn.gate.values,
            "w_up": ffn.up.values,
            "b_gate": ffn.gate.bias,
            "b_up": ffn.up.bias,
            "M": M,
            "N": N,
            "K": K,
            "hidden": hidden,
            "counts": counts,
            "gate_scale": ffn.gate.scales,
            "up_scale": ffn.up.scales,
            "is_silu": int(is_silu),
        },
        plan.gated.smem_bytes,
        overlap=overlap,
    )
    return hidden
