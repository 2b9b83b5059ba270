"""Some steps of Adam on one layer's FFN alone, its gates too, with a price on what fires.

    loss = sum over tokens of c |y - down(relu(gate z) * up z) - line z|^2 / sum of c |y|^2
           + price * (share of the neurons that fire) / density

The price is steered so that `density` of the neurons fire. As in `training.priced_gates`, gradients
of the gates are those of `gate * sigmoid(gate / SLOPE)`. The gradients are written out: the layer
has three products, and autograd would keep what is computed here in one piece.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twellctl.fitting.ffn import GatedFfn
from twellctl.here.processes import average, is_one_of_several

SLOPE = 0.05  # width of the sigmoid of the backward pass, as `training.priced_gates` has it
WARMUP = 20  # steps
FIRST_PRICE = 0.01
PRICE_STEP = 0.1  # the most that log(price) moves in a step
SMOOTHING = 0.8
BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class LayerText:
    """What a layer reads and shall give, of all tokens of this process.

    `z` `[T, K]` is the FFN's input, `weights` `[T]` what the squared error of a token counts,
    `wanted(tokens)` the output wanted `[*, K]` float32 of a slice or index of them.
    """

    z: Tensor
    weights: Tensor
    wanted: Callable[[slice | Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.z)


@dataclass(frozen=True)
class Steps:
    """How many, of so many tokens (over all processes), at a `rate` times the rms of a weight."""

    number: int
    tokens: int
    rate: float
    seed: int


def take_steps(
    ffn: GatedFfn, line: Tensor, direction: Tensor, text: LayerText, density: float, steps: Steps
) -> tuple[GatedFfn, Tensor]:
    """(FFN, line `[K, K]`) after the steps; `line` acts on `z` times `relu(direction . z)`."""
    trained = {name: value.clone() for name, value in vars(ffn).items() if value is not None}
    trained["line"] = line.clone()
    size = trained["down"].square().mean().sqrt()  # of a bias, which may be zero
    base = {n: steps.rate * float(_rms(w) if w.ndim > 1 else size) for n, w in trained.items()}
    base["line"] = steps.rate * float(torch.maximum(_rms(line), size))
    groups = [{"params": [w], "lr": base[name]} for name, w in trained.items()]
    adam = torch.optim.Adam(groups, betas=BETAS, fused=text.z.is_cuda)
    generator = torch.Generator(text.z.device).manual_seed(steps.seed)
    world = torch.distributed.get_world_size() if is_one_of_several() else 1
    batch = max(1, steps.tokens // world)
    some = slice(0, min(len(text), 1 << 16))
    scale = (text.weights[some, None] * text.wanted(some).square()).sum(1).mean()
    if is_one_of_several():
        average([scale])
    price = torch.full((), FIRST_PRICE, device=line.device)
    seen = torch.full((), density, device=line.device)
    for number in range(steps.number):
        picked = torch.randint(len(text), (batch,), generator=generator, device=line.device)
        per_neuron = price / (batch * len(ffn.gate) * density)
        gradients, fired = _gradients(trained, direction, text, picked, scale * batch, per_neuron)
        together = [*gradients.values(), fired]
        if is_one_of_several():
            average(together)
        for name, gradient in gradients.items():
            trained[name].grad = gradient
        share = min(1.0, (number + 1) / WARMUP) * (1 - number / steps.number)
        for group, rate in zip(adam.param_groups, base.values(), strict=True):
            group["lr"] = rate * share
        adam.step()
        seen = SMOOTHING * seen + (1 - SMOOTHING) * fired
        price = price * torch.exp(PRICE_STEP * (seen / density - 1).clamp(-1, 1))
    line = trained.pop("line")
    return replace(ffn, **{name: weight.detach() for name, weight in trained.items()}), line


def _gradients(
    weights: dict[str, Tensor],
    direction: Tensor,
    text: LayerText,
    picked: Tensor,
    scale: Tensor,
    price: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """({weight: float32 gradient}, share of the neurons that fire) on the `picked` tokens."""
    z = text.z[picked]
    ffn = GatedFfn(**{name: w for name, w in weights.items() if name != "line"})
    down, line = ffn.down.to(z.dtype), weights["line"].to(z.dtype)
    gate, up = ffn.gates(z), ffn.ups(z)
    active = gate.relu()
    hidden = active * up
    mapped = z * (z @ direction.to(z.dtype)).relu()[:, None]
    away = hidden @ down.T + mapped @ line.T
    if ffn.down_bias is not None:
        away += ffn.down_bias.to(z.dtype)
    away = away.float() - text.wanted(picked)
    away = (away * (2 * text.weights[picked, None] / scale)).to(z.dtype)
    back = away @ down
    back_up, back_active = back * active, back * up
    soft = torch.sigmoid(gate / SLOPE)
    slope = torch.addcmul(price.to(z.dtype), back_active, gate).div_(SLOPE)
    back_gate = torch.ops.aten.sigmoid_backward(slope, soft).addcmul_(back_active, soft)
    found = {"gate": back_gate.T @ z, "up": back_up.T @ z, "down": away.T @ hidden}
    found["line"] = away.T @ mapped
    for name, of in (("gate_bias", back_gate), ("up_bias", back_up), ("down_bias", away)):
        if name in weights:
            found[name] = of.sum(0)
    fired = (gate > 0).sum() / gate.numel()
    return {name: gradient.float() for name, gradient in found.items()}, fired


def _rms(weight: Tensor) -> Tensor:
    return weight.square().mean().sqrt()
