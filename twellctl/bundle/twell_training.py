"""The gated FFN for training, forward and backward, as sequences of kernel launches on Hopper.

    forward:   gate_pack -> plan_cluster -> up -> add_parts -> hidden_kept
               -> down -> the heavy rows, densely
    backward:  the heavy rows, densely (twell_heavy_grads.py)
               up (grad_y over W_down) -> grad_pairs
               -> list_neurons -> grad_gate_up, grad_down
               -> list_tokens -> grad_x

Between the two only what fired is kept, and x. The host reads back how many rows are heavy.
Sums are fp32; gradients of the weights come as fp32 or rounded once to bf16. What each list holds
stands in grad_lists.cuh.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import twell_grad_plan, twell_sequence
from . import twell_spec as spec
from .twell_heavy import heavy_products
from .twell_heavy_grads import HeavyGrads, heavy_grads, listed_rows, sent_to_host
from .twell_launch import KernelSet
from .twell_plan import PARTS_BLOCKS, Limits, ceil_div, make_plan
from .twell_weights import FFN

# the weights whose gradients one kernel adds up
GATE_UP, DOWN = ("w_gate", "w_up"), ("w_down",)


@dataclass(frozen=True)
class Wanted:
    """Of which inputs gradients are wanted."""

    x: bool = True
    w_gate: bool = True
    w_up: bool = True
    w_down: bool = True

    @property
    def gate_up(self) -> bool:
        """Whether the gradient of the gate's or of the up's weight is."""
        return self.w_gate or self.w_up

    @property
    def of_neurons(self) -> bool:
        """Whether any is that is summed over tokens."""
        return self.gate_up or self.w_down


@dataclass(frozen=True)
class Grads:
    """Gradients; None, or anything, where they are not wanted. The weights' are `[N, K]`."""

    x: Tensor | None = None
    w_gate: Tensor | None = None
    w_up: Tensor | None = None
    w_down: Tensor | None = None


def make_training_plan(
    M: int, N: int, K: int, slots: int, limits: Limits
) -> twell_grad_plan.GradPlan:
    """The plan of `M` >= 1 tokens, for both passes."""
    plan = make_plan(M, N, K, slots, twell_grad_plan.training_cap(N), limits, training=True)
    return twell_grad_plan.make_grad_plan(plan, limits)


def forward(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, slots: int
) -> tuple[Tensor, Tensor, twell_sequence.PairLists]:
    """(y `[M, K]`, how many fired, what backward needs) of x `[M, K]`, M >= 1."""
    plan = make_training_plan(x.shape[0], ffn.N, ffn.K, slots, limits).plan
    counts, entries, heavy_count = twell_sequence.packed_buffers(plan, x.device)
    packed = counts, entries, heavy_count
    twell_sequence.launch_gate_pack(kernels, limits, x, ffn.gate.values, ffn.gate.bias, *packed)
    fired = (counts & 0x3FFFFFFF).sum()
    lists = twell_sequence.launch_plan(kernels, plan, counts, entries, heavy_count)
    del counts, entries
    lists = replace(lists, num_heavy=sent_to_host(heavy_count))
    partial = twell_sequence.launch_up(kernels, plan, x, ffn.up.values, lists)
    lists = twell_sequence.launch_hidden_kept(kernels, limits, plan, partial, lists)
    del partial
    y = torch.empty_like(x)
    twell_sequence.launch_down(kernels, plan, ffn, lists, y)
    lists = replace(lists, masks=None)
    heavy_products(kernels, limits, x, y, ffn, lists.heavy_rows, heavy_count, training=True)
    return y, fired, lists


