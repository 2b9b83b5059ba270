"""One threshold for all layers, such that a given share of all neurons fires.

A neuron's score for a token is its gate times its worth (`layer.worth`): what it may give, as a
share of the token's hidden state. So one threshold asks the same of the neurons of all layers, and
a layer whose neurons are worth more fires more.
"""

import torch
from torch import Tensor

from twellctl.fitting.ffn import GatedFfn, token_weights
from twellctl.fitting.layer import worth
from twellctl.fitting.layerwise import Layerwise

SCORES = 1 << 18  # of a layer that are kept
HALVINGS = 50


class Thresholds:
    """Of a model's layers, one after the other."""

    def __init__(self, density: float):
        self.density = density
        self._scores: list[Tensor] = []  # of each layer: sorted, least first

    @torch.no_grad()
    def look(self, layerwise: Layerwise, ids: Tensor) -> None:
        """Score the neurons of all layers on windows `[B, L]` that the model itself reads."""
        states = layerwise.first_states(ids)
        for index in range(len(layerwise.layers)):
            layer = layerwise.layer(index)
            _, z = layer.apart(states, torch.float32)
            states = layer(states)
            scores = _scores(layer.weights, z.flatten(0, 1), token_weights(states))
            self._scores.append(scores)

    def next(self, fired: list[float]) -> float:
        """That of the next layer, given which share of the neurons of those before it fires."""
        left = self._scores[len(fired) :]
        goal = (self.density * len(self._scores) - sum(fired)) / len(left)
        low, high = 0.0, max(float(scores[-1]) for scores in left)
        if _mean_density(left, low) <= goal:
            return 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean_density(left, middle) > goal else (low, middle)
        return high


def _scores(ffn: GatedFfn, z: Tensor, weights: Tensor) -> Tensor:
    """Scores of the neurons for inputs `[T, K]`, some of them, sorted, least first."""
    scores = (ffn.gates(z) * worth(ffn, z, weights)).flatten()
    return scores[:: max(1, len(scores) // SCORES)].sort().values.cpu()


def _mean_density(layers: list[Tensor], threshold: float) -> float:
    above = [1 - float(torch.searchsorted(s, threshold, right=True)) / len(s) for s in layers]
    return sum(above) / len(above)
