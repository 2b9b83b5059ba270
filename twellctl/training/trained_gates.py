"""Gates with thresholds that are trained, and a price on every neuron that fires.

    active = gate * fires        fires = [gate > threshold]        one threshold a neuron
    loss  += price * mean over layers and tokens of the sum over neurons of fires

At the end each neuron's rows are scaled, gate's up and up's down or the other way round, so that
one threshold a layer does the same: that is what is stored.

A step has no slope, so gradients pass it as if it were `sigmoid((gate - threshold) / SLOPE)`: a
gate near the threshold feels both what its neuron is worth to the loss and what it costs, and so
does the threshold. What fires keeps its value: unlike an L1 penalty the price does not shrink it.
Early on the sigmoid may be the forward too; with threshold 0 and width 1 that is SiLU, exactly, so
that a converted model starts as what it was and hardens without a jump.

The price is never part of the loss tensor. It is added in the backward pass, which is right under
every kind of gradient checkpointing, where a sum collected on the side would be counted twice.
"""

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_model import activation_name, gated_ffns

SLOPE = 0.1  # width of the sigmoid that stands for the step in the backward pass
MOST_SCALED = 256.0  # the most that folding scales a row by


class TrainedGate(nn.Module):
    """In the place of an FFN's activation; outside of training it is plain `relu_t`."""

    def __init__(self, threshold: float, num_neurons: int, settings: Tensor):
        super().__init__()
        device = settings.device
        self.threshold = nn.Parameter(torch.full((num_neurons,), threshold, device=device))
        self.settings = settings  # of all layers: (1 while soft else 0, width, price of one neuron)
        self.fired = torch.zeros((), device=device)

    @property
    def limit(self) -> Tensor:
        """The thresholds as gates are compared with them: cut to what bf16 holds."""
        return _cut(self.threshold.detach())

    def forward(self, gate: Tensor) -> Tensor:
        limit = self.limit
        fires = gate > limit
        self.fired = fires.sum(dtype=torch.float32)
        if not self.training:
            return torch.where(fires, gate, 0)
        return _Fire.apply(gate, self.threshold, limit, self.settings)


class _Fire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, threshold: Tensor, limit: Tensor, settings: Tensor) -> Tensor:
        ctx.save_for_backward(gate, threshold, limit, settings)
        fires, _ = _fires(gate.float(), threshold, limit, settings)
        active = gate * fires
        # compiled by torch 2.11 what ends in a conversion of nothing has no gradient
        return active if active.dtype == gate.dtype else active.to(gate.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        stored, threshold, limit, settings = ctx.saved_tensors
        gate, grad = stored.float(), grad.float()
        fires, soft = _fires(gate, threshold, limit, settings)
        slope = soft * (1 - soft) / settings[1] * (grad * gate + settings[2])
        of_neurons = -slope.flatten(0, -2).sum(0)
        return (grad * fires + slope).to(stored.dtype), of_neurons, None, None


def _fires(gate, threshold, limit, settings) -> tuple[Tensor, Tensor]:
    """(what multiplies the gate, the sigmoid that stands for it in the backward pass)."""
    soft = torch.sigmoid((gate - threshold) / settings[1])
    return torch.where(settings[0] > 0, soft, (gate > limit).float()), soft


def _cut(thresholds: Tensor) -> Tensor:
    return (thresholds.view(torch.int32) & ~0xFFFF).view(torch.float32)


def _median_above_0(limits: Tensor) -> float:
    above = limits[limits > 0]
    return above.median().item() if len(above) else 0.0


class TrainedGates:
    """Puts a `TrainedGate` into every gated FFN of `model`, and counts what fires.

    Set `l1`, the price of a neuron that fires, and `width`, that of the soft gate (None: a step).
    The penalty is `l1 * mean over layers and tokens of the number of neurons that fire`, or with
    `normalizer="mean"` of the share of them.
    """

    def __init__(self, model: nn.Module, thresholds: list[float], normalizer: str = "sum"):
        self.ffns = gated_ffns(model)
        self.num_neurons = self.ffns[0].down_proj.in_features
        self.normalizer = normalizer
        self.l1 = 0.0
        self.width: float | None = None
        settings = torch.zeros(3, device=next(model.parameters()).device)
        self.gates = [TrainedGate(t, self.num_neurons, settings) for t in thresholds]
        self._settings, self._written, self._num_tokens = settings, None, 0
        for ffn, gate in zip(self.ffns, self.gates, strict=True):
            setattr(ffn, activation_name(ffn), gate.train(ffn.training))

    @property
    def thresholds(self) -> list[list[float]]:
        """Of each layer those of its neurons, as they are now."""
        return [gate.threshold.tolist() for gate in self.gates]

    @thresholds.setter
    def thresholds(self, values: list[list[float]]) -> None:
        for gate, value in zip(self.gates, values, strict=True):
            gate.threshold.data.copy_(torch.tensor(value))

    @property
    def limits(self) -> list[float]:
        """One threshold a layer, as bf16 holds it: what is stored after `fold`.

        The median of its neurons' that are above 0, or 0 if none is.
        """
        return [_median_above_0(gate.limit) for gate in self.gates]

    def fold(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Scale rows of `state`, `model`'s, so that `limits` do what a threshold a neuron did.

        `gate > t_n` is `gate * t / t_n > t`, and the hidden value stays what it is if up is scaled
        by `t_n / t`. A neuron without a threshold gets a very small one. The thresholds leave
        `state`.
        """
        names = {id(module): name for name, module in model.named_modules()}
        for ffn, limit in zip(self.ffns, self.limits, strict=True):
            name = names[id(ffn)]
            own = _cut(state.pop(f"{name}.{activation_name(ffn)}.threshold"))
            if limit:
                _scale_rows(state, name, limit / own.clamp(min=limit / MOST_SCALED))

    def remove(self) -> None:
        """Leave ReLU in the place of what trained them."""
        for ffn in self.ffns:
            setattr(ffn, activation_name(ffn), nn.ReLU())

    def begin(self, num_tokens: int, scale: float) -> None:
        """Before a forward pass; `scale` is what the rest of the loss is multiplied by."""
        price = self.l1 * scale / (len(self.gates) * num_tokens)
        if self.normalizer == "mean":
            price /= self.num_neurons
        soft = self.width is not None
        settings = [float(soft), self.width if soft else SLOPE, price]
        if settings != self._written:
            self._settings.copy_(torch.tensor(settings))
            self._written = settings
        self._num_tokens = num_tokens

    def measured(self) -> tuple[Tensor, Tensor]:
        """Of the last forward pass: (penalty without `l1`, density of each layer `[layers]`)."""
        fired = torch.stack([gate.fired for gate in self.gates])
        densities = fired / (self._num_tokens * self.num_neurons)
        penalty = densities.mean() * (1 if self.normalizer == "mean" else self.num_neurons)
        return penalty, densities


def _scale_rows(state: dict[str, Tensor], name: str, scale: Tensor) -> None:
    """Rows of the gate by `scale`, of up by its inverse; weights and, where there are, biases."""
    for kind in ("weight", "bias"):
        if f"{name}.gate_up_proj.{kind}" in state:
            parts = {f"{name}.gate_up_proj.{kind}": torch.cat([scale, 1 / scale])}
        else:
            parts = {f"{name}.gate_proj.{kind}": scale, f"{name}.up_proj.{kind}": 1 / scale}
        for key, by in parts.items():
            if key in state:
                by = by.view(-1, *[1] * (state[key].ndim - 1)).to(state[key].device)
                state[key] = (state[key] * by).to(state[key].dtype)
