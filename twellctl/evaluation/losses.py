"""The loss of each token while a model reads windows, summed by the groups of what fires."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.firing.losses import Losses
from twellctl.models.head_loss import HeadLoss


class TokenLosses:
    """`read` is one of `count_windows`; `losses` holds what it found of `num_groups` groups."""

    def __init__(self, model: PreTrainedModel, num_groups: int):
        self.losses = Losses.of(num_groups)
        self._head = HeadLoss(model)

    def close(self) -> None:
        """Give the model's head its own forward again."""
        self._head.remove()

    def read(self, ids: Tensor, groups: Tensor) -> None:
        """Add the windows `ids`, whose tokens are of `groups`; both int64 `[B, S]`."""
        states, targets = self._head.states(ids), ids[:, 1:].flatten()
        parts = [states.new_zeros(0, dtype=torch.float64)]
        for some in self._head.logit_rows(len(targets)):
            logits = self._head.logits(states[some]).float()
            parts.append(F.cross_entropy(logits, targets[some], reduction="none").double())
        self.losses.add(torch.cat(parts).view(len(ids), -1), groups[:, 1:])
