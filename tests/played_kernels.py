"""Plain PyTorch in the place of the decode engine's kernels, for tests on a CPU."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from twellctl.bundle import twell_ways
from twellctl.bundle.twell_few import FEW_TOKENS
from twellctl.bundle.twell_nvrtc import KernelError
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_ways import FEW_WAYS, Way
from twellctl.decoding import (
    attention,
    coded_decoder,
    few_ways,
    kernel_decoder,
    kernel_fit,
    kernel_head,
    layer_pass,
    norms,
    prompt_pass,
)
from twellctl.decoding.attention import Heads, Rotary, head_width
from twellctl.decoding.pages import PAGE
from twellctl.decoding.rounds import inputs_of
from twellctl.decoding.sampler import Field
from twellctl.decoding.step_end import Record, StepEnd, _of_each_token

H200 = Limits(132, 227 << 10, (9, 0))
SIZES = {"hidden_size": 64, "head_dim": 64}
TWELL = {"tile": 256, "slots": [32, 32]}
PATCHED = (
    attention,
    coded_decoder,
    kernel_decoder,
    kernel_fit,
    kernel_head,
    layer_pass,
    norms,
    prompt_pass,
)


class Kernels:
    """Stands in for the compiled ones; `prepared`: the entries that were asked for."""

    def __init__(self, failure: str | None = None):
        self.prepared, self.failure = (), failure
        self.taken: list[str] = []  # the ways of FFNs

    def prepare(self, names) -> None:
        self.prepared = names
        if self.failure:
            raise KernelError(self.failure)

    def launch(self, name, grid, block, args, *, overlap) -> None:
        """`choose`; the others are stood in for with their launches."""
        logits, ids, fields, fired, records = (
            args[of] for of in ("logits", "ids", "fields", "fired", "record")
        )
        assert (name, grid[1], args["V"], args["L"]) == ("choose", *logits.shape, len(fired))
        B, Q = len(logits) // args["Q"], args["Q"]
        assert len(args["best"]) >= len(logits)
        assert len(args["tickets"]) >= B
        assert (args["tokens"] is None) == (args["positions"] is None) == (Q == 1)
        inputs = (args["tokens"], args["positions"]) if Q > 1 else inputs_of(fields, None)
        if records.dim() > 3:
            records = records[fields[Field.SLOT, 0]]
        fields[Field.SLOT] ^= 1
        wide = _of_each_token(fields, inputs[1])
        end = StepEnd(Record([1] * len(fired), args["V"]), None, B, logits.device, Q)
        end._by_torch(logits, ids, fired, inputs, wide, fields, records, True)


def rotated(heads: Tensor, angles: tuple[Tensor, Tensor], turned: int) -> Tensor:
    cos, sin = (table[:, None] for table in angles)
    halves = rotate_half(heads[..., :turned])
    both = heads * cos + torch.cat((halves, heads[..., turned:]), -1) * sin
    return both.to(heads.dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(kernels, x, weight, eps, out=None) -> Tensor:
    y = norm(x, weight, eps)
    return y if out is None else out.copy_(y)


def add_norm(kernels, z, weight_of_z, x, weight, eps) -> tuple[Tensor, Tensor]:
    x = x + norm(z, weight_of_z, eps)
    return x, x if weight is None else norm(x, weight, eps)


def embed_norm(
    kernels, tokens, table, weight, eps, counts=None, *, scale=1.0
) -> tuple[Tensor, Tensor]:
    if counts is not None:
        counts.zero_()
    x = F.embedding(tokens, table) * scale
    return x, x if weight is None else norm(x, weight, eps)


def join_norms(kernels, token, table, states, weights, eps, among=None) -> Tensor:
    place = 0
    if among is not None:
        read, position = among
        assert len(read) == len(states)
        place = next((i for i, at in enumerate(read.tolist()) if at == int(position) - 1), 0)
    rows = F.embedding(token, table), states[place : place + 1]
    return torch.cat([norm(row, own, eps) for row, own in zip(rows, weights, strict=True)], 1)


def heads_of(heads, layer, qkv, positions, rotary) -> list[Tensor]:
    """q, k and v `[tokens, heads, D]`, normed and turned."""
    H, Hkv, D = heads
    q, k, v = qkv.unflatten(1, (-1, D)).split((H, Hkv, Hkv), 1)
    if layer.q_norm is not None:
        weights = layer.q_norm[:D], layer.k_norm[:D]
        q, k = (norm(of, weight, layer.eps) for of, weight in zip((q, k), weights, strict=True))
    angles = tuple(table[positions.clamp(min=0).long(), :D] for table in (rotary.cos, rotary.sin))
    return [*(rotated(of, angles, rotary.turned) for of in (q, k)), v]


def store_keys(kernels, heads, layer, qkv, positions, tables, rotary) -> None:
    assert len(qkv) == len(positions) == len(tables)
    _, k, v = heads_of(heads, layer, qkv, positions, rotary)
    for token, position in enumerate(positions.tolist()):
        if position >= 0:
            page, slot = int(tables[token, position // PAGE]), position % PAGE
            layer.keys[page, :, slot, : heads.D] = k[token]
            layer.values[page, :, slot, : heads.D] = v[token]


def attend(kernels, plan, layer, qkv, positions, tables, rotary, workspace) -> Tensor:
    assert len(qkv) == len(positions) == len(tables) == plan.B * plan.queries
    assert workspace.parts.numel() >= plan.num_parts
    assert workspace.tickets.numel() >= plan.num_tickets
    heads = Heads(plan.H, plan.Hkv, plan.D)
    store_keys(kernels, heads, layer, qkv, positions, tables, rotary)
    q, _, _ = heads_of(heads, layer, qkv, positions, rotary)
    cached = layer.keys[..., : plan.D], layer.values[..., : plan.D]
    tokens = []
    for token, position in enumerate(positions.clamp(min=0).tolist()):
        start = max(0, position + 1 - layer.window) if layer.window else 0
        keys, values = (
            pages[tables[token].long()].transpose(0, 1).flatten(1, 2)[:, start : position + 1]
            for pages in cached
        )
        ours = q[token].unflatten(0, (plan.Hkv, -1))
        scores = torch.einsum("gsd,gpd->gsp", ours, keys) * layer.scale
        if layer.cap:
            scores = layer.cap * (scores / layer.cap).tanh()
        tokens.append(torch.einsum("gsp,gpd->gsd", scores.softmax(-1), values).flatten())
    return torch.stack(tokens)


def floats_of(weight, dtype: torch.dtype) -> Tensor:
    if not weight.is_rounded:
        return weight.values
    return (weight.values.float() * weight.scales).to(dtype)


def linear(kernels, limits, x, weight, *, residual=None, **how) -> Tensor:
    assert len(x) <= FEW_TOKENS
    y = F.linear(x, floats_of(weight, x.dtype), weight.bias)
    return y if residual is None else residual + y


def gated(kernels, limits, x, ffn, *, overlap, counts=None, is_silu=False) -> Tensor:
    gate, up = (
        F.linear(x, floats_of(weight, x.dtype), weight.bias) for weight in (ffn.gate, ffn.up)
    )
    if counts is not None:
        counts += (gate > 0).sum(-1)
    act = F.silu if is_silu else F.relu
    return act(gate) * up


def played(way: Way) -> Way:
    def run(kernels, limits, x, ffn, *, residual, counts, overlap) -> Tensor:
        kernels.taken.append(way.name)
        hidden = gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
        y = F.linear(hidden, ffn.down.values, ffn.down.bias)
        return y if residual is None else residual + y

    return replace(way, run=run)


def noted(way: Way) -> Way:
    """The way itself, over stand-ins of its kernels."""

    def run(kernels, *given, **how) -> Tensor:
        kernels.taken.append(way.name)
        return way.run(kernels, *given, **how)

    return replace(way, run=run)


def rotary_tables(dtype: torch.dtype, rotary, num_positions: int, D: int, device) -> Rotary:
    cos, sin = rotary(torch.empty(1, dtype=dtype), torch.arange(num_positions)[None])
    rest = 0, head_width(D) - cos.shape[-1]
    return Rotary(F.pad(cos[0], rest, value=1.0), F.pad(sin[0], rest), cos.shape[-1])


def stand_in(monkeypatch, dtype: torch.dtype = torch.float32) -> Kernels:
    """Put them in the place of the compiled ones, for models of `dtype`."""
    made = Kernels()
    for name, taken in {
        "kernels_for": lambda sources, index: made,
        "device_limits": lambda index: H200,
        "what_is_missing": lambda: None,
        "embed_norm": embed_norm,
        "join_norms": join_norms,
        "rms_norm": rms_norm,
        "add_norm": add_norm,
        "attend": attend,
        "store_keys": store_keys,
        "few_linear": linear,
        "takes_hopper_kernels": lambda index: True,
        "rotary_tables": partial(rotary_tables, dtype),
    }.items():
        for module in PATCHED:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, taken)
    monkeypatch.setattr(few_ways, "few_linear", linear)
    monkeypatch.setattr(few_ways, "few_gated", gated)
    monkeypatch.setattr(few_ways, "FEW_WAYS", tuple(map(played, FEW_WAYS)))
    monkeypatch.setattr(kernel_decoder, "DENSE", noted(few_ways.DENSE))
    monkeypatch.setattr(twell_ways, "WAYS", tuple(map(played, twell_ways.WAYS)))
    return made
