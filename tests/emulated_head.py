"""What follows a step over int4 (emulated_step.py): `refine`, and the bf16 head, on a CPU; and all
kernels of a decoder."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from emulated_kernels import EmulatedKernels
from emulated_step import Done, Model, judge
from torch import Tensor

from twellctl.bundle.twell_few import few_linear
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_weights import plain_weight
from twellctl.decoding.rough_head import Estimate, refine
from twellctl.decoding.whole_step import DecoderLayer

H200 = Limits(132, 232448, (9, 0))
FROM_STEP = ("x", "most", "least", "logits")
FROM_CHOICE = ("token", "position", "states", "read")


class HeadKernels(EmulatedKernels):
    """Those behind a step or a choice, which may still run."""

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False, **how):
        """As `KernelSet.launch`."""
        if overlap:
            found = (args.get(name) for name in (*FROM_STEP, *FROM_CHOICE))
            how["from_previous"] = [tensor for tensor in found if tensor is not None]
        super().launch(name, grid, block, args, smem_bytes, **how)


class DecoderKernels(HeadKernels):
    """All of them; `beside`: what a step reads by pointers in memory."""

    beside = ()

    def prepare(self, names) -> None:
        """They are compiled as they are launched."""

    def launch(self, name, grid, *given, together=False, **how):
        """As `KernelSet.launch`."""
        if together:
            how |= {"at_once": grid[0], "beside": self.beside}
        super().launch(name, grid, *given, **how)


def read_by(layers: Iterable[DecoderLayer]) -> Iterator[Tensor]:
    """What the table of layers points to."""
    for layer in layers:
        yield from (layer.norms.attention, layer.norms.ffn, layer.attend.keys, layer.attend.values)
        for weight in (layer.qkv, layer.out, *layer.ffn.weights):
            yield from weight.tensors


@dataclass(frozen=True)
class Choice:
    """Logits `[V]`: of the head in 8 bits; the same, refined where it matters; of the bf16 head.
    And what the step has said of them."""

    rough: Tensor
    refined: Tensor
    exact: Tensor
    estimate: Estimate

    @property
    def is_exact(self) -> Tensor:
        """Which refined logits have the bits of the bf16 head's."""
        return bits(self.refined) == bits(self.exact)

    def check(self) -> None:
        """That the choice is that of the bf16 head, and that the step has said what is so."""
        same = self.is_exact
        assert (same | (bits(self.refined) == bits(self.rough))).all()
        best = self.exact.argmax()
        assert self.refined.argmax() == best
        assert same[best]
        assert same[self.exact == self.exact[best]].all()
        most = self.estimate.most[0, : len(self.exact)]
        assert not (self.exact > most).any()


def bits(logits: Tensor) -> Tensor:
    """Of NaN, too, one number each."""
    return logits.contiguous().view(torch.int32)


def choice_of(kernels: HeadKernels, head: Tensor, done: Done) -> Choice:
    """Of what a step has `done` with this head."""
    rough, made = done.logits[-1].clone(), done.estimate
    exact = few_linear(kernels, H200, made.x, plain_weight(head), wide=True)
    refine(kernels, head, made)
    return Choice(rough, made.logits[0, : len(head)], exact[0], made)


def near_ties(model: Model, wanted: int = 50) -> Tensor:
    """A head `[V, K]` for that model, in which so many rows, the first two of them the same, have
    logits that differ by no more than bf16 rounds: less than 8 bits tell apart."""
    V, K, generator = model.vocabulary, model.K, torch.Generator().manual_seed(model.seed)
    x = judge(model).state
    rows = torch.randn(V, K, generator=generator, dtype=torch.float64) * K**-0.5
    tied = torch.randperm(V, generator=generator)[:wanted]
    beside = rows[tied] - (rows[tied] @ x / x.square().sum())[:, None] * x
    rows[tied] = beside + 6 * x / x.square().sum()
    rows[tied[1]] = rows[tied[0]]
    return rows.bfloat16()
