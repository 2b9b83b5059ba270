"""A draft head (heads/head.py) over our own kernels, for steps of one row.

It is one more layer over the pages of the model's last one. What it caches there for a draft is
written over by the model's pass, which reads the draft. Its weights are rounded to e4m3, where
sizes allow, since a draft needs no more and takes the time that they are read in.
"""

from collections.abc import Callable
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
from twellctl.decoding.attention import AttendLayer, head_width
from twellctl.decoding.few_ways import linear, with_activation
from twellctl.decoding.layer_pass import LayerPass
from twellctl.decoding.norms import embed_norm, rms_norm
from twellctl.decoding.whole_step import DecoderLayer
from twellctl.heads.head import DraftHead
from twellctl.models.families import Norms

_WAY = with_activation(nn.SiLU(), is_silu=True)


class KernelHead:
    """A `HeadPass` (head_drafter.py).

    `embeddings` and `rows` `[V, K]` are those of the model and of its head, `last` what its last
    layer attends to; `over` makes the pass of a layer of a position `[1]` and a table `[1, W]`.
    """

    def __init__(
        self,
        head: DraftHead,
        kernels: KernelSet,
        limits: Limits,
        embeddings: Tensor,
        rows: Tensor,
        last: AttendLayer,
        over: Callable[[Tensor, Tensor], LayerPass],
    ):
        self._kernels, self._limits, self._over = kernels, limits, over
        self._eps, self._embeddings = head.sizes.eps, embeddings
        self._rows = _weight(rows[head.tokens.to(rows.device)])
        on = partial(torch.Tensor.to, device=rows.device)
        norms = head.norm_embedding, head.norm_state, head.norm
        self._norm_embedding, self._norm_state, self._norm = (on(of.weight) for of in norms)
        self._join = _weight(on(head.join.weight))
        self._layer = _layer_of(head, last)
        kinds = {of.kind for of in (self._rows, self._join, self._layer.qkv, self._layer.ffn)}
        for kind in kinds:
            kernels.prepare(few_dense_kernels(limits, kind))

    def begin(self, tables: Tensor, position: Tensor, count: int) -> None:
        self._tables = tables

    def __call__(
        self, number: int, tokens: Tensor, positions: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        kernels, limits, eps = self._kernels, self._limits, self._eps
        _, embedded = embed_norm(kernels, tokens, self._embeddings, self._norm_embedding, eps)
        both = torch.cat((embedded, rms_norm(kernels, states, self._norm_state, eps)), 1)
        x = linear(kernels, limits, both, self._join, overlap=True)
        h = rms_norm(kernels, x, self._layer.norms.attention, eps)
        through = self._over(positions, self._tables)
        _, states = through(self._layer, _WAY, x, h, self._norm)
        how = {"wide": True, "overlap": True}
        return states, few_linear(kernels, limits, states, self._rows, **how)


def _layer_of(head: DraftHead, last: AttendLayer) -> DecoderLayer:
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
    qkv = _weight(on(torch.cat([of.weight for of in q_k_v])), torch.cat(biases) if biases else None)
    out = _weight(on(head.out.weight), None if head.out.bias is None else on(head.out.bias))
    # of one kind: down has other inputs
    make = _weight if _may_round(head.sizes.K) and _may_round(head.sizes.N) else plain_weight
    ffn = FFN(*(make(on(of.weight)) for of in (head.gate, head.up, head.down)))
    return DecoderLayer(norms, qkv, attend, out, ffn)


def _weight(values: Tensor, bias: Tensor | None = None) -> Weight:
    if not _may_round(values.shape[1]):
        return plain_weight(values, bias)
    return Weight("e4m3", *round_weight(values), bias)


def _may_round(K: int) -> bool:
    return K % KINDS["e4m3"].step == 0
