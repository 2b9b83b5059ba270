"""The linear map of a fitted model, found by its gates: its neurons, the last, share one row."""

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_model import weights_of_gate_and_up
from twellctl.bundle.twell_spec import FEW_ROWS
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import opened


def own_neurons(ffn: nn.Module) -> int:
    """How many of its neurons have gates of their own: all but those of a map."""
    gate, _ = weights_of_gate_and_up(ffn)
    return gate.N - num_mapped(*gate.tensors)


def num_mapped(gate: Tensor, *others: Tensor) -> int:
    """How many of the last neurons share one gate: a linear map (twell_config.py), or none.

    `others` of its neurons, like biases and scales, are the same, too. On the meta device, where no
    numbers are, none.
    """
    if gate.is_meta:
        return 0
    by_part = [(part == part[-1]).reshape(len(gate), -1).all(1) for part in (gate, *others)]
    unlike = (~torch.stack(by_part).all(0)).nonzero()
    alike = len(gate) - (unlike[-1].item() + 1 if len(unlike) else 0)
    return alike if alike >= FEW_ROWS else 0


def layers_without_map(checkpoint: Checkpoint) -> int:
    """In how many layers the neurons that config.json calls a map have gates of their own."""
    if not checkpoint.map_neurons:
        return 0
    rows, lost = slice(max(0, checkpoint.own_neurons), checkpoint.ffn.intermediate_size), 0
    with opened(checkpoint) as read:
        for layer in range(checkpoint.ffn.num_layers):
            names = (name for name in checkpoint.ffn_tensors(layer) if ".gate_" in name)
            lost += any(not (part == part[-1]).all() for part in (read(n, rows) for n in names))
    return lost
