"""One pass of a model over windows of text: what fires in each layer, and each token's loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_model import gated_ffns
from twellctl.firing.counts import FiredMeter, LayerCount, by_share
from twellctl.firing.losses import Losses
from twellctl.training.head_loss import LOGITS_AT_ONCE, HeadLoss


class Reading:
    """What is counted of `model` while it reads windows whose tokens are of `num_groups` groups."""

    def __init__(self, model: nn.Module, intermediate_size: int, tile: int, num_groups: int):
        self.model = model
        self.layers = [
            LayerCount(intermediate_size, tile, model.device, num_groups) for _ in gated_ffns(model)
        ]
        self.losses = Losses.of(num_groups)
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
