"""Dense FP8 as torch computes it: the rival of TwELL beside the dense forms in bf16.

Weights are e4m3, rounded once. Inputs, and h = relu(gate) * up, are rounded to e4m3 as they come,
and `torch._scaled_mm` multiplies, with fast accumulation:

    row-wise        a scale for each token, and for each row of a weight
    tensor-wise     one scale for all tokens, and one for a weight

torch.compile fuses the rounding with what stands around it. Row-wise FP8 of a model is what `export
--quantize fp8` writes (twell_e4m3.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twellctl.bench.results import ROW_WISE, TENSOR_WISE
from twellctl.bundle.twell_e4m3 import round_rows, round_weight, why_no_products
from twellctl.bundle.twell_weights import Weight
from twellctl.models.loading import shared_copy

Rounded = tuple[Tensor, Tensor]  # e4m3 `[M, K]`; float32 `[M, 1]`, or `[1, 1]`: one for all rows


def _round_tensor(x: Tensor) -> Rounded:
    values, scale = round_rows(x.reshape(1, -1))
    return values.view_as(x), scale


@dataclass(frozen=True)
class Scheme:
    """Which numbers share a scale: `of_inputs` and `of_weights` round `[M, K]` and `[N, K]`."""

    name: str
    of_inputs: Callable[[Tensor], Rounded]
    of_weights: Callable[[Tensor], Rounded]


BY_ROW = Scheme(ROW_WISE, round_rows, round_weight)
SCHEMES = (BY_ROW, Scheme(TENSOR_WISE, _round_tensor, _round_tensor))


def why_no_dense_fp8(
    device: torch.device, dtype: torch.dtype, sizes: Iterable[tuple[int, int]]
) -> str | None:
    """None if `device` has FP8 products, with results of `dtype`, for weights of these `sizes`
    (N, K); else why not."""
    index = device.index if device.type == "cuda" else None
    reasons = (why_no_products(index, N, K, str(dtype)) for N, K in sorted(set(sizes)))
    return next((said for said in reasons if said), None)


def fast_product(values: Tensor, scale: Tensor, weight: Weight) -> Tensor:
    """torch's own, whose sums are not exact."""
    return torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scale,
        scale_b=weight.scales.t(),
        bias=weight.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class RoundedLinear(nn.Module):
    """An nn.Linear in FP8, of a scheme."""

    def __init__(self, linear: nn.Linear, scheme: Scheme):
        super().__init__()
        self._scheme, self._bias = scheme, linear.bias
        values, scale = scheme.of_weights(linear.weight)
        self.register_buffer("_values", values)
        self.register_buffer("_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`."""
        rows = self._scheme.of_inputs(x.reshape(-1, x.shape[-1]))
        y = fast_product(*rows, Weight("e4m3", self._values, self._scale, self._bias))
        return y.view(*x.shape[:-1], -1)


def linear_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """(N, K) of the weights that become FP8."""
    return [tuple(linear.weight.shape) for linear in _plain_linears(model).values()]


def rounded_copy(model: nn.Module, scheme: Scheme) -> nn.Module:
    """`model` with its linear layers in FP8; all other weights are shared."""
    copied = shared_copy(model)
    for name, linear in _plain_linears(copied).items():
        copied.set_submodule(name, RoundedLinear(linear, scheme))
    return copied


def _plain_linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
