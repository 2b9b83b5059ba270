"""The method that rounds all linear layers and changes nothing else: the model itself, in 4 bits.

What a user would take instead of a sparse model in 4 bits, by the same code.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle import twell_int4
from twellctl.bundle.twell_model import activation_of
from twellctl.fitting.block import Block
from twellctl.fitting.grid import Grid, nearest_outputs
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.least_squares import Products
from twellctl.fitting.linears import round_linears
from twellctl.fitting.method import Change, Figures


class RoundingMethod:
    """Rounds to `grid`; activations, biases and norms stay."""

    activation = None

    def __init__(self, grid: Grid):
        self._grid = grid

    def look(self, layerwise: Layerwise, ids: Tensor) -> None:
        """There is nothing to be looked at."""

    @torch.no_grad()
    def change(self, block: Block, before: Sequence[Figures]) -> Change:
        """The packed tensors of all linear layers; the figure is the `error` of the FFN."""
        layer, down = block.original, f"{block.original.ffn_name}.down_proj"
        others = [names for names in layer.linears() if names != [down]]
        tensors = round_linears(block, others, self._grid)
        tensors |= self._rounded_down(block, down)
        block.put(tensors)
        text, made = block.ffn_held_out(), block.changed
        wanted = text.wanted(slice(None))
        given = made.weights(text.z, activation_of(made.ffn)).float()
        whole, error = text.squares(wanted, wanted - given)
        return Change(tensors, {"error": error / max(whole, 1e-30)})

    def _rounded_down(self, block: Block, name: str) -> dict[str, Tensor]:
        """Down, called `name`, of an FFN that is to give what `Block.ffn_text` says."""
        text, ffn = block.ffn_text(), block.changed.weights
        act, down = activation_of(block.changed.ffn), ffn.down
        products = Products(down.shape[1], len(down), down.device)
        for part in text.parts():
            z, root = text.z[part], text.weights[part].sqrt()
            hidden = (act(ffn.gates(z)) * ffn.ups(z)).float()
            rest = text.wanted(part) - F.linear(hidden, down, ffn.down_bias)
            products.add(hidden.T * root, rest.T * root)
        products.over_processes()
        codes = nearest_outputs(down, products, self._grid)
        return twell_int4.named(name, codes.codes, codes.scales)
