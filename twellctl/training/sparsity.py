"""The paper's way to sparsity: an L1 penalty on `hidden = relu(gate) * up`.

The penalty never becomes part of the loss tensor. Its gradient, `weight * sign(hidden)`, is added
in the backward pass of each FFN (`train_ffn`): so it is right under every kind of gradient
checkpointing, where a sum collected on the side would be lost or counted twice, and needs no memory
of its own.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from twellctl.bundle import twell_model
from twellctl.bundle.twell_config import new_twell
from twellctl.bundle.twell_train import FfnMeter, plain_train_ffn
from twellctl.here.own_kernels import own_kernels

_uncompiled_forward = torch.compiler.disable(twell_model.TwellFFN.forward)


class FfnPenalty:
    """Lets the gated FFNs of a model add the penalty's gradient, and measures each forward pass.

    Penalty = `l1 * mean over layers and tokens of the sum over neurons of |hidden|`, as the paper's
    code has it. It is used as `PricedGates` is. The FFNs run over `train_ffn`, each over the
    kernels once so little fired in the step before that they pay. `compiled`: in a compiled layer
    they are no part of its graph, which that would break; what they compute densely is compiled by
    itself.
    """

    gates = ()

    def __init__(self, model: nn.Module, *, compiled: bool = False):
        self.ffns = twell_model.gated_ffns(model)
        self.state = None  # nothing of its own to keep
        self._stock = [type(ffn) for ffn in self.ffns]
        twell_model.put_over_twell(model, new_twell(len(self.ffns), "", ""))
        twell_model.use_kernels(model, own_kernels())
        twell_model.lay_weights(model, trained=True)
        self._meters = [FfnMeter() for _ in self.ffns]
        for ffn, meter in zip(self.ffns, self._meters, strict=True):
            ffn.twell_meter = meter
            if compiled:
                ffn.forward = types.MethodType(_uncompiled_forward, ffn)
                meter.plain = compiled_plain()

    def fold(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Nothing: the weights are all there is."""

    def remove(self) -> None:
        """Give the FFNs back their own forward; the ReLU stays in the place of the activation."""
        for ffn, stock in zip(self.ffns, self._stock, strict=True):
            ffn.__class__ = stock
            del ffn.twell_meter
            ffn.__dict__.pop("forward", None)

    def begin(self, num_tokens: int, l1: float = 0.0) -> None:
        """Before a forward pass; as of `PricedGates`."""
        for meter in self._meters:
            meter.price = l1 / len(self.ffns)

    def follow(self, densities: list[float]) -> None:
        """After a step: what fired in each layer."""
        for meter, density in zip(self._meters, densities, strict=True):
            meter.density = density

    def densities(self) -> Tensor:
        """Of the last forward pass, `[layers]`."""
        meter = self._meters[0]
        fired = torch.stack([m.fired for m in self._meters])
        return fired.float() / (meter.num_tokens * meter.num_neurons)


@functools.cache
def compiled_plain() -> Callable[..., tuple[Tensor, Tensor]]:
    """`plain_train_ffn`, compiled."""
    run = torch.compile(plain_train_ffn, dynamic=False)

    def plain(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, penalty, counted = given
        if penalty is not None and not isinstance(penalty, Tensor):  # it changes from step to step
            penalty = torch.full((1,), penalty, device=x.device)
        return run(x, *tensors, penalty, counted)

    return plain
