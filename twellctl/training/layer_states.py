"""Keeps what each layer gives near what the teacher's layer gives, from its own hidden states.

    loss += weight * sum over layers of mean over tokens of |states - teacher's|^2 / |teacher's|^2

A sum over layers: each layer of a deep model is drawn as much as one of a shallow model. A mean
over tokens of each one's own distance: one can outweigh all others, for in SmolLM2-135M-Instruct
the first token's states are 35 to 176 times as long as another's from layer 11 to 27, and 72 to
98 % of the squares of 512 tokens.
As in `priced_gates`, the term's gradient is added in the backward pass and it is no part of the
loss tensor.
"""

from functools import partial

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_model import gated_ffns
from twellctl.models.layers import ffn_layers

TINY = 1e-6  # is added to squared norms, which divide: a state may be zero


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, wanted, weight)
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        states, wanted, weight = ctx.saved_tensors
        away = (states - wanted).to(grad.dtype)
        return torch.addcmul(grad, away, weight.to(grad.dtype)), None, None


class LayerStates:
    """Hooks on the layers of a model and of its teacher, which runs first on the same tokens."""

    def __init__(self, model: nn.Module, teacher: nn.Module, weight: float):
        self.weight, self.scale = weight, 1.0
        layers, theirs = ffn_layers(model), ffn_layers(teacher)
        self._wanted: list[Tensor | None] = [None] * len(layers)
        for hook, model_layers in ((self._keep, theirs), (self._compare, layers)):
            for i, layer in enumerate(model_layers):
                layer.register_forward_hook(partial(hook, i))

    def _keep(self, index: int, layer: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        self._wanted[index] = _states(output)

    def _compare(
        self, index: int, layer: nn.Module, args: tuple, output: Tensor | tuple
    ) -> Tensor | tuple | None:
        states, wanted = _states(output), self._wanted[index]
        if not (torch.is_grad_enabled() and states.requires_grad):
            return None
        norms = torch.linalg.vector_norm(wanted, dim=-1, keepdim=True, dtype=torch.float32)
        weight = 2 * self.weight * self.scale / norms.numel() / (norms.square() + TINY)
        nearer = _AddGradient.apply(states, wanted, weight)
        return nearer if isinstance(output, Tensor) else (nearer, *output[1:])


def comparable(model: nn.Module, teacher: nn.Module) -> bool:
    """Whether the two have as many layers, of the same width."""
    same_width = model.config.hidden_size == teacher.config.hidden_size
    return same_width and len(gated_ffns(model)) == len(gated_ffns(teacher))


def _states(output: Tensor | tuple) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
