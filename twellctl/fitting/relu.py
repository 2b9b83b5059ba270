"""The method that makes each FFN ReLU, and leaves attention as it is."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from twellctl.fitting.block import Block
from twellctl.fitting.ffn import GatedFfn
from twellctl.fitting.layer import HowToFit, fit_layer
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.method import Change, Figures
from twellctl.fitting.thresholds import Thresholds
from twellctl.here.processes import sum_over_processes


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
        """The tensors of the FFN; figures: `fires`, the share of its own neurons, and `_errors`."""
        threshold, how = self._thresholds.next([layer["fires"] for layer in before]), self._how
        if how.steps is not None:
            how = replace(how, steps=replace(how.steps, seed=block.seed))
        layer = block.original
        made, fires = fit_layer(layer.weights, block.ffn_text(), threshold, how)
        named = made.named(layer.ffn)
        tensors = {f"{layer.ffn_name}.{name}": t.to(how.dtype) for name, t in named.items()}
        return Change(tensors, {"fires": fires} | _errors(block, made))


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
    sums = torch.stack([_squares(values, text.weights) for values in squared])
    sum_over_processes(sums)
    whole, swap_error, error, output, by_map = sums.tolist()
    whole, output = max(whole, 1e-30), max(output, 1e-30)
    return {
        "error_swapped": swap_error / whole,
        "error": error / whole,
        "map_share": by_map / output,
    }


def _squares(values: Tensor, weights: Tensor) -> Tensor:
    return (values.square().sum(-1) * weights).double().sum()
