"""Linear layers of a block are rounded one after the other, on what those before them give.

A layer keeps its outputs on what it reads now. Solved for, to give what the original's gives, it
did worse than rounded to the nearest: its inputs are a little wrong, which makes such weights
smaller (recipes/LAB.md). But what a layer adds to the hidden states can mend them: such a layer is
solved for, so that the states after it are the original's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle import twell_int4
from twellctl.fitting.block import Block
from twellctl.fitting.grid import Codes, Grid, nearest_outputs
from twellctl.fitting.least_squares import Products

TOKENS = 64  # for each input, on which sums are taken


@torch.no_grad()
def round_linears(block: Block, inputs: list[list[str]], grid: Grid) -> dict[str, Tensor]:
    """Round the linear layers of `block` that `inputs` names, and put them into it.

    Those in one list read the same input (`Layer.linears`). Returns the packed tensors; biases
    stay.
    """
    tensors: dict[str, Tensor] = {}
    for names in inputs:
        codes = _rounded(block, names, grid)
        sizes = [len(_linear(block, name).weight) for name in names]
        parts = zip(names, codes.codes.split(sizes), codes.scales.split(sizes), strict=True)
        found = {k: t for name, *part in parts for k, t in twell_int4.named(name, *part).items()}
        block.put(found)
        tensors |= found
    return tensors


def _rounded(block: Block, names: list[str], grid: Grid) -> Codes:
    """Of the weights of `names`, one behind the other."""
    weight = torch.cat([_linear(block, name).weight for name in names]).float()
    factor = _factor(block, names)
    products = Products(weight.shape[1], len(weight) if factor else 0, weight.device)
    for read in block.reads(names, TOKENS * weight.shape[1]):
        root, given = read.weights.sqrt(), read.inputs[names[0]].float()
        rest = given.new_empty(len(given), 0)
        if factor:
            bias = _linear(block, names[0]).bias
            wanted = read.wanted[names[0]].float() + read.away / factor
            rest = wanted - F.linear(given, weight, bias)
        products.add((given * root[:, None]).T, (rest * root[:, None]).T)
    products.over_processes()
    if factor:
        return nearest_outputs(weight, products, grid)
    return grid.by_sums(weight, products.gram)


def _factor(block: Block, names: list[str]) -> float | None:
    """`Layer.factor_of` a linear layer that reads its input alone; None for others."""
    K = block.original.weights.down.shape[0]
    if len(names) > 1 or len(_linear(block, names[0]).weight) != K:
        return None
    return block.original.factor_of(names[0])


def _linear(block: Block, name: str) -> nn.Linear:
    found = block.changed.module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found
