"""A draft head (heads/head.py) over our own kernels, for steps of one row.

It is one more layer over the pages of the model's last one. What it caches there for a draft is
written over by the model's pass, which reads the draft.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_few import few_linear
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_weights import FFN, Weight, joined, lay_together, plain_weight
from twellctl.decoding.attention import AttendLayer, head_width
from twellctl.decoding.families import Norms
from twellctl.decoding.few_ways import linear, with_activation
from twellctl.decoding.layer_pass import LayerPass
from twellctl.decoding.norms import embed_norm, rms_norm
from twellctl.decoding.whole_step import DecoderLayer
from twellctl.heads.head import DraftHead

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
        self._rows = plain_weight(rows[head.tokens])
        self._norm_embedding, self._norm_state = head.norm_embedding.weight, head.norm_state.weight
        self._join, self._norm = _weight(head.join), head.norm.weight
        self._layer = _layer_of(head, last)

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
    rest = 0, head_width(head.sizes.D) - head.sizes.D
    of_q, of_k = (getattr(norm, "weight", None) for norm in (head.q_norm, head.k_norm))
    attend = AttendLayer(
        last.keys,
        last.values,
        head.sizes.D**-0.5,
        q_norm=None if of_q is None else F.pad(of_q, rest),
        k_norm=None if of_k is None else F.pad(of_k, rest),
        eps=head.sizes.eps,
    )
    norms = Norms(head.norm_attention.weight, None, head.norm_ffn.weight, None)
    lay_together(head.q, head.k, head.v)
    qkv = joined(*map(_weight, (head.q, head.k, head.v)))
    ffn = FFN(*map(_weight, (head.gate, head.up, head.down)))
    return DecoderLayer(norms, qkv, attend, _weight(head.out), ffn)


def _weight(linear: nn.Linear) -> Weight:
    return plain_weight(linear.weight, linear.bias)
