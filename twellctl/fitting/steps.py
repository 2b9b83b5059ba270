"""Some steps of Adam on one layer's FFN alone, its gates too, with a price on what fires.

    loss = sum over tokens of c |y - down(relu(gate z) * up z) - map z|^2 / sum of c |y|^2
           + price * (share of the neurons that fire) / density

The price is steered so that `density` of the neurons fire, which is the share that fired before the
first step. As in `training.priced_gates`, gradients of the gates are those of
`gate * sigmoid(gate / SLOPE)`. The gradients are written out: the FFN has three products, and
autograd would keep what is computed here in one piece.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twellctl.fitting.ffn import FfnText, GatedFfn
from twellctl.fitting.grid import Grid
from twellctl.here.processes import average, num_processes

SLOPE = 0.05  # width of the sigmoid of the backward pass
WARMUP = 20  # steps
FIRST_PRICE = 0.01
PRICE_STEP = 0.1  # the most that log(price) moves in a step
SMOOTHING = 0.8
BETAS = (0.9, 0.98)
MAP = "map"  # the name of the map among the weights
ROUNDED = ("gate", "up", "down")  # of them, those that a grid rounds: the map is cut later


@dataclass(frozen=True)
class Steps:
    """`number` of steps, each of `tokens` (over all processes), at a `rate` times the rms of a
    weight."""

    number: int
    tokens: int
    rate: float
    seed: int


class _Price:
    """The price of what fires, which rises while more than `density` of the neurons fire."""

    def __init__(self, density: float, device: torch.device):
        self.density = density
        self.value = torch.full((), FIRST_PRICE, device=device)
        self._seen = torch.full((), density, device=device)

    def follow(self, fired: Tensor) -> None:
        """Move by the share that `fired` in the last step."""
        self._seen = SMOOTHING * self._seen + (1 - SMOOTHING) * fired
        away = (self._seen / self.density - 1).clamp(-1, 1)
        self.value = self.value * torch.exp(PRICE_STEP * away)


def take_steps(
    ffn: GatedFfn,
    full_map: Tensor,
    direction: Tensor,
    text: FfnText,
    density: float,
    steps: Steps,
    grid: Grid | None = None,
) -> tuple[GatedFfn, Tensor]:
    """(FFN, map `[K, K]`) after the steps; the map acts on `z` times `relu(direction . z)`.

    `density` is the share of the neurons that fires with `ffn`, and stays what fires. Where nothing
    is wanted, or nothing fires, there are no steps. With a `grid`, losses are those of weights that
    are rounded to it, and their gradients move the weights behind them.
    """
    mean_wanted = _mean_wanted(text)
    if not (mean_wanted > 0 and density > 0):
        return ffn, full_map
    trained = {name: value.clone() for name, value in vars(ffn).items() if value is not None}
    trained[MAP] = full_map.clone()
    rates = _rates(trained, steps.rate)
    groups = [{"params": [weight], "lr": rates[name]} for name, weight in trained.items()]
    adam = torch.optim.Adam(groups, betas=BETAS, fused=text.z.is_cuda)
    generator = torch.Generator(text.z.device).manual_seed(steps.seed)
    batch = max(1, steps.tokens // num_processes())
    scale, price = mean_wanted * batch, _Price(density, full_map.device)
    for number in range(steps.number):
        picked = torch.randint(len(text), (batch,), generator=generator, device=full_map.device)
        per_neuron = price.value / (batch * len(ffn.gate) * density)
        seen = trained if grid is None else _on_grid(trained, grid)
        gradients, fired = _gradients(seen, direction, text, picked, scale, per_neuron)
        average([*gradients.values(), fired])
        for name, gradient in gradients.items():
            trained[name].grad = gradient
        share = min(1.0, (number + 1) / WARMUP) * (1 - number / steps.number)
        for group, rate in zip(adam.param_groups, rates.values(), strict=True):
            group["lr"] = rate * share
        adam.step()
        price.follow(fired)
    full_map = trained.pop(MAP)
    return replace(ffn, **{name: weight.detach() for name, weight in trained.items()}), full_map


def _on_grid(weights: dict[str, Tensor], grid: Grid) -> dict[str, Tensor]:
    return weights | {name: grid.rounded(weights[name]) for name in ROUNDED}


def _rates(weights: dict[str, Tensor], rate: float) -> dict[str, float]:
    """The learning rate of each weight: `rate` times its rms.

    Biases and the map may be zero: biases take the rms of down, the map at least that.
    """
    least = _rms(weights["down"])
    rates = {n: rate * float(_rms(w) if w.ndim > 1 else least) for n, w in weights.items()}
    return rates | {MAP: rate * float(torch.maximum(_rms(weights[MAP]), least))}


def _mean_wanted(text: FfnText) -> Tensor:
    """The weighted square of what is wanted, a mean over some tokens of all processes."""
    some = slice(0, min(len(text), 1 << 16))
    mean = (text.weights[some, None] * text.wanted(some).square()).sum(1).mean()
    average([mean])
    return mean


def _gradients(
    weights: dict[str, Tensor],
    direction: Tensor,
    text: FfnText,
    picked: Tensor,
    scale: Tensor,
    price: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """({weight: float32 gradient}, share of the neurons that fire) on the `picked` tokens."""
    z = text.z[picked]
    ffn = GatedFfn(**{name: w for name, w in weights.items() if name != MAP})
    down, full_map = ffn.down.to(z.dtype), weights[MAP].to(z.dtype)
    gate, up = ffn.gates(z), ffn.ups(z)
    active = gate.relu()
    hidden = active * up
    mapped = z * (z @ direction.to(z.dtype)).relu()[:, None]
    away = hidden @ down.T + mapped @ full_map.T
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
    found[MAP] = away.T @ mapped
    for name, of in (("gate_bias", back_gate), ("up_bias", back_up), ("down_bias", away)):
        if name in weights:
            found[name] = of.sum(0)
    fired = (gate > 0).sum() / gate.numel()
    return {name: gradient.float() for name, gradient in found.items()}, fired


def _rms(weight: Tensor) -> Tensor:
    return weight.square().mean().sqrt()
