"""Linear layers of a block are rounded one after the other, on what those before them give."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle import twell_int4
from twellctl.fitting.block import Block
from twellctl.fitting.least_squares import Products
from twellctl.fitting.rounding import Codes, Grid, nearest_outputs

TOKENS = 64  # for each input, on which sums are taken


@torch.no_grad()
def round_linears(
    block: Block, inputs: list[list[str]], grid: Grid, ridge: float
) -> dict[str, Tensor]:
    """Round the linear layers of `block` that `inputs` names, and put them into it.

    Those in one list read the same input (`Layer.linears`). Each is to give what the original's
    does. Returns the packed tensors; biases stay.
    """
    tensors: dict[str, Tensor] = {}
    for names in inputs:
        codes = _rounded(block, names, grid, ridge)
        sizes = [len(_linear(block, name).weight) for name in names]
        parts = zip(names, codes.codes.split(sizes), codes.scales.split(sizes), strict=True)
        found = {k: t for name, *part in parts for k, t in twell_int4.named(name, *part).items()}
        block.put(found)
        tensors |= found
    return tensors


def _rounded(block: Block, names: list[str], grid: Grid, ridge: float) -> Codes:
    """Of the weights of `names`, one behind the other."""
    linears = [_linear(block, name) for name in names]
    weight = torch.cat([linear.weight for linear in linears]).float()
    bias = torch.cat([_bias(linear) for linear in linears]).float()
    products = Products(weight.shape[1], len(weight), weight.device)
    for read in block.reads(names, TOKENS * weight.shape[1]):
        root, given = read.weights.sqrt(), read.inputs[names[0]].float()
        rest = torch.cat([read.wanted[name].float() for name in names], 1)
        rest -= F.linear(given, weight, bias)
        products.add((given * root[:, None]).T, (rest * root[:, None]).T)
    products.over_processes()
    return nearest_outputs(weight, products, grid, ridge)


def _linear(block: Block, name: str) -> nn.Linear:
    found = block.changed.module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
