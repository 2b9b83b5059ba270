"""One decoder layer over few tokens, one kernel after the other (kernel_decoder.py)."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_ways import Way
from twellctl.decoding.attention import AttendPlan, Rotary, Workspace, attend
from twellctl.decoding.few_ways import linear
from twellctl.decoding.norms import added, normalise_q_and_k
from twellctl.decoding.whole_step import DecoderLayer


@dataclass(frozen=True)
class LayerPass:
    """Over n tokens: `positions` int32 `[n]`, of each the `tables` int32 `[n, W]` of its row.

    `plan`, `rotary` and `workspace` are attention's; `eps` is that of norms.
    """

    kernels: KernelSet
    limits: Limits
    plan: AttendPlan
    positions: Tensor
    tables: Tensor
    rotary: Rotary
    workspace: Workspace
    eps: float

    def __call__(
        self,
        layer: DecoderLayer,
        way: Way,
        x: Tensor,
        h: Tensor,
        norm: Tensor | None,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`x` `[n, K]` and its norm `h`, as the layer takes it, to those behind it; `norm`: that of
        the next layer. `way`: of the FFN, which adds to int32 `counts` `[n]` what fires."""
        product = partial(linear, self.kernels, self.limits, overlap=True)
        qkv = product(h, layer.qkv, ahead=way.own)
        if layer.q_k_norms is not None:
            normalise_q_and_k(self.kernels, qkv, *layer.q_k_norms, self.eps)
        where = self.positions, self.tables, self.rotary, self.workspace
        h = attend(self.kernels, self.plan, layer.attend, qkv, *where)
        out = partial(product, h, layer.out)
        x, h = added(self.kernels, x, out, layer.norms.after_attention, layer.norms.ffn, self.eps)
        how = {"counts": counts, "overlap": True}
        run = partial(way.run, self.kernels, self.limits, h, layer.ffn, **how)
        return added(self.kernels, x, run, layer.norms.after_ffn, norm, self.eps)
