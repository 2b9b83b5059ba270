"""Inputs of one gated FFN of which the density is known beforehand.

`x ~ N(0, 1)` with channel 0 set to 1, gate weights `N(0, 1/K)` with column 0 set to the normal
quantile of the density. So neurons fire independently of each other, and for every token anew: no
two tokens share more of them than chance has it, which is the hardest case for what reads the
weights of fired neurons only. Rows of another density have another channel 0.
"""

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle.twell_config import TILE
from twellctl.errors import TwellError
from twellctl.firing.counts import LayerCount, Union, UnionCount

LOGNORMAL_SIGMA = 1.0  # one token in a hundred has six times the mean density
BIAS_STD = 0.05
CACHES = 3  # the gates of all copies of the weights together, in sizes of the L2 cache
MAX_COPIES = 64
COUNTED_ROWS = 8192  # at once; a multiple of 128
FULL = 8.0  # standard deviations: every neuron of every row fires


@dataclass(frozen=True)
class Spread:
    """How density is spread over tokens: "even", "lognormal" around the mean, or with "heavy" rows.

    Of the latter a share `heavy_rows` has `heavy_density`, the others the given density.
    """

    kind: str = "even"
    heavy_rows: float = 0.05
    heavy_density: float = 0.5


EVEN = Spread()


@dataclass(frozen=True)
class FfnWeights:
    """The weights of one gated FFN; gate and up are halves of one matrix, so both forms share it.

    `gate_up` `[2N, K]`, `down` `[K, N]`, `gate_up_bias` `[2N]`, `down_bias` `[K]`.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def split(self) -> tuple[Tensor | None, ...]:
        """(w_gate, w_up, w_down, b_gate, b_up, b_down), views."""
        biases = (None, None) if self.gate_up_bias is None else self.gate_up_bias.chunk(2)
        return (*self.gate_up.chunk(2), self.down, *biases, self.down_bias)

    @property
    def gate_bytes(self) -> int:
        return self.gate_up.nbytes // 2

    def copy(self) -> "FfnWeights":
        """The same numbers at other addresses."""
        tensors = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return FfnWeights(*(None if tensor is None else tensor.clone() for tensor in tensors))


def make_weights(
    K: int, N: int, density: float, *, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> FfnWeights:
    """Random weights whose gate fires at `density` for the rows of `make_rows`."""
    device = generator.device

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * std

    gate_up = normal(2 * N, K, std=K**-0.5)
    gate_up[:N, 0] = _quantile(density) * _gate_std(K, bias)
    biases = (None, None)
    if bias:
        biases = (normal(2 * N, std=BIAS_STD).to(dtype), normal(K, std=BIAS_STD).to(dtype))
    down = normal(K, N, std=K**-0.5)
    return FfnWeights(gate_up.to(dtype), down.to(dtype), *biases)


def make_rows(
    M: int,
    K: int,
    density: float,
    spread: Spread,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Random rows `[M, K]`; their channel 0 says how many neurons of `make_weights` fire."""
    device = generator.device
    x = torch.randn((M, K), generator=generator, device=device, dtype=dtype)
    x[:, 0] = 1
    if spread.kind == "lognormal":
        exponent = torch.randn(M, generator=generator, device=device, dtype=torch.float64)
        densities = density * (LOGNORMAL_SIGMA * exponent - LOGNORMAL_SIGMA**2 / 2).exp()
        quantiles = torch.special.ndtri(densities.clamp(1e-9, 0.999))
        x[:, 0] = (quantiles / _quantile(density)).to(dtype)
    if spread.kind == "heavy":
        rows = torch.randperm(M, generator=generator, device=device)[: round(M * spread.heavy_rows)]
        x[rows, 0] = _quantile(spread.heavy_density) / _quantile(density)
    return x


def rotated_weights(
    weights: FfnWeights, device: torch.device, at_least: int = 1
) -> list[FfnWeights]:
    """`weights` and as many copies as keep a gate from being in the cache when its turn comes.

    They are `at_least` so many in all, if the memory allows; on the CPU just one.
    """
    if device.type != "cuda":
        return [weights]
    torch.cuda.empty_cache()
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free = torch.cuda.mem_get_info(device)[0]
    wanted = -(-CACHES * cache // weights.gate_bytes)
    affordable = free // 8 // (3 * weights.gate_bytes)
    number = max(1, min(max(1 + wanted, at_least), affordable, MAX_COPIES))
    return [weights, *(weights.copy() for _ in range(number - 1))]


def check_union(union: Union) -> None:
    """`TwellError` if the tokens of synthetic weights share neurons, which would flatter TwELL."""
    if union.too_small:
        raise TwellError(
            f"these synthetic weights fire only {union.fired:.1%} of the neurons over "
            f"{union.tokens} consecutive tokens, where independent ones fire {union.expected:.1%}: "
            "so little is not measured; take another --seed or --density, or a real model"
        )


@torch.no_grad()
def measure_firing(x: Tensor, weights: FfnWeights) -> dict[str, Any]:
    """Of the gate in the dtype of `x`: density, nnz, slots, union. Refuses too small a union."""
    w_gate, _, _, b_gate, _, _ = weights.split
    count, union_count = LayerCount(len(w_gate), TILE, x.device), UnionCount()
    for rows in x.split(COUNTED_ROWS):
        gate = F.linear(rows, w_gate, b_gate)
        active = F.relu(gate)
        count.add(gate, active)
        union_count.add(active)
    layer = count.summary()
    union = union_count.summary(layer.density)
    check_union(union)
    keys = ("density", "nnz_mean", "nnz_p50", "nnz_p99", "nnz_max", "slots")
    return {key: getattr(layer, key) for key in keys} | {"union": asdict(union)}


def _quantile(density: float) -> float:
    """Where the normal distribution reaches `density`: what channel 0 adds to each gate."""
    if density >= 1:
        return FULL
    return NormalDist().inv_cdf(density)


def _gate_std(K: int, bias: bool) -> float:
    """Standard deviation of a gate over neurons, without what channel 0 adds."""
    return math.sqrt((K - 1) / K + (BIAS_STD**2 if bias else 0))
