"""What `--bits` adds to the time of a fit: operations from shapes, and two loops, measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.fitting.grid import AT_ONCE, Grid
from twellctl.fitting.least_squares import COMPUTED
from twellctl.fitting.linears import TOKENS
from twellctl.fitting.settings import GROUP_SIZES, Fit

ROWS = {"cuda": 8192, "cpu": 64}  # of the weight that is rounded to measure
INVERSE = 4 / 3  # times the cube of their number: two Cholesky factors, and the inverse of sums

Seconds = Callable[[Callable[[], Tensor]], float]  # of a call on the device


@dataclass(frozen=True)
class RoundingRates:
    """Seconds on a device: of each input that is rounded in turn, of each weight of those, and of
    each weight that is rounded to the nearest."""

    an_input: float
    by_sums: float
    nearest: float

    @classmethod
    def measured(cls, device: torch.device, seconds: Seconds) -> "RoundingRates":
        """Those of `device`."""
        grid, gram = Grid(GROUP_SIZES[0], torch.bfloat16), torch.eye(AT_ONCE, device=device)
        weight = torch.randn(ROWS[device.type], AT_ONCE, device=device)
        one = seconds(lambda: grid.by_sums(weight[:1], gram, 1.0).scales)
        all_rows = seconds(lambda: grid.by_sums(weight, gram, 1.0).scales)
        nearest = seconds(lambda: grid.rounded(weight)) / weight.numel()
        return cls(one / AT_ONCE, max(0.0, all_rows - one) / weight.numel(), nearest)


@dataclass(frozen=True)
class Rounding:
    """What is rounded in a layer of `num_weights`, with a hidden size `K`, `N` neurons and a map of
    rank `R`, on `num_tokens`."""

    fit: Fit
    K: int
    N: int
    R: int
    num_weights: int
    num_tokens: int

    def products(self) -> tuple[float, float, float]:
        """Operations: of forwards in the model's dtype, of sums, and in float64."""
        forward = sums = solves = 0.0
        for inputs, outputs, tokens in self._read():
            forward += 4 * tokens * (self.num_weights if self.fit.keep_activation else self._others)
            sums += 2 * tokens * inputs * (COMPUTED * inputs + 2 * outputs)
            solves += inputs**3 / 3 + 2 * inputs**2 * outputs
        return forward, sums, solves + sum(INVERSE * inputs**3 for inputs, _ in self._by_sums())

    def seconds(self, rates: RoundingRates) -> float:
        """Of rounding alone."""
        stepped = 0 if self.fit.keep_activation else self.fit.steps * 3 * self.N * self.K
        return stepped * rates.nearest + sum(
            inputs * rates.an_input + inputs * outputs * rates.by_sums
            for inputs, outputs in self._by_sums()
        )

    def bytes(self) -> int:
        """What the largest sums take while errors of a layer's inputs are worked out from them."""
        inputs = max(inputs for inputs, _ in self._by_sums())
        before = 0 if self.fit.keep_activation else self.N + self.K  # whose sums are held, too
        return 4 * before**2 + (4 + 3 * 8) * inputs**2

    @property
    def _others(self) -> int:
        """Weights outside of the FFN: nearly all of them attention's."""
        return self.num_weights - 3 * self.N * self.K

    def _read(self) -> Iterator[tuple[int, int, int]]:
        """(inputs, outputs, tokens) of what sums are taken for: q, k and v; o; and of a model that
        keeps its activation gate and up; down, of all tokens."""
        some = min(self.num_tokens, TOKENS * self.K)
        yield self.K, max(0, self._others // self.K - self.K), some
        yield self.K, self.K, some
        if self.fit.keep_activation:
            yield from ((self.K, 2 * self.N, some), (self.N, self.K, self.num_tokens))

    def _by_sums(self) -> Iterator[tuple[int, int]]:
        """(inputs, outputs) of all that is rounded by sums: besides those of `_read` the direction,
        gate and up if no steps see them rounded, the map's inputs, and down."""
        yield from ((inputs, outputs) for inputs, outputs, _ in self._read())
        if self.fit.keep_activation:
            return
        yield from ((self.K, 1), (self.K, self.R), (self.N + self.R, self.K))
        if not self.fit.steps:
            yield self.K, 2 * self.N