def backward(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    grad_y: Tensor,
    penalty: Tensor | None,
    kept: twell_sequence.PairLists,
    slots: int,
    wanted: Wanted,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> Grads:
    """The gradients that are wanted, by that of y, `[M, K]` bf16, contiguous.

    `penalty` fp32 `[1]`: the weight of the sum of |h| in the loss. The weights' gradients are fp32
    or bf16.
    """
    plan = make_training_plan(x.shape[0], ffn.N, ffn.K, slots, limits)
    run = _Backward(kernels, limits, plan, x, ffn, grad_y, penalty, kept, wanted)
    found = Grads()
    if wanted.of_neurons:
        found = run.of_neurons(weight_dtype)
    return replace(found, x=run.of_x()) if wanted.x else found


@dataclass(frozen=True)
class _Lists:
    """Lists as grad_lists.cuh lays them out; `hidden` where h of the pairs is asked for."""

    heads: Tensor
    codes: Tensor
    pairs: Tensor
    hidden: Tensor | None
    masks: Tensor


class _Backward:
    """One backward pass."""

    def __init__(
        self,
        kernels: KernelSet,
        limits: Limits,
        plan: twell_grad_plan.GradPlan,
        x: Tensor,
        ffn: FFN,
        grad_y: Tensor,
        penalty: Tensor | None,
        kept: twell_sequence.PairLists,
        wanted: Wanted,
    ):
        self.kernels, self.limits = kernels, limits
        self.of_pass, self.plan = plan, plan.plan
        self.x, self.ffn, self.grad_y, self.penalty, self.kept = x, ffn, grad_y, penalty, kept
        self.wanted = wanted
        self.heavy = self._heavy_grads()
        self.pair_grads = self._pair_grads()

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def _zero(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.x.device)

    def _heavy_grads(self) -> HeavyGrads | None:
        """Of the heavy rows, if there are any."""
        kept, wanted = self.kept, self.wanted
        rows = listed_rows(kept.heavy_rows, kept.heavy_count, kept.num_heavy)
        if not len(rows):
            return None
        window = twell_grad_plan.heavy_grad_window(self.plan.M, self.ffn.N)
        names = (*(GATE_UP if wanted.gate_up else ()), *(DOWN if wanted.w_down else ()))
        return heavy_grads(self.x, self.grad_y, self.ffn, rows, self.penalty, window, names)

    def _pair_grads(self) -> Tensor:
        """grad_gate | grad_up << 16 of each pair, by its place."""
        plan, kept = self.plan, self.kept
        partial = twell_sequence.launch_up(
            self.kernels, plan, self.grad_y, self.ffn.by_neurons, kept
        )
        grads = torch.empty_like(kept.gate_up)
        self.kernels.launch(
            "grad_pairs",
            (plan.num_tiles, PARTS_BLOCKS),
            spec.GRAD_PAIRS_BLOCK,
            {
                "partial": partial,
                "partial_stride": plan.num_pairs,
                "num_ranges": plan.num_ranges,
                "pair_start": kept.pair_start,
                "kept": kept.gate_up,
                "penalty_at": self.penalty,
                "N": plan.N,
                "tile_tokens": plan.tile_tokens,
                "cap": plan.cap,
                "grads": grads,
            },
        )
        return grads

    def _sums(self, names: Sequence[str], as_bf16: bool) -> list[Tensor | None]:
        """float32 `[N, K]`: sums over the heavy rows, to which the kernels add, once for each.

        Without heavy rows they hold anything: what panels leave for each other, and the result in
        float32. None where neither is needed.
        """
        if self.heavy is not None:
            return [self.heavy.sums.pop(name) for name in names]
        if as_bf16 and self.of_pass.token_panels == 1:
            return [None for _ in names]
        size = self.plan.N, self.plan.K
        return [self._empty(*size, dtype=torch.float32) for _ in names]

    def _out(self, names: Sequence[str], as_bf16: bool) -> list[Tensor | None]:
        """bf16 `[N, K]`, into which gradients are rounded; None where the sums are the result."""
        size, dtype = (self.plan.N, self.plan.K), torch.bfloat16
        return [self._empty(*size, dtype=dtype) if as_bf16 else None for _ in names]

    def _room(self, fours: int, panels: int, rounds: int, *, hidden: bool) -> _Lists:
        """For lists of so many rounds; `hidden`: with h."""
        return _Lists(
            heads=self._empty(fours * panels, 2),
            codes=self._empty(rounds, 8),
            pairs=self._empty(rounds, 16),
            hidden=self._empty(rounds, 8) if hidden else None,
            masks=self._empty(ceil_div(rounds, 8), 16),
        )

    def of_neurons(self, dtype: torch.dtype) -> Grads:
        """Gradients that are summed over tokens."""
        lists, as_bf16 = self._list_neurons(), dtype != torch.float32
        gate = up = down = None
        if self.wanted.gate_up:
            gate, up = self._gate_up(lists, as_bf16)
        if self.wanted.w_down:
            down = self._down(lists, as_bf16)
        return Grads(None, gate, up, down)

    def _gate_up(self, lists: _Lists, as_bf16: bool) -> list[Tensor | None]:
        """The gradients of the gate's and of the up's weight."""
        sums, out = self._sums(GATE_UP, as_bf16), self._out(GATE_UP, as_bf16)
        self._add_up(
            "grad_gate_up",
            lists,
            x=self.x,
            pairs=lists.pairs,
            sums_gate=sums[0],
            sums_up=sums[1],
            out_gate=out[0],
            out_up=out[1],
        )
        return out if as_bf16 else sums

    def _down(self, lists: _Lists, as_bf16: bool) -> Tensor | None:
        """The gradient of W_down."""
        (sums,), (out,) = self._sums(DOWN, as_bf16), self._out(DOWN, as_bf16)
        self._add_up(
            "grad_down",
            lists,
            grad_y=self.grad_y,
            hidden=lists.hidden,
            sums=sums,
            out=out,
        )
        return out if as_bf16 else sums

    def _list_neurons(self) -> _Lists:
        """The pairs by neurons."""
        plan, of_pass, kept = self.plan, self.of_pass, self.kept
        panels = of_pass.token_panels
        lists = self._room(of_pass.neuron_fours, panels, of_pass.neuron_rounds, hidden=True)
        self.kernels.launch(
            "list_neurons",
            (plan.num_neuron_groups, panels),
            spec.GRAD_LISTS_BLOCK,
            {
                "pair_start": kept.pair_start,
                "pairs": kept.pairs,
                "kept": kept.gate_up,
                "grads": self.pair_grads,
                "N": plan.N,
                "num_tiles": plan.num_tiles,
                "tile_tokens": plan.tile_tokens,
                "cap": plan.cap,
                "panel_tiles": of_pass.panel_tiles,
                "num_listed": self._zero(),
                "heads": lists.heads,
                "codes": lists.codes,
                "values": lists.pairs,
                "hidden": lists.hidden,
                "masks": lists.masks,
            },
            of_pass.lists_smem(of_pass.token_panel_rows),
        )
        return lists

    def _add_up(self, name: str, lists: _Lists, **own: Tensor | None) -> None:
        """Launch one of the sums over tokens; `own`: what it takes beside what both take."""
        plan, of_pass = self.plan, self.of_pass
        self.kernels.launch(
            name,
            (plan.K // 16, of_pass.weight_splits),
            spec.GRAD_SUMS_BLOCK,
            {
                "heads": lists.heads,
                "codes": lists.codes,
                "masks": lists.masks,
                "M": plan.M,
                "N": plan.N,
                "K": plan.K,
                "panel_rows": of_pass.token_panel_rows,
                "num_panels": of_pass.token_panels,
                "heavy_count": self.kept.heavy_count,
                **own,
            },
            of_pass.weights_smem,
        )

    def of_x(self) -> Tensor:
        """The gradient of x."""
        plan, of_pass = self.plan, self.of_pass
        lists, panels = self._list_tokens(), of_pass.x_panels
        grad = torch.empty_like(self.x)
        size, fp32 = (of_pass.x_chunk, plan.K), torch.float32
        sums = self._empty(*size, dtype=fp32) if panels > 1 else None
        self.kernels.launch(
            "grad_x",
            (plan.K // 16, of_pass.x_shares),
            spec.GRAD_SUMS_BLOCK,
            {
                "w_gate": self.ffn.gate.values,
                "w_up": self.ffn.up.values,
                "heads": lists.heads,
                "codes": lists.codes,
                "pairs": lists.pairs,
                "masks": lists.masks,
                "M": plan.M,
                "N": plan.N,
                "K": plan.K,
                "panel_rows": of_pass.x_panel_rows,
                "num_panels": panels,
                "chunk": of_pass.x_chunk,
                "sums": sums,
                "out": grad,
            },
            of_pass.x_smem,
        )
        del lists, sums  # the launches behind use their memory again
        if self.heavy is not None:
            grad[self.heavy.rows] = self.heavy.x
        return grad

    def _list_tokens(self) -> _Lists:
        """The pairs by tokens."""
        plan, of_pass, kept = self.plan, self.of_pass, self.kept
        panels, rows = of_pass.x_panels, of_pass.x_panel_rows
        lists = self._room(of_pass.token_fours, panels, of_pass.token_rounds, hidden=False)
        self.kernels.launch(
            "list_tokens",
            (plan.num_groups, panels),
            spec.GRAD_LISTS_BLOCK,
            {
                "num_rounds": kept.num_rounds,
                "rounds": kept.rounds,
                "links": kept.links,
                "kept": kept.gate_up,
                "grads": self.pair_grads,
                "M": plan.M,
                "panel_rows": rows,
                "split": of_pass.x_split,
                "group_rounds": plan.group_rounds,
                "num_listed": self._zero(),
                "heads": lists.heads,
                "codes": lists.codes,
                "values": lists.pairs,
                "masks": lists.masks,
            },
            of_pass.lists_smem(rows),
        )
        return lists
