"""The layers of a model are changed one after the other, on what those before them give.

The target of a layer is the hidden state of the model as it was, so that each layer also mends what
those before it have broken. (Where a layer does more than add its FFN's output, such as normalise
it first, the target is what its own FFN gives on the same input.)

The walk knows states, text that processes share, memory and resuming. What is done to a layer is a
method's (`method.py`).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from twellctl.errors import TwellError
from twellctl.fitting.block import Block, States
from twellctl.fitting.kept import KeptLayers
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.method import Change, Figures, Method
from twellctl.fitting.settings import Progress
from twellctl.here.processes import from_all, is_one_of_several, sum_over_processes

TOKENS_AT_ONCE = {"cuda": 16384, "cpu": 2048}  # of a forward of one layer
LOGIT_TOKENS = 2048
LOOKED_AT = 16  # windows, at most, that a method looks at first
MOST_AWAY = 10.0  # times their length, on held-out text: states that differ by more are noise
WORSE = 0.1  # nats that a model which guesses may have lost
ANEW = "start again with --overwrite and more --tokens, a higher --density or a lower --step-rate"


@dataclass(frozen=True)
class Walked:
    """A layer that is done: the method's figures, and how far the states after it are from the
    original's: relative, a mean over held-out tokens."""

    figures: Figures
    states_differ: float


@dataclass(frozen=True)
class HeldOut:
    """On held-out text: nats a token, and the share of tokens for which both choose the same."""

    cross_entropy: float
    source_cross_entropy: float
    kl: float
    same_token: float

    def refuse_broken(self, vocabulary: int) -> None:
        """`TwellError` for a model that is worse than its source, and than guessing.

        A source that is worse than guessing itself says nothing of the fit.
        """
        guessing, source = math.log(vocabulary), self.source_cross_entropy
        most = max(source + WORSE, guessing) if source <= guessing else math.inf
        if not self.cross_entropy <= most:
            raise TwellError(
                f"the fitted model is broken: its cross-entropy on held-out text is "
                f"{self.cross_entropy:.2f}, that of its source {self.source_cross_entropy:.2f}, "
                f"that of guessing {guessing:.2f}: {ANEW}"
            )


@dataclass(frozen=True)
class Text:
    """Windows of ids, to fit on `[W, L]` and to measure on `[H, L]`, those of this process."""

    fitted: Tensor
    held_out: Tensor


class Walk:
    """One walk over all layers of a model with one method.

    States of both models, `[W + H, L, K]`, stay on the device. They are float32 where the model's
    weights, of `dtype`, are; else bf16.
    """

    def __init__(
        self,
        layerwise: Layerwise,
        text: Text,
        method: Method,
        kept: KeptLayers,
        dtype: torch.dtype,
        seed: int,
    ):
        self.layerwise, self.text, self.method, self.kept = layerwise, text, method, kept
        self.seed, self.num_kept = seed, kept.count
        self.ids = torch.cat([text.fitted, text.held_out])
        self._dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16

    @torch.no_grad()
    def run(self, progress: Progress) -> list[Walked]:
        """Change all layers, or those that were not kept, and keep them."""
        began = time.monotonic()
        self._look()
        self.states = self._first_states()
        done: list[Walked] = []
        total = len(self.layerwise.layers)
        for index in range(total):
            if index == self.num_kept:  # those kept from before take no time
                began = time.monotonic()
            done.append(self._layer(index, [layer.figures for layer in done]))
            left = (time.monotonic() - began) / max(1, len(done) - self.num_kept)
            progress(len(done), total, done[-1].states_differ, left * (total - len(done)))
        return done

    def _look(self) -> None:
        some = min(LOOKED_AT, -(-len(self.text.fitted) // 4))
        ids = from_all(self.text.fitted[:some].clone())[0]  # all look at the same text
        self.method.look(self.layerwise, ids)

    def _first_states(self) -> States:
        device, on_gpu = self.layerwise.device, self.layerwise.device.type == "cuda"
        at_once = max(1, TOKENS_AT_ONCE[device.type] // self.layerwise.seq_len)
        parts = (self.layerwise.first_states(ids) for ids in self.ids.split(at_once))
        original = torch.cat([part.to(self._dtype) for part in parts])
        read_as = torch.bfloat16 if on_gpu else torch.float32
        return States(original, original.clone(), len(self.text.fitted), at_once, read_as)

    def _layer(self, index: int, before: Sequence[Figures]) -> Walked:
        layer = self.layerwise.layer(index)
        block = Block(layer, self.states, self.method.activation, self._seed_of(index))
        change = self.kept.get(index)
        if change is None:
            change = self._changed(index, block, before)
        block.put(change.tensors)
        block.advance()
        differ = self._states_differ()
        if not differ <= MOST_AWAY:  # nor is it NaN
            raise TwellError(
                f"layer {index} is broken: hidden states after it differ from the original's by "
                f"{differ:.3g} times their length on held-out text: {ANEW}"
            )
        return Walked(change.figures, differ)

    def _changed(self, index: int, block: Block, before: Sequence[Figures]) -> Change:
        try:
            change = self.method.change(block, before)
        except TwellError as error:
            raise TwellError(f"layer {index} cannot be fitted: {error}") from error
        self.kept.put(index, change)
        return change

    def _seed_of(self, index: int) -> int:
        rank = dist.get_rank() if is_one_of_several() else 0  # each draws tokens of its own
        return (self.seed * 1000 + index) * 1000 + rank

    def _states_differ(self) -> float:
        windows = self.states.held_out
        original = self.states.original[windows].flatten(0, 1).float()
        away = self.states.changed[windows].flatten(0, 1).float() - original
        shares = away.norm(dim=-1) / original.norm(dim=-1).clamp(min=1e-9)
        sums = torch.stack([shares.double().sum(), torch.ones_like(shares).double().sum()])
        sum_over_processes(sums)
        return float(sums[0] / sums[1])

    @torch.no_grad()
    def held_out(self) -> HeldOut:
        """How near the changed model is to the one it was, at its end."""
        first, each = len(self.text.fitted), max(1, LOGIT_TOKENS // self.layerwise.seq_len)
        sums = torch.zeros(5, dtype=torch.float64, device=self.layerwise.device)
        for start in range(first, len(self.ids), each):
            part = slice(start, start + each)
            ids = self.ids[part].to(self.layerwise.device)
            theirs, ours = (
                self.layerwise.logits(ids, states[part].float())[:, :-1].log_softmax(-1)
                for states in (self.states.original, self.states.changed)
            )
            following = ids[:, 1:, None]
            losses = [-p.gather(-1, following).sum() for p in (ours, theirs)]
            kl = (theirs.exp() * (theirs - ours)).sum()
            same = (theirs.argmax(-1) == ours.argmax(-1)).sum()
            count = torch.tensor(following.numel(), device=ids.device)
            sums += torch.stack([*losses, kl, same.float(), count.float()]).double()
        sum_over_processes(sums)
        *means, count = sums.tolist()
        return HeldOut(*(value / max(count, 1) for value in means))
