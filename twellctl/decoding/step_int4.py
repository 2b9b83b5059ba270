"""Weights in int4 as the kernel of a whole step reads them (kernels/decode/step_codes.cuh).

Codes and scales are laid anew, none is rounded anew.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_int4 import kept_codes, kept_group_size
from twellctl.bundle.twell_model import gate_and_up
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import STEP_QUAD, step_group
from twellctl.bundle.twell_weights import FFN, Weight
from twellctl.decoding.whole_step import DecoderLayer, StepSizes, why_no_whole_step

_BLOCK = 64  # columns of a row that lie together


def takes_int4(modules: Iterable[nn.Module], sizes: StepSizes, limits: Limits) -> bool:
    """Whether the decoder layers `modules` keep codes of groups, and are of sizes (`sizes` of
    int4), that the kernel of a whole step takes."""
    if why_no_whole_step(sizes, limits) is not None:
        return False
    linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    groups = (kept_group_size(linear) for linear in linears)
    return all(size is not None and size % step_group(sizes.K) == 0 for size in groups)


def int4_layers(
    modules: Sequence[nn.Module], layers: Sequence[DecoderLayer], sizes: StepSizes, limits: Limits
) -> list[DecoderLayer] | None:
    """`layers` with weights as the kernel of a whole step takes them in int4, of the decoder layers
    `modules`; None where it does not (`takes_int4`), or weights were changed since."""
    if not takes_int4(modules, sizes, limits):
        return None
    made = []
    for module, layer in zip(modules, layers, strict=True):
        if (laid := _laid(module, layer, step_group(sizes.K))) is None:
            return None
        made.append(laid)
    return made


def _laid(module: nn.Module, layer: DecoderLayer, group: int) -> DecoderLayer | None:
    own, mlp, ffn = module.self_attn, module.mlp, layer.ffn
    of_qkv = [own.qkv_proj] if hasattr(own, "qkv_proj") else [own.q_proj, own.k_proj, own.v_proj]
    qkv, out = _codes_of(*of_qkv), _codes_of(own.o_proj)
    gate_up, down = _codes_of(*gate_and_up(mlp)), _codes_of(mlp.down_proj)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    halves = zip(gate_up[0].chunk(2), gate_up[1].chunk(2), (ffn.gate, ffn.up), strict=True)
    gate, up = (
        Weight("int4", by_quads(codes, scales, group), bias=weight.bias)
        for codes, scales, weight in halves
    )
    turned, scales = down_by_neurons(*down, group)
    return replace(
        layer,
        qkv=Weight("int4", by_quads(*qkv, group), bias=layer.qkv.bias),
        out=Weight("int4", by_quads(*out, group), bias=layer.out.bias),
        ffn=FFN(gate, up, Weight("int4", turned, scales, ffn.down.bias), turned),
    )


def _codes_of(*linears: nn.Linear) -> tuple[Tensor, Tensor] | None:
    """Codes and scales of the outputs of all `linears`; None if one keeps none."""
    kept = [kept_codes(linear) for linear in linears]
    there = [one for one in kept if one is not None]
    if len(there) < len(kept):
        return None
    codes, scales = zip(*there, strict=True)
    return torch.cat(codes), torch.cat(scales)


def by_quads(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """uint8 `[N / 4, bytes]`: of four rows each their codes, then their scales, by groups of
    `group`, of int8 codes `[N, K]` and bf16 scales `[N, K / G]`, G a multiple of `group`."""
    N, K = codes.shape
    rows = torch.arange(N, device=codes.device)
    laid = _packed(codes, rows % STEP_QUAD).view(N // STEP_QUAD, -1)
    behind = _for_groups(scales, K, group).contiguous().view(torch.uint8)
    return torch.cat([laid, behind.view(N // STEP_QUAD, -1)], 1)


def down_by_neurons(codes: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Of W_down's int8 codes `[K, N]` and bf16 scales `[K, N / G]`, G a multiple of `group`: uint8
    `[N, K / 2]`, the codes by neurons, and bf16 `[N / group, K]`, the scales."""
    N = codes.shape[1]
    quads = torch.arange(N, device=codes.device) // STEP_QUAD
    scales = _for_groups(scales, -(-N // group) * group, group)
    return _packed(codes.t(), quads % STEP_QUAD), scales.t().contiguous()


def _for_groups(scales: Tensor, num: int, group: int) -> Tensor:
    """The same scales for groups of `group` of `num` weights, which share a scale by more."""
    return scales.repeat_interleave(num // group // scales.shape[1], 1)


def _packed(codes: Tensor, swizzle: Tensor) -> Tensor:
    """uint8 `[R, C / 2]`: of two codes the even one in the upper half; block b of 64 of a row lies
    in place b ^ `swizzle` of the row."""
    nibbles = codes.to(torch.uint8) & 15
    blocks = (nibbles[:, 0::2] << 4 | nibbles[:, 1::2]).unflatten(1, (-1, _BLOCK // 2))
    return _moved(blocks, swizzle).flatten(1)


def _moved(blocks: Tensor, swizzle: Tensor) -> Tensor:
    """`blocks` `[R, B, bytes]`, of which the row's swizzle tells where each lies."""
    places = torch.arange(blocks.shape[1], device=blocks.device) ^ swizzle[:, None]
    return blocks.gather(1, places[..., None].expand_as(blocks))
