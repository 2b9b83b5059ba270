"""One FFN made ReLU: a gated FFN of N neurons becomes a ReLU FFN of N + R.

    direction  `w` with `w . z = 1` for nearly every token, by least squares: what an FFN reads is
               normalised and far from centred. A shift `t` of a gate is then a change `-t w` of its
               weights, a bias without a bias; and a neuron whose gate is `w` always fires.
    shifts     gate n moves down by `threshold / (rms(up n) |down n|)`: so a neuron fires only where
               what it gives may be larger than the threshold, which is one for the whole model. One
               that gives nothing moves until it does not fire. A threshold below zero moves all
               gates up by as much.
    steps      of Adam on the FFN's weights and the map (`steps.py`), between two least squares.
               They hold the density that is measured after the shifts, not the one asked for: the
               threshold has shared that out among the layers, by what their neurons are worth.
    solve      least squares of what is wanted on `[relu(gate z) * up z, z]`: down and a map of `z`.
    map        cut to the rank R that gives most on this text; then down and the map's outputs are
               solved for again, from the same sums.

A token's squared error counts by the inverse square of its hidden state: what follows normalises
it, and the few tokens whose states are a hundred times as long would outweigh all others.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twellctl.fitting.ffn import FfnText, GatedFfn
from twellctl.fitting.grid import Codes, Grid
from twellctl.fitting.least_squares import Products, solved, tf32
from twellctl.fitting.rounded_ffn import RoundedFfn
from twellctl.fitting.steps import Steps, take_steps
from twellctl.here.processes import same_in_all, sum_over_processes

DIRECTION_RIDGE = 1e-4
SCORED = 8192  # tokens on which a threshold is judged
FOR_STEPS = 4  # weights that steps begin from are solved for on a quarter of the tokens,
ENOUGH = 16  # if that leaves this many of them for a feature


@dataclass(frozen=True)
class HowToFit:
    """What all layers of a model share.

    `dtype` is the one that weights will be stored in; with a `grid` they are rounded to that.
    """

    rank: int
    ridge: float
    dtype: torch.dtype
    steps: Steps | None
    grid: Grid | None = None


@torch.no_grad()
def fit_layer(
    ffn: GatedFfn, text: FfnText, threshold: float, how: HowToFit
) -> tuple[GatedFfn, float]:
    """(FFN of N + R neurons with weights as stored, share of the N that fire).

    `ffn` holds float32 weights of the model that is fitted; `threshold` 0 leaves its gates as they
    are. Steps hold the share that fires after the shifts. `NotSolved` where the equations have no
    solution.
    """
    direction, gram = find_direction(text)
    direction, codes = direction.to(how.dtype).float(), None
    if how.grid is not None:
        codes = how.grid.by_sums(direction[None], gram, DIRECTION_RIDGE)
        direction = codes.weight[0]
    if threshold:
        ffn = replace(ffn, gate=ffn.gate - shifts(ffn, text, threshold)[:, None] * direction)
    ffn = ffn.rounded(how.dtype)
    full_map = torch.zeros(len(direction), len(direction), device=direction.device)
    if how.steps is not None:
        stride = stride_before_steps(len(text), *ffn.gate.shape)
        products, fired = _products(ffn, full_map, direction, text, stride)
        ffn, full_map = _solution(ffn, full_map, products, how.ridge)
        ffn, full_map = take_steps(ffn, full_map, direction, text, fired, how.steps, how.grid)
        ffn = ffn.rounded(how.dtype)
    if codes is not None:
        gates = _rounded_gates(ffn, gram, how)
        return _rounded_layer(ffn, gates, full_map, codes, text, how)
    products, fired = _products(ffn, full_map, direction, text)
    return _with_map(ffn, full_map, direction, products, how), fired


def stride_before_steps(num_tokens: int, N: int, K: int) -> int:
    """1 of so many parts of the tokens is used for the weights that steps begin from."""
    return max(1, min(FOR_STEPS, num_tokens // (ENOUGH * (N + K))))


def find_direction(text: FfnText) -> tuple[Tensor, Tensor]:
    """`[K]` float32: its product with what the layer reads is nearest to 1. And the sums of
    products of what the layer reads, `[K, K]`."""
    K = text.z.shape[1]
    products = Products(K, 1, text.z.device)
    for part in text.parts():
        z = text.z[part].float()
        products.add(z.T, torch.ones(1, len(z), device=z.device))
    products.over_processes()
    return solved(products, (K,), DIRECTION_RIDGE)[:, 0], products.gram


def worth(ffn: GatedFfn, z: Tensor, weights: Tensor) -> Tensor:
    """`[N]`: what a unit of each gate gives, root mean square over weighted tokens `[T, K]`."""
    squares = (ffn.ups(z).float().square() * weights[:, None]).mean(0)
    return squares.sqrt() * ffn.down.norm(dim=0)


def shifts(ffn: GatedFfn, text: FfnText, threshold: float) -> Tensor:
    """`[N]`: how far each gate moves down: at most until it fires for no token.

    What gives nothing would otherwise move without end. By a threshold below zero all move as far.
    """
    if threshold < 0:
        return torch.full_like(ffn.gate[:, 0], threshold)
    some = slice(None, None, max(1, len(text) // SCORED))
    z = text.z[some]
    largest = ffn.gates(z).amax(0).float().clamp(min=0)
    return same_in_all(torch.minimum(threshold / worth(ffn, z, text.weights[some]), largest))


def _products(
    ffn: GatedFfn, full_map: Tensor, direction: Tensor, text: FfnText, stride: int = 1
) -> tuple[Products, float]:
    """(sums over `[relu(gate z) * up z, mapped z]` and what is left of the output, share firing).

    What is left is the output wanted less what `ffn` and `full_map` give. Over the tokens of all
    processes, or every `stride`-th part of them. Features lie `[P, T]`, as products of TF32 are
    fastest.
    """
    N, K = ffn.gate.shape
    products = Products(N + K, K, full_map.device)
    weights = torch.cat([ffn.down, full_map], 1)
    fired = torch.zeros(2, dtype=torch.float64, device=full_map.device)
    for part in text.parts(stride):
        z, root = text.z[part], text.weights[part].sqrt()
        gate = ffn.gates(z)
        fired += torch.stack([(gate > 0).sum(), torch.tensor(gate.numel(), device=z.device)])
        hidden = gate.relu_().mul_(ffn.ups(z))
        mapped = z * (z @ direction.to(z.dtype)).relu()[:, None]
        features = z.new_empty(N + K, len(z), dtype=torch.float32)
        features.copy_(torch.cat([hidden, mapped], 1).T)
        with tf32():
            rest = text.wanted(part).T - weights @ features
        if ffn.down_bias is not None:
            rest -= ffn.down_bias[:, None]
        products.add(features.mul_(root), rest.mul_(root))
    products.over_processes()
    sum_over_processes(fired)
    return products, float(fired[0] / fired[1])


def _solution(
    ffn: GatedFfn, full_map: Tensor, products: Products, ridge: float
) -> tuple[GatedFfn, Tensor]:
    N, K = ffn.gate.shape
    change = solved(products, (N, K), ridge).T
    return replace(ffn, down=ffn.down + change[:, :N]), full_map + change[:, N:]


def _with_map(
    ffn: GatedFfn, full_map: Tensor, direction: Tensor, products: Products, how: HowToFit
) -> GatedFfn:
    """The FFN with down solved for and a map of rank R, as it will be stored."""
    map_up = _map_up(ffn, full_map, products, how)
    map_up /= map_up.norm(dim=1, keepdim=True).clamp(min=1e-9)
    down, map_down, _ = _down_over(map_up, ffn, full_map, products, how)
    return replace(ffn, down=down).with_map(direction, map_up, map_down).rounded(how.dtype)


def _rounded_gates(ffn: GatedFfn, gram: Tensor, how: HowToFit) -> tuple[Codes, Codes]:
    """Gate and up on the grid: to the nearest where steps have seen them so, else by the sums of
    what they read, `gram` `[K, K]`."""
    assert how.grid is not None
    if how.steps is not None:
        return how.grid.nearest(ffn.gate), how.grid.nearest(ffn.up)
    both = how.grid.by_sums(torch.cat([ffn.gate, ffn.up]), gram, how.ridge)
    return both.halves()


def _rounded_layer(
    ffn: GatedFfn,
    gates: tuple[Codes, Codes],
    full_map: Tensor,
    direction: Codes,
    text: FfnText,
    how: HowToFit,
) -> tuple[RoundedFfn, float]:
    """The FFN of gates and ups that are rounded: the map's inputs are rounded, and then down with
    the map's outputs, each by what those before it give."""
    assert how.grid is not None
    gate, up = gates
    ffn = replace(ffn, gate=gate.weight, up=up.weight)
    products, fired = _products(ffn, full_map, direction.weight[0], text)
    N, size = len(ffn.gate), ffn.down.square().mean().sqrt()
    # the map's outputs, columns of length 1 so far, become as large as those of down
    wanted = _map_up(ffn, full_map, products, how) / (size * len(ffn.down) ** 0.5)
    map_up = how.grid.by_sums(wanted, products.gram[N:, N:], how.ridge)
    *columns, seen = _down_over(map_up.weight, ffn, full_map, products, how)
    blocks = (N, how.rank)
    down = how.grid.by_sums(torch.cat(columns, 1), seen.gram, how.ridge, blocks)
    gate = Codes.joined(gate, direction.expanded(how.rank))
    biases = ffn.longer_biases(how.rank) | {"down_bias": ffn.down_bias}
    return RoundedFfn.of_codes(gate, Codes.joined(up, map_up), down, biases), fired


def _map_up(ffn: GatedFfn, full_map: Tensor, products: Products, how: HowToFit) -> Tensor:
    """`[R, K]`: the map solved for, cut to the outputs that give most; those have length 1."""
    N = len(ffn.gate)
    _, whole = _solution(ffn, full_map, products, how.ridge)
    seen = whole @ products.gram[N:, N:] @ whole.T  # what the map gives, as sums of products
    outputs = torch.linalg.eigh(seen.double())[1][:, len(seen) - how.rank :].float()
    return same_in_all((outputs.T @ whole).contiguous())


def _down_over(
    map_up: Tensor, ffn: GatedFfn, full_map: Tensor, products: Products, how: HowToFit
) -> tuple[Tensor, Tensor, Products]:
    """(down `[K, N]` and the map's outputs `[K, R]`, solved for; the sums for both).

    `products` become those of what is left without any map.
    """
    N = len(ffn.gate)
    products.right += products.gram[:, N:] @ full_map.T
    through = products.through(map_up)
    change = solved(through, (N, how.rank), how.ridge).T
    return ffn.down + change[:, :N], change[:, N:].contiguous(), through
