"""Losses of tokens, summed while a model reads windows, by the groups of what fires."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor


@dataclass
class Losses:
    """Cross-entropies of tokens, in nats: sums by group, and the mean of each window."""

    sums: list[float]
    tokens: list[int]
    windows: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, num_groups: int) -> Self:
        """Of no tokens yet."""
        return cls([0.0] * num_groups, [0] * num_groups)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.windows) if self.windows else None

    def error(self, overlap: float) -> float | None:
        """Standard error of the mean, over windows which hold each token `overlap` times."""
        if len(self.windows) < 2:
            return None
        return statistics.stdev(self.windows) / math.sqrt(len(self.windows) / overlap)

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
