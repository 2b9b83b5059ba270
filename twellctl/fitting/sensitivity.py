"""What an error of each layer costs at the model's end.

Layers do not count alike: the same relative error of the hidden state may change the next token
behind one layer and be forgotten behind another. So each layer's state is disturbed a little, in
turn, the layers behind it go on from there, and the KL of the model's answer is measured. For small
errors KL grows with their square, so that `KL / error^2` is what a squared error is worth.

A disturbance is what the layer's own neurons give with random signs: it points where the layer
writes.
"""

import torch
from torch import Tensor

from twellctl.fitting.layerwise import Layer, Layerwise

ERROR = 0.1  # length of the disturbance, as a share of that of a token's state
TOKENS_AT_ONCE = 2048  # of logits


@torch.no_grad()
def error_costs(layerwise: Layerwise, ids: Tensor) -> list[float]:
    """KL in nats a token over the squared relative error of each layer's output.

    `ids` `[B, L]` are windows of text. Holds their states once for each layer, for a moment thrice.
    """
    generator = torch.Generator(layerwise.device).manual_seed(0)
    states = layerwise.first_states(ids)[None]  # [1 + layers so far, B, L, K], undisturbed first
    for index in range(len(layerwise.layers)):
        layer = layerwise.layer(index)
        own = _disturbance(layer, states[0], generator)
        states = torch.stack([layer(version) for version in states])
        own *= ERROR * _lengths(states[0]) / _lengths(own)
        states = torch.cat([states, (states[0] + own)[None]])
    sums = torch.zeros(len(states) - 1, dtype=torch.float64)
    each = max(1, TOKENS_AT_ONCE // layerwise.seq_len)
    for start in range(0, len(ids), each):
        part = slice(start, start + each)
        wanted = layerwise.logits(ids[part], states[0, part]).log_softmax(-1)
        for index, version in enumerate(states[1:]):
            given = layerwise.logits(ids[part], version[part]).log_softmax(-1)
            sums[index] += float((wanted.exp() * (wanted - given)).sum())
    return (sums / ids.numel() / ERROR**2).clamp(min=1e-12).tolist()


def _disturbance(layer: Layer, states: Tensor, generator: torch.Generator) -> Tensor:
    """`[B, L, K]`: what the layer's neurons give on `states`, with random signs."""
    _, z = layer.apart(states, torch.float32)
    return layer.with_signs(z, generator)


def _lengths(states: Tensor) -> Tensor:
    return states.norm(dim=-1, keepdim=True).clamp(min=1e-9)
