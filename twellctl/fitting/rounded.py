"""The method that rounds all linear layers and changes nothing else: the model itself, in 4 bits.

What a user would take instead of a sparse model in 4 bits, by the same code.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twellctl.bundle.twell_model import activation_of
from twellctl.fitting.block import Block
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.linears import round_linears
from twellctl.fitting.method import Change, Figures
from twellctl.fitting.rounding import Grid


class RoundingMethod:
    """Rounds to `grid`; activations, biases and norms stay."""

    activation = None

    def __init__(self, grid: Grid, ridge: float):
        self._grid, self._ridge = grid, ridge

    def look(self, layerwise: Layerwise, ids: Tensor) -> None:
        """There is nothing to be looked at."""

    @torch.no_grad()
    def change(self, block: Block, before: Sequence[Figures]) -> Change:
        """The packed tensors of all linear layers; the figure is the `error` of the FFN."""
        tensors = round_linears(block, block.original.linears(), self._grid, self._ridge)
        text, made = block.ffn_held_out(), block.changed
        wanted = text.wanted(slice(None))
        given = made.weights(text.z, activation_of(made.ffn)).float()
        whole, error = text.squares(wanted, wanted - given)
        return Change(tensors, {"error": error / max(whole, 1e-30)})
