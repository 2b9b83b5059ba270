"""Which neurons fire: a hook on the activation of each gated FFN of a stock model."""

from collections.abc import Callable

from torch import Tensor, nn

from twellctl.bundle.twell_model import activation_name, gated_ffns

Count = Callable[[int, Tensor, Tensor], None]


class FiredMeter:
    """Inside `with`, each forward of layer i calls `count(i, gate, active)`.

    Both are `[M, N]`, the gate before and after the activation with its threshold; what fired is
    `active != 0`. Under gradient checkpointing `count` is called again in the backward pass.
    """

    def __init__(self, model: nn.Module, count: Count):
        self.model, self.count = model, count
        self._hooks: list = []

    def __enter__(self) -> "FiredMeter":
        for layer_idx, ffn in enumerate(gated_ffns(self.model)):
            activation = getattr(ffn, activation_name(ffn))
            self._hooks.append(activation.register_forward_hook(self._hook(layer_idx)))
        return self

    def __exit__(self, *failure: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, layer_idx: int) -> Callable:
        def hook(module: nn.Module, inputs: tuple[Tensor], active: Tensor) -> None:
            gate = inputs[0].detach()
            self.count(layer_idx, gate.flatten(0, -2), active.detach().flatten(0, -2))

        return hook
