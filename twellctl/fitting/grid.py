"""Weights of linear layers rounded to 4 bits: each to the nearest, or all so that outputs stay.

A weight `[N, K]` becomes codes of -8 to 7 times scales, one for each group of inputs
(twell_int4.py). The sign of a scale is such that the number of its group that is farthest from zero
has the code -8: so all sixteen codes are used.

By sums (GPTQ, Frantar et al., 2022, arXiv 2210.17323): inputs are rounded one after the other, and
what each errs by goes to those that are still to come, by the sums of products of inputs. Scales of
a group are those of its weights when its first input is rounded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.bundle.twell_int4 import LEAST, MOST, expand
from twellctl.fitting.least_squares import NotSolved, Products, solved, with_ridge
from twellctl.here.processes import same_in_all

CLIP = 0.95  # of the number of a group that is farthest from zero, what its last code stands for
RIDGE = 0.01  # of sums by which errors are passed on
SOLVE_RIDGE = 0.1  # of least squares in front of it; with 0.01 KL was higher
AT_ONCE = 128  # inputs whose errors are passed on together


@dataclass(frozen=True)
class Codes:
    """A rounded weight: codes int8 `[N, K]` and scales `[N, K / G]`."""

    codes: Tensor
    scales: Tensor

    @property
    def weight(self) -> Tensor:
        """`[N, K]` float32, the numbers that readers of the file compute with."""
        return expand(self.codes, self.scales).float()

    def expanded(self, count: int) -> "Codes":
        """Its one row, `count` times."""
        return Codes(self.codes.expand(count, -1), self.scales.expand(count, -1))

    def halves(self) -> tuple["Codes", "Codes"]:
        """The first half of its rows, and the second."""
        codes, scales = self.codes.chunk(2), self.scales.chunk(2)
        return Codes(codes[0], scales[0]), Codes(codes[1], scales[1])

    @staticmethod
    def joined(*parts: "Codes") -> "Codes":
        """The rows of all `parts`."""
        return Codes(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]))


@dataclass(frozen=True)
class Grid:
    """What weights are rounded to: groups of `group_size` inputs share a scale of `dtype`."""

    group_size: int
    dtype: torch.dtype

    def scales(self, groups: Tensor) -> Tensor:
        """`[...]` in `dtype`, of groups `[..., G]`."""
        high, low = groups.amax(-1), groups.amin(-1)
        farthest = torch.where(high >= -low, high, low)
        scales = (farthest * (CLIP / LEAST)).to(self.dtype)
        smallest = torch.finfo(self.dtype).tiny  # of groups of zeros, too
        return torch.where(scales.abs() < smallest, smallest, scales)

    def nearest(self, weight: Tensor) -> Codes:
        """Each number of `weight` `[N, K]` float32 to the nearest code."""
        groups = weight.unflatten(-1, (-1, self.group_size))
        scales = self.scales(groups)
        codes = _codes(groups, scales.float()[..., None]).flatten(-2)
        return Codes(codes.to(torch.int8), scales)

    def rounded(self, weight: Tensor) -> Tensor:
        """`weight` with the numbers of `nearest`, without making codes of them."""
        groups = weight.unflatten(-1, (-1, self.group_size))
        scales = self.scales(groups).float()[..., None]
        return (_codes(groups, scales) * scales).flatten(-2)

    def by_sums(
        self, weight: Tensor, gram: Tensor, ridge: float = RIDGE, blocks: tuple[int, ...] = ()
    ) -> Codes:
        """`weight` `[N, K]` rounded so that its outputs stay, by the sums of inputs `[K, K]`.

        `ridge` is of each of the `blocks` of inputs (one of all), as in `solved`. `NotSolved` where
        the sums have no solution.
        """
        passed = _passed_on(with_ridge(gram, blocks or (len(gram),), ridge))
        weight, size = weight.clone(), self.group_size
        codes = torch.empty_like(weight, dtype=torch.int8)
        scales = weight.new_empty(len(weight), weight.shape[1] // size, dtype=self.dtype)
        at_once = size * max(1, AT_ONCE // size)
        for first in range(0, weight.shape[1], at_once):
            block = slice(first, min(first + at_once, weight.shape[1]))
            share, own = passed[block, block], weight[:, block]
            errors = torch.empty_like(own)
            for i in range(own.shape[1]):
                if (first + i) % size == 0:
                    group = (first + i) // size
                    scales[:, group] = self.scales(own[:, i : i + size])
                    scale = scales[:, group].float()
                code = _codes(own[:, i], scale)
                errors[:, i] = (own[:, i] - code * scale) / share[i, i]
                own[:, i + 1 :].addr_(errors[:, i], share[i, i + 1 :], alpha=-1)
                codes[:, first + i] = code.to(torch.int8)
            weight[:, block.stop :].addmm_(errors, passed[block, block.stop :], alpha=-1)
        return Codes(same_in_all(codes), same_in_all(scales))


def nearest_outputs(weight: Tensor, products: Products, grid: Grid) -> Codes:
    """`weight` `[N, K]` on the `grid`, such that its outputs are nearest to what is wanted.

    `products` are of its inputs and of what is left of what is wanted: `[K, K]` and `[K, N]`.
    """
    weight = weight + solved(products, (weight.shape[1],), SOLVE_RIDGE).T
    return grid.by_sums(weight, products.gram)


def _codes(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers / scale).round_().clamp_(LEAST, MOST)


def _passed_on(sums: Tensor) -> Tensor:
    """`[K, K]` upper: its row i over its diagonal is what each later input takes of i's error."""
    lower, failed = torch.linalg.cholesky_ex(sums)
    del sums  # each has as many numbers, and is not needed once the next is there
    if not int(failed):
        inverse = torch.cholesky_inverse(lower)
        del lower
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if int(failed) or not bool(upper.isfinite().all()):
        raise NotSolved("its weights cannot be rounded by what they read: give more --tokens")
    return upper.float()
