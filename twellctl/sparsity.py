"""The paper's way to sparsity: an L1 penalty on `hidden = relu_t(gate) * up`, thresholds fixed.

The penalty never becomes part of the loss tensor. An identity on `hidden` adds its gradient,
`weight * sign(hidden)`, in the backward pass: so it is right under every kind of gradient
checkpointing, where a sum collected on the side would be lost or counted twice, and needs no memory
of its own.
"""

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_model import gated_ffns
from twellctl.firing import FiredMeter


class _AddL1Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        return grad.add(hidden.sign(), alpha=ctx.weight), None


class FfnPenalty:
    """Hooks on all gated FFNs of a model: add the penalty's gradient, measure each forward pass.

    Penalty = `l1 * mean over layers and tokens of the sum over neurons of |hidden|`, or with
    `normalizer="mean"` of their mean. Set `l1`, and call `begin` before each forward pass. It is
    used as `TrainedGates` is.
    """

    gates = ()

    def __init__(self, model: nn.Module, thresholds: list[float], normalizer: str = "sum"):
        ffns = gated_ffns(model)
        self.thresholds = self.limits = thresholds
        self.l1 = 0.0
        self._scale = 1.0
        self.num_layers = len(ffns)
        self.normalizer = normalizer
        self._abs_sum: list[Tensor | None] = [None] * len(ffns)
        self._fired: list[Tensor | None] = [None] * len(ffns)
        self._positions = 0
        self._handles = []
        self._meter = FiredMeter(model, self._count)
        self._meter.__enter__()
        for layer, ffn in enumerate(ffns):
            hook = self._penalise(layer)
            self._handles.append(ffn.down_proj.register_forward_pre_hook(hook))

    def remove(self) -> None:
        """Take the hooks off again."""
        self._meter.__exit__()
        for handle in self._handles:
            handle.remove()

    def begin(self, num_tokens: int, scale: float) -> None:
        """Before a forward pass; `scale` is what the rest of the loss is multiplied by."""
        self._scale = scale

    def measured(self) -> tuple[Tensor, Tensor]:
        """Of the last forward pass: (penalty without `l1`, density of each layer `[layers]`)."""
        penalty = torch.stack(self._abs_sum).sum() / (self.num_layers * self._rows())
        return penalty, torch.stack(self._fired) / self._positions

    def _rows(self) -> float:
        """What a sum over one layer is divided by."""
        return self._positions if self.normalizer == "mean" else self._positions / self.num_neurons

    def _count(self, layer: int, gate: Tensor, active: Tensor) -> None:
        self._positions, self.num_neurons = active.numel(), active.shape[-1]
        self._fired[layer] = (active != 0).sum(dtype=torch.float32)

    def _penalise(self, layer: int):
        def hook(module: nn.Module, args: tuple) -> tuple:
            hidden, *rest = args
            self._abs_sum[layer] = hidden.detach().abs().sum(dtype=torch.float32)
            if not (self.l1 and torch.is_grad_enabled() and hidden.requires_grad):
                return args
            weight = self.l1 * self._scale / (self.num_layers * self._rows())
            return (_AddL1Gradient.apply(hidden, weight), *rest)

        return hook
