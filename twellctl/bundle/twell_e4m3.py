"""Weights in e4m3 in plain torch: rounding, and products that round their inputs, too.

A weight is e4m3 with a scale for each row. An input is rounded to e4m3 as it comes, with a scale
for each row (token), or stays as it is:

    y[m, n] = s_x[m] * s_w[n] * sum over k of x_8[m, k] * w_8[n, k]  + b[n]       rounded weights
    y[m, n] =          s_w[n] * sum over k of x[m, k] * w_8[n, k]    + b[n]       and inputs, or not

    x ~ s_x * x_8        s_x = max |x[m, :]| / 448, in float32; x_8 is x / s_x, rounded to nearest

The products are of the rounded values, exact, and added up in float32; scales and bias come after
the sum, in float32; y is rounded once, to the dtype of x. A row with NaN or infinity gives NaN.

On GPUs with FP8 tensor cores `torch._scaled_mm` computes the first form. Their sums hold some 14
bits, so its results lie up to 2^-7 of the largest from these. These products are for inference:
they have no gradients.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_cache import say_once
from .twell_launch import device_limits
from .twell_weights import Weight

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max  # 448
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros, too


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 of the shape of x, float32 scales `[..., 1]`) of a finite x `[..., K]`."""
    x = x.float()
    scale = _scale_of(x)
    return (x / scale).to(DTYPE), scale


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a weight `[N, K]`, with scales that bf16 holds: some readers keep them so."""
    weight = weight.float()
    scale = _scale_of(weight).bfloat16().float()
    return (weight / scale).to(DTYPE), scale  # at most 449.75, which is 448


def _scale_of(x: Tensor) -> Tensor:
    # times: by a number CUDA divides so, and the CPU otherwise
    return (x.abs().amax(-1, keepdim=True) * (1 / LARGEST)).clamp_min(_SMALLEST_SCALE)


def products(rows: Tensor, round_inputs: bool) -> Callable[[Weight], Tensor]:
    """What multiplies `rows` `[M, K]`, rounded once, by a weight: `[M, N]` in their dtype."""
    if not round_inputs:
        return lambda weight: _judge(rows, None, weight).to(rows.dtype)
    values, scale = round_rows(rows)
    return lambda weight: _rounded_product(values, scale, weight, rows.dtype)


def _rounded_product(values: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """The first form, of rows that `round_rows` rounded, `[M, K]` to `[M, N]` of `dtype`."""
    if values.is_cuda and values.numel():
        said = _why_not_scaled_mm(values.device.index, *weight.values.shape, str(dtype))
        if said is None:
            return _scaled_mm(values, scale, weight, dtype)
    return _judge(values, scale, weight).to(dtype)


def _scaled_mm(values: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    after = weight.bias is not None and _adds_biases_after(values.device.index)
    y = torch._scaled_mm(
        values.contiguous(),
        weight.values.contiguous().t(),
        scale_a=scale,
        scale_b=weight.scales.t(),
        bias=None if after else weight.bias,
        out_dtype=torch.float32 if after else dtype,
        use_fast_accum=True,
    )
    return y.add_(weight.bias).to(dtype) if after else y


def _judge(values: Tensor, scale: Tensor | None, weight: Weight) -> Tensor:
    """float32 `[M, N]` by the head of this module, on any device; `scale` None: no rounded x."""
    with torch.autocast(values.device.type, enabled=False):
        y = F.linear(values.float(), weight.values.float())
    if scale is not None:
        y *= scale
    y *= weight.scales.t()
    return y if weight.bias is None else y.add_(weight.bias)


@torch.compiler.assume_constant_result
def _why_not_scaled_mm(index: int, N: int, K: int, dtype: str) -> str | None:
    """`why_no_products`, which is said once."""
    if said := why_no_products(index, N, K, dtype):
        say_once(said)
    return said


@torch.compiler.assume_constant_result
def _adds_biases_after(index: int) -> bool:
    """Whether products come without their bias, in float32.

    cuBLAS, which torch takes on Hopper from CUDA 12.9 on, refuses a bias for some sizes, like 640
    rows of 5632. The other products take each, and give bf16 only.
    """
    cuda = tuple(map(int, str(torch.version.cuda).split(".")[:2]))
    return device_limits(index).capability == (9, 0) and cuda >= (12, 9)


def why_no_products(index: int | None, N: int, K: int, dtype: str) -> str | None:
    """None if torch's FP8 product takes a weight `[N, K]` on a CUDA device, else why not.

    `index` None is no such device. `dtype` of the result, like "torch.bfloat16".
    """
    if index is None or torch.version.cuda is None or device_limits(index).capability < (8, 9):
        return "FP8 products need an NVIDIA GPU of compute capability 8.9 or newer"
    if dtype != "torch.bfloat16":
        return f"FP8 products give bf16, not {dtype.removeprefix('torch.')}"
    if N % 16 or K % 16:
        return f"FP8 products take sizes that are multiples of 16, not {K} and {N}"
    return None
