"""A draft head (heads/head.py) over our own kernels, for steps of one row.

It is one more layer over the pages of the model's last one. What it caches there for a draft is
written over by the model's pass, which reads the draft. Its weights are rounded to e4m3, where
sizes allow, since a draft needs no more and takes the time that they are read in.

A draft is a chain of launches, five where `step` takes the layer (whole_step.py):

    join_norms -> few_linear (join) -> step -> few_linear (its rows of the model's head) -> choose

Elsewhere the layer goes one kernel after the other (layer_pass.py). The last one is step_end.py's.
Before the first draft of a round, what the model has made of all tokens of the round before is
merged, though one of them is used: which one, join_norms finds out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_e4m3 import round_weight
from twellctl.bundle.twell_few import few_dense_kernels, few_linear
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import KINDS
from twellctl.bundle.twell_weights import FFN, Weight, plain_weight
from twellctl.decoding.attention import AttendLayer, Rotary, head_width
from twellctl.decoding.few_ways import linear, with_activation
from twellctl.decoding.layer_pass import LayerPass
from twellctl.decoding.norms import join_norms, rms_norm
from twellctl.decoding.whole_step import DecoderLayer, StepSizes, WholeStep, why_no_whole_step
from twellctl.heads.head import DraftHead, HeadSizes
from twellctl.models.families import Norms, Scales

_WAY = with_activation(nn.SiLU(), is_silu=True)


class KernelHead:
    """A `HeadPass` (head_drafter.py).

    `embeddings` and `rows` `[V, K]` are those of the model and of its head, `last` what its last
    layer attends to, `rotary` what turns heads there; `over` makes the pass of a layer of a
    position `[1]` and a table `[1, W]`.
    """

    def __init__(
        self,
        head: DraftHead,
        kernels: KernelSet,
        limits: Limits,
        embeddings: Tensor,
        rows: Tensor,
        last: AttendLayer,
        rotary: Rotary,
        over: Callable[[Tensor, Tensor], LayerPass],
    ):
        self._kernels, self._limits, self._over = kernels, limits, over
        self._eps, self._embeddings = head.sizes.eps, embeddings
        self._rows = _weight(rows[head.tokens.to(rows.device)])
        on = partial(torch.Tensor.to, device=rows.device)
        joined = head.norm_embedding.weight, head.norm_state.weight
        self._norms_joined, self._norm = torch.stack([*map(on, joined)]), on(head.norm.weight)
        self._join = _weight(on(head.join.weight))
        self._norms_lower = [on(norm.weight) for norm in head.norms_lower]
        self._merge = None if head.merge is None else _weight(on(head.merge.weight))
        sizes = step_sizes(head.sizes, len(rows), limits)
        self._layer = _layer_of(head, last, None if sizes is None else sizes.kind)
        self._in_one: WholeStep | None = None
        taken: list[Weight | FFN] = [self._rows, self._join]
        if self._merge is not None:
            taken.append(self._merge)
        if sizes is None:
            taken += [self._layer.qkv, self._layer.out, self._layer.ffn]
        else:
            of_model = embeddings, self._norm, rows, rotary, Scales(self._eps)
            make = partial(WholeStep, kernels, limits, sizes, [self._layer], *of_model)
            self._in_one = make(form="dense", num_own=sizes.N, is_silu=True)
            kernels.prepare([sizes.entry("dense")])
        for kind in {weight.kind for weight in taken}:
            kernels.prepare(few_dense_kernels(limits, kind))
        kernels.prepare(["join_norms"])

    def begin(
        self, tables: Tensor, position: Tensor, count: int, states: Tensor, read: Tensor
    ) -> None:
        self._tables, self.states = tables, self._merged(states)
        self._read: Tensor | None = read

    def __call__(self, number: int, token: Tensor, position: Tensor) -> Tensor:
        kernels, limits = self._kernels, self._limits
        y = join_norms(
            kernels,
            token,
            self._embeddings,
            self.states,
            self._norms_joined,
            self._eps,
            among=None if self._read is None else (self._read, position),
        )
        x = linear(kernels, limits, y, self._join, overlap=True)
        if self._in_one is None:
            self.states = self._one_by_one(x, position)
        else:
            self.states = self._in_one.states(x, position, self._tables)
        self._read = None
        return few_linear(kernels, limits, self.states, self._rows, wide=True, overlap=True)

    def _merged(self, states: Tensor) -> Tensor:
        """`[n, K]` of what the model has made, `[n, (1 + m) K]` with m lower layers."""
        if self._merge is None:
            return states
        states = states.clone()
        *lower, _ = states.split(len(self._norm), 1)
        for weight, part in zip(self._norms_lower, lower, strict=True):
            rms_norm(self._kernels, part, weight, self._eps, out=part)
        return linear(self._kernels, self._limits, states, self._merge, overlap=True)

    def _one_by_one(self, x: Tensor, position: Tensor) -> Tensor:
        h = rms_norm(self._kernels, x, self._layer.norms.attention, self._eps)
        through = self._over(position, self._tables)
        _, states = through(self._layer, _WAY, x, h, self._norm)
        return states


def step_sizes(sizes: HeadSizes, vocab_size: int, limits: Limits) -> StepSizes | None:
    """Of the layer of a head as one kernel takes it, rounded if it takes that; None: it does not,
    or this is no Hopper GPU."""
    whole = StepSizes(sizes.K, sizes.N, sizes.H, sizes.D, vocab_size)
    kinds = (replace(whole, kind=kind) for kind in ("e4m3", "bf16") if limits.hopper)
    return next((of for of in kinds if why_no_whole_step(of, limits) is None), None)


def _layer_of(head: DraftHead, last: AttendLayer, kind: str | None) -> DecoderLayer:
    """All of a `kind`, with W_down by rows of neurons, for one kernel; None: as others take it."""
    on = partial(torch.Tensor.to, device=last.keys.device)
    rest = 0, head_width(head.sizes.D) - head.sizes.D
    of_q, of_k = (getattr(norm, "weight", None) for norm in (head.q_norm, head.k_norm))
    attend = AttendLayer(
        last.keys,
        last.values,
        head.sizes.D**-0.5,
        q_norm=None if of_q is None else F.pad(on(of_q), rest),
        k_norm=None if of_k is None else F.pad(on(of_k), rest),
        eps=head.sizes.eps,
    )
    norms = Norms(on(head.norm_attention.weight), None, on(head.norm_ffn.weight), None)
    q_k_v = head.q, head.k, head.v
    biases = [on(of.bias) for of in q_k_v if of.bias is not None]
    whole = on(torch.cat([of.weight for of in q_k_v]))
    qkv = _weight(whole, torch.cat(biases) if biases else None, kind=kind)
    bias = None if head.out.bias is None else on(head.out.bias)
    out = _weight(on(head.out.weight), bias, kind=kind)
    # of one kind: down has other inputs
    of_ffn = kind or _kind_for(head.sizes.K, head.sizes.N)
    gate, up, down = (_weight(on(of.weight), kind=of_ffn) for of in (head.gate, head.up, head.down))
    if kind is not None:
        down = replace(down, values=down.values.t().contiguous().t())
    return DecoderLayer(norms, qkv, attend, out, FFN(gate, up, down))


def _weight(values: Tensor, bias: Tensor | None = None, *, kind: str | None = None) -> Weight:
    """Of a `kind`; None: rounded, where that is possible."""
    if (kind or _kind_for(values.shape[1])) == "bf16":
        return plain_weight(values, bias)
    return Weight("e4m3", *round_weight(values), bias)


def _kind_for(*inputs: int) -> str:
    """Of weights with so many inputs, for products of their own."""
    return "bf16" if any(K % KINDS["e4m3"].step for K in inputs) else "e4m3"
