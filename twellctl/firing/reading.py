"""One pass of a model over windows of text: what fires in each layer, and each token's loss."""

import math
import statistics
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_model import gated_ffns
from twellctl.firing.counts import FiredMeter, LayerCount, by_share
from twellctl.training.head_loss import LOGITS_AT_ONCE, HeadLoss


@dataclass
class Losses:
    """Cross-entropies of tokens, in nats: sums by group, and the mean of each window."""

    sums: list[float]
    tokens: list[int]
    windows: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.windows) if self.windows else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean, over the windows."""
        if len(self.windows) < 2:
            return None
        return statistics.stdev(self.windows) / math.sqrt(len(self.windows))

    def add(self, losses: Tensor, groups: Tensor) -> None:
        """Count windows `[B, S - 1]`: the loss of each token but the first, and its group."""
        if not losses.numel():
            return
        self.windows += losses.mean(-1).tolist()
        sums = torch.zeros(len(self.sums), dtype=torch.float64, device=losses.device)
        sums.index_add_(0, groups.flatten(), losses.flatten())
        self.sums = [old + new for old, new in zip(self.sums, sums.tolist(), strict=True)]
        tokens = groups.flatten().bincount(minlength=len(self.tokens)).tolist()
        self.tokens = [old + new for old, new in zip(self.tokens, tokens, strict=True)]


class Reading:
    """What is counted of `model` while it reads windows whose tokens are of `num_groups` groups."""

    def __init__(self, model: nn.Module, intermediate_size: int, tile: int, num_groups: int):
        self.model = model
        self.layers = [
            LayerCount(intermediate_size, tile, model.device, num_groups) for _ in gated_ffns(model)
        ]
        self.losses = Losses([0.0] * num_groups, [0] * num_groups)
        self._fired: list[Tensor] = []

    @torch.inference_mode()
    def add(self, ids: Tensor, groups: Tensor) -> None:
        """Count the windows `ids`, whose tokens are of `groups`; both int64 `[B, S]`."""
        fired = torch.zeros(ids.numel(), dtype=torch.int64, device=ids.device)

        def count(layer: int, gate: Tensor, active: Tensor) -> None:
            fired.add_(self.layers[layer].add(gate, active, groups.flatten()))

        head = HeadLoss(self.model)
        try:
            with FiredMeter(self.model, count):
                states = head.states(ids)
            losses = token_losses(head, states, ids[:, 1:].flatten())
        finally:
            head.remove()
        self.losses.add(losses.view(len(ids), -1), groups[:, 1:])
        self._fired.append(fired.cpu())

    def tokens_by_share(self) -> tuple[int, ...]:
        """How many tokens fired each share of all layers' neurons, by the bins of `SHARES`."""
        whole = sum(layer.intermediate_size for layer in self.layers)
        return by_share(torch.cat(self._fired), whole)


def token_losses(head: HeadLoss, states: Tensor, targets: Tensor) -> Tensor:
    """float64 `[M]`: the cross-entropy of each target, of states `[M, K]`, some rows at a time."""
    weight, bias = head.weights(states.dtype)
    rows = max(1, LOGITS_AT_ONCE // len(weight))
    parts = [states.new_zeros(0, dtype=torch.float64)]
    for some, wanted in zip(states.split(rows), targets.split(rows), strict=True):
        logits = F.linear(some, weight, bias).float() * head.scale
        parts.append(F.cross_entropy(logits, wanted, reduction="none").double())
    return torch.cat(parts)
