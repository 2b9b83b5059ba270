"""The method that makes each FFN ReLU; with a grid all linear layers are rounded, too."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from twellctl.fitting.block import Block
from twellctl.fitting.ffn import GatedFfn
from twellctl.fitting.layer import HowToFit, fit_layer
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.linears import round_linears
from twellctl.fitting.method import Change, Figures
from twellctl.fitting.thresholds import Thresholds


class ReluMethod:
    """Makes FFNs of N + R neurons with ReLU; `density` of the N fire, a mean over the layers."""

    def __init__(self, density: float, how: HowToFit):
        self._thresholds, self._how = Thresholds(density), how
        self.activation = nn.ReLU(inplace=True)

    def look(self, layerwise: Layerwise, ids: Tensor) -> None:
        """Score the neurons of all layers."""
        self._thresholds.look(layerwise, ids)

    @torch.no_grad()
    def change(self, block: Block, before: Sequence[Figures]) -> Change:
        """The tensors of the FFN, and of what is rounded before it.

        Figures: `fires`, the share of its own neurons, and `_errors`.
        """
        threshold, how = self._thresholds.next([layer["fires"] for layer in before]), self._how
        if how.steps is not None:
            how = replace(how, steps=replace(how.steps, seed=block.seed))
        layer, tensors = block.original, dict[str, Tensor]()
        if how.grid is not None:
            others = [names for names in layer.linears() if not _is_in(layer.ffn_name, names)]
            tensors = round_linears(block, others, how.grid)
        made, fires = fit_layer(layer.weights, block.ffn_text(), threshold, how)
        named = made.stored(layer.ffn, how.dtype)
        tensors |= {f"{layer.ffn_name}.{name}": tensor for name, tensor in named.items()}
        return Change(tensors, {"fires": fires} | _errors(block, made))


def _is_in(module: str, names: list[str]) -> bool:
    return names[0].startswith(f"{module}.")


def _errors(block: Block, made: GatedFfn) -> Figures:
    """Shares of the squared output wanted, on the held-out text of all processes.

    `error_swapped`: what ReLU in place of the activation and no more errs by; `error`: what the
    FFN `made` errs by; `map_share`: what its map gives, of its squared output.
    """
    text, original = block.ffn_held_out(), block.original.weights
    wanted, given = text.wanted(slice(None)), made(text.z).float()
    swapped = original(text.z).float()
    mapped = given - made.first(len(original.gate))(text.z).float()
    squared = (wanted, wanted - swapped, wanted - given, given, mapped)
    whole, swap_error, error, output, by_map = text.squares(*squared)
    whole, output = max(whole, 1e-30), max(output, 1e-30)
    return {
        "error_swapped": swap_error / whole,
        "error": error / whole,
        "map_share": by_map / output,
    }
