"""Linear layers and gated FFNs over all neurons in plain torch, of every kind of weight.

It is the judge of the kernels, and what runs where they do not. A weight in bf16 is multiplied as
it is. Each other kind has a module that says what its products are (twell_e4m3.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import twell_e4m3
from .twell_weights import FFN, Weight


class Rounding(NamedTuple):
    """A kind of weights that are rounded.

    `dtype` of the values; `round_weight` gives values and scales of a weight `[N, K]`; `products`
    as below. `why_no_products` says why a device has no fast ones, by its index, N, K and the dtype
    of the result in words; None: it has.
    """

    dtype: torch.dtype
    round_weight: Callable[[Tensor], tuple[Tensor, Tensor]]
    products: Callable[[Tensor, bool], Callable[[Weight], Tensor]]
    why_no_products: Callable[[int | None, int, int, str], str | None]


ROUNDINGS = {
    "e4m3": Rounding(
        twell_e4m3.DTYPE,
        twell_e4m3.round_weight,
        twell_e4m3.products,
        twell_e4m3.why_no_products,
    ),
}


def rounded_weight(kind: str, weight: Tensor, bias: Tensor | None = None) -> Weight:
    """`weight` `[N, K]`, of any float dtype, rounded to `kind`, each value to the nearest."""
    return Weight(kind, *ROUNDINGS[kind].round_weight(weight), bias)


def products(rows: Tensor, kind: str, round_inputs: bool = True) -> Callable[[Weight], Tensor]:
    """What multiplies `rows` `[M, K]` by a weight of `kind`, and adds its bias: `[M, N]`.

    `round_inputs`: for a rounded kind the rows are rounded, too; once, for all weights.
    """
    if kind in ROUNDINGS:
        return ROUNDINGS[kind].products(rows, round_inputs)
    return lambda weight: F.linear(rows, weight.values, weight.bias)


def has_fast_product(x: Tensor, weight: Weight) -> bool:
    """Whether PyTorch has a product of `x` and `weight` here; else it takes their float32."""
    if not weight.is_rounded:
        return True
    asked = x.device.index, weight.N, weight.K, str(x.dtype)
    return ROUNDINGS[weight.kind].why_no_products(*asked) is None


def linear(x: Tensor, weight: Weight, *, round_inputs: bool = True) -> Tensor:
    """`x W^T + b`, `[..., K]` to `[..., N]`, in the dtype of x; `round_inputs` as in `products`."""
    y = products(x.reshape(-1, x.shape[-1]), weight.kind, round_inputs)(weight)
    return y.view(*x.shape[:-1], y.shape[-1])


def gated_ffn(x: Tensor, ffn: FFN, *, round_inputs: bool = True) -> Tensor:
    """`down(relu(gate(x)) * up(x))`, `[..., K]` to `[..., K]`; no gradients.

    gate, up and their product h are rounded to the dtype of x; `round_inputs` is for x and h.
    """
    of_x = products(x.reshape(-1, x.shape[-1]), ffn.kind, round_inputs)
    hidden = of_x(ffn.gate).relu_().mul_(of_x(ffn.up))
    return products(hidden, ffn.kind, round_inputs)(ffn.down).view(x.shape)
