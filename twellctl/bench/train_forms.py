"""The gated FFN as a bench trains it, with the L1 penalty: dense in torch's forms, and over TwELL.

A form maps x, weights and the penalty's weight to (y, sum of |hidden|); the gradient of the penalty
is added on the way back. What it is that TwELL runs is said here and nowhere else in a bench.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bench.dense_ffn import compiled, dense_modes
from twellctl.bench.results import DENSE, TWELL
from twellctl.bench.synthetic import FfnWeights
from twellctl.bench.twell_side import as_loaded, shared_copy, twell_name
from twellctl.bundle.twell_ffn import train_ffn
from twellctl.bundle.twell_model import by_rows_of_neurons
from twellctl.bundle.twell_train import AddL1Gradient
from twellctl.here.own_kernels import own_kernels

Form = Callable[..., tuple[Tensor, Tensor]]
ROUTE = "twell"  # whatever the density: what is asked is what the kernels are worth there
GRADIENTS = ("grad_x", "grad_gate", "grad_up", "grad_down")
REFERENCE_ROWS = 2048  # at once


def split_train(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, penalty: Tensor
) -> tuple[Tensor, Tensor]:
    """Dense, gate and up as two products."""
    return _penalised(F.relu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down, penalty)


def fused_train(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, penalty: Tensor
) -> tuple[Tensor, Tensor]:
    """Dense, gate and up in one product."""
    gate, up = F.linear(x, w_gate_up).chunk(2, -1)
    return _penalised(F.relu(gate) * up, w_down, penalty)


def twell_train(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    penalty: Tensor,
    **numbers: Any,
) -> tuple[Tensor, Tensor]:
    """Over TwELL, with `numbers` of `_numbers`."""
    y, hidden_sum, _ = train_ffn(x, w_gate, w_up, w_down, penalty=penalty, **numbers)
    return y, hidden_sum


def _numbers(density: float) -> dict[str, Any]:
    """What the operator is told beside tensors; slots are the default, as in fine-tuning."""
    return {"density": density, "sources": own_kernels(), "route": ROUTE}


def _penalised(hidden: Tensor, w_down: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    hidden_sum = hidden.detach().abs().sum(-1, dtype=torch.float32).sum()  # by rows: fused
    return F.linear(AddL1Gradient.apply(hidden, penalty), w_down), hidden_sum


# ---- one FFN ----


@dataclass(frozen=True)
class TrainedForm:
    """A form, and what of the weights gets a gradient in it."""

    name: str
    kind: str
    run: Form
    leaves: Callable[[FfnWeights], tuple[Tensor, ...]]

    def forward(self, x: Tensor, leaves: tuple[Tensor, ...], penalty: Tensor) -> "ForwardPass":
        """The forward pass on `[M, K]`, with the `leaves` of some weights."""
        inputs = tuple(tensor.detach().requires_grad_() for tensor in (x, *leaves))
        y, _ = self.run(*inputs, penalty)
        return ForwardPass(y, inputs)


@dataclass(frozen=True)
class ForwardPass:
    """y `[M, K]` and what it was computed of."""

    y: Tensor
    inputs: tuple[Tensor, ...]

    def backward(self, grad_y: Tensor) -> dict[str, Tensor]:
        """y, and the gradients by their names; those of gate and up are views where fused."""
        of_x, *of_weights = torch.autograd.grad(self.y, self.inputs, grad_y)
        if len(of_weights) == 2:
            of_weights = (*of_weights[0].chunk(2), of_weights[1])
        return {"y": self.y.detach()} | dict(zip(GRADIENTS, (of_x, *of_weights), strict=True))


def dense_forms(device: torch.device) -> list[TrainedForm]:
    """Eager and compiled, which happens on the first call."""
    forms = []
    for mode in dense_modes(device, max_autotune=False):
        split, fused = compiled(split_train, mode), compiled(fused_train, mode)
        forms += [
            TrainedForm(f"dense {mode}", DENSE, split, lambda w: w.split[:3]),
            TrainedForm(f"dense {mode}, fused", DENSE, fused, lambda w: (w.gate_up, w.down)),
        ]
    return forms


def twell_form(device: torch.device, density: float) -> TrainedForm:
    """Over TwELL, with `density` as a profile tells it."""
    run = functools.partial(twell_train, **_numbers(density))
    name = twell_name("auto", device)
    return TrainedForm(name, TWELL, run, lambda w: as_loaded(w).split[:3])


def passes_reference(
    x: Tensor, weights: FfnWeights, grad_y: Tensor, penalty: float
) -> dict[str, Tensor]:
    """y and all gradients in float64, the penalty a part of the loss."""
    w_gate, w_up, w_down = leaves = [w.double().requires_grad_() for w in weights.split[:3]]
    y, of_x = [], []
    for some, of_some in zip(x.split(REFERENCE_ROWS), grad_y.split(REFERENCE_ROWS), strict=True):
        rows = some.double().requires_grad_()
        hidden = F.relu(F.linear(rows, w_gate)) * F.linear(rows, w_up)
        y.append(F.linear(hidden, w_down))
        ((y[-1] * of_some.double()).sum() + penalty * hidden.abs().sum()).backward()
        y[-1] = y[-1].detach()
        of_x.append(rows.grad)
    gradients = (torch.cat(of_x), *(leaf.grad for leaf in leaves))
    return {"y": torch.cat(y)} | dict(zip(GRADIENTS, gradients, strict=True))


# ---- a whole model ----


class TrainedFfn(nn.Module):
    """In the place of a gated FFN: the same projections, trained in one form."""

    def __init__(self, ffn: nn.Module, form: Form, penalty: Tensor, **numbers: Any):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = ffn.gate_proj, ffn.up_proj, ffn.down_proj
        self.form, self.numbers = form, numbers
        self.register_buffer("penalty", penalty, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        return self.form(x, *weights, self.penalty, **self.numbers)[0]


def trained_dense(model: nn.Module, penalty: Tensor) -> nn.Module:
    """The random `model` with its FFNs trained densely: a copy that shares its weights."""
    twin = shared_copy(model)
    for layer in twin.model.layers:
        layer.mlp = TrainedFfn(layer.mlp, split_train, penalty)
    return twin


def trained_over_twell(
    model: nn.Module, penalty: Tensor, densities: tuple[float, ...]
) -> nn.Module:
    """The same over TwELL; down projections have weights of their own, laid as the kernels read."""
    twin = shared_copy(model)
    for layer, density in zip(twin.model.layers, densities, strict=True):
        down = layer.mlp.down_proj
        down.weight = nn.Parameter(by_rows_of_neurons(down.weight.detach()))
        layer.mlp = TrainedFfn(layer.mlp, twell_train, penalty, **_numbers(density))
    return twin
