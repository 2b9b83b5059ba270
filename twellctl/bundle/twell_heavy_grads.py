"""The backward pass of heavy rows, the tokens that the lists leave out: by PyTorch, densely.

Only the device knows how many rows are heavy. The forward pass sends that number to the host, where
it has usually arrived before the backward pass asks for it. So the backward pass computes as many
rows as there are, and none if there is none; but a CUDA graph cannot capture it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .twell_format import fires
from .twell_weights import FFN


@dataclass(frozen=True)
class HeavyGrads:
    """Of heavy rows alone: the gradients `[rows, K]` of their x, and sums over them, float32
    `[N, K]`, by the names of the weights that were asked for."""

    rows: Tensor
    x: Tensor
    sums: dict[str, Tensor]


def sent_to_host(heavy_count: Tensor) -> Tensor:
    """A number int32 `[1]` on the host: -1 until the device has written `heavy_count` there."""
    on_host = torch.full((1,), -1, dtype=torch.int32, pin_memory=heavy_count.is_cuda)
    return on_host.copy_(heavy_count, non_blocking=True)


def listed_rows(heavy_rows: Tensor, heavy_count: Tensor, on_host: Tensor) -> Tensor:
    """The heavy rows in ascending order: the first of `heavy_rows`, as many as `heavy_count` says.

    `on_host` is that number as `sent_to_host` has it. Where the device has not written it yet, the
    host waits for it.
    """
    count = int(on_host.item())
    if count < 0:
        count = int(heavy_count.item())
    return heavy_rows[:count].sort().values.long()


def heavy_grads(
    x: Tensor,
    grad_y: Tensor,
    ffn: FFN,
    rows: Tensor,
    penalty: Tensor | None,
    window: int,
    names: Sequence[str],
) -> HeavyGrads:
    """The gradients of the heavy `rows` of x and grad_y, both `[M, K]` bf16.

    `penalty` float32 `[1]`: the weight of the sum of |h| in the loss. `window`: how many rows are
    computed at a time. `names`: of the weights whose sums are wanted, of "w_gate", "w_up" and
    "w_down".
    """
    w_gate, w_up, w_down = ffn.gate.values, ffn.up.values, ffn.by_neurons
    size = ffn.N, ffn.K
    sums = {name: torch.zeros(size, dtype=torch.float32, device=x.device) for name in names}
    of_x = x.new_empty(len(rows), ffn.K)
    for some, of_these in zip(rows.split(window), of_x.split(window), strict=True):
        x_rows, grad_y_rows = x[some], grad_y[some]
        gate, up = x_rows @ w_gate.t(), x_rows @ w_up.t()
        fired = fires(gate)
        hidden = torch.where(fired, gate * up, 0)
        grad_h = grad_y_rows @ w_down.t()
        if penalty is not None:
            grad_h += hidden.sign() * penalty.to(grad_h.dtype)
        grad_gate = torch.where(fired, grad_h * up, 0)
        grad_up = torch.where(fired, grad_h * gate, 0)
        factors = {
            "w_gate": (grad_gate, x_rows),
            "w_up": (grad_up, x_rows),
            "w_down": (hidden, grad_y_rows),
        }
        for name, total in sums.items():
            of_neurons, inputs = factors[name]
            total += _product(of_neurons.t(), inputs)
        of_these.copy_(_product(grad_gate, w_gate) + _product(grad_up, w_up))
    return HeavyGrads(rows, of_x, sums)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a b` of bf16 matrices, float32: sums are not rounded before others are added to them."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
