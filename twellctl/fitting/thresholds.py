"""One threshold for all layers, such that a given share of all neurons fires.

A neuron's score for a token is its gate times its worth (`layer.worth`): what it may give, as a
share of the token's hidden state. So one threshold asks the same of the neurons of all layers, and
a layer whose neurons are worth more fires more.

For a share above what ReLU lets through, all gates move up by as much. ReLU is then nearer to SiLU:
`relu(g + t) - t` follows it a little below zero, and the map takes up the constant.
"""

import torch
from torch import Tensor

from twellctl.fitting.ffn import token_weights
from twellctl.fitting.layer import worth
from twellctl.fitting.layerwise import Layerwise

SCORES = 1 << 18  # of a layer that are kept
HALVINGS = 50
MOST_RISE = 0.2  # of a gate: with more, KL was no lower (recipes/LAB.md)


class Thresholds:
    """Of a model's layers, one after the other."""

    def __init__(self, density: float):
        self.density = density
        self._gates: list[Tensor] = []  # of each layer: sorted, least first
        self._scores: list[Tensor] = []  # the same

    @torch.no_grad()
    def look(self, layerwise: Layerwise, ids: Tensor) -> None:
        """Score the neurons of all layers on windows `[B, L]` that the model itself reads."""
        states = layerwise.first_states(ids)
        for index in range(len(layerwise.layers)):
            layer = layerwise.layer(index)
            _, z = layer.apart(states, torch.float32)
            states = layer(states)
            z, ffn = z.flatten(0, 1), layer.weights
            gates = ffn.gates(z)
            self._gates.append(_some_sorted(gates))
            self._scores.append(_some_sorted(gates * worth(ffn, z, token_weights(states))))

    def next(self, fired: list[float]) -> float:
        """That of the next layer, given which share of the neurons of those before it fires.

        Below zero: so far do gates move up.
        """
        first = len(fired)
        goal = (self.density * len(self._scores) - sum(fired)) / (len(self._scores) - first)
        gates, scores = self._gates[first:], self._scores[first:]
        if _mean_above(gates, 0.0) <= goal:
            return _level(gates, goal, -MOST_RISE, 0.0)
        return _level(scores, goal, 0.0, max(float(layer[-1]) for layer in scores))


def _some_sorted(numbers: Tensor) -> Tensor:
    """Some of the numbers, least first."""
    numbers = numbers.flatten()
    return numbers[:: max(1, len(numbers) // SCORES)].sort().values.cpu()


def _level(layers: list[Tensor], goal: float, low: float, high: float) -> float:
    """Between `low` and `high`: above it is a share of `goal`, a mean over `layers`."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_above(layers, middle) > goal else (low, middle)
    return high


def _mean_above(layers: list[Tensor], level: float) -> float:
    above = [1 - float(torch.searchsorted(s, level, right=True)) / len(s) for s in layers]
    return sum(above) / len(above)
