"""Least squares over more tokens than memory holds features of: sums of products, then Cholesky.

With features `f` `[P, T]` of all tokens, wanted outputs `y` `[K, T]` and weights `w0` `[K, P]` to
begin from, what is solved is

    (sum f f' + ridge) change = sum f (y - w0 f)'

so that the ridge holds the solution to `w0`, and not to zero. Products are summed in float32 (of
TF32 on a GPU, which rounds `f` alike on both sides: still sums of squares), and solved in float64.
"""

import torch
from torch import Tensor

from twellctl.errors import TwellError
from twellctl.here.processes import same_in_all, sum_over_processes

MOST_RIDGE = 1.0
BLOCKS = 8  # of columns of a symmetric product; what is above the diagonal is left out
COMPUTED = (1 + 1 / BLOCKS) / 2  # the share of it that is computed


class NotSolved(TwellError):
    """A layer's equations have no solution, whatever the ridge."""


class Products:
    """The sums over tokens: `gram` `[P, P]` and `right` `[P, K]`, of weighted tokens.

    `gram` has its upper half from `over_processes` on.
    """

    def __init__(self, num_features: int, num_outputs: int, device: torch.device):
        self.gram = torch.zeros(num_features, num_features, device=device)
        self.right = torch.zeros(num_features, num_outputs, device=device)

    def add(self, features: Tensor, rest: Tensor) -> None:
        """Of tokens `[P, T]` and `[K, T]`, each already times the root of its weight."""
        with tf32():
            width = -(-len(self.gram) // BLOCKS)
            for first in range(0, len(self.gram), width):
                some = features[first : first + width]
                self.gram[first:, first : first + width].addmm_(features[first:], some.T)
            self.right.addmm_(features, rest.T)

    def over_processes(self) -> None:
        """Make them the sums over the tokens of all processes."""
        self.gram.tril_()
        sum_over_processes(self.gram, self.right)
        self.gram += self.gram.tril(-1).T

    def through(self, last: Tensor) -> "Products":
        """Those of other features: the last ones `z` `[T, Z]` became `last @ z` `[T, R]`."""
        kept = len(self.gram) - last.shape[1]
        made = object.__new__(Products)
        right = self.gram[:kept, kept:] @ last.T
        corner = last @ self.gram[kept:, kept:] @ last.T
        top = torch.cat([self.gram[:kept, :kept], right], 1)
        made.gram = torch.cat([top, torch.cat([right.T, corner], 1)])
        made.right = torch.cat([self.right[:kept], last @ self.right[kept:]])
        return made


def solved(products: Products, blocks: tuple[int, ...], ridge: float) -> Tensor:
    """The change `[P, K]`. The ridge of each block of features is that share of its mean square.

    `blocks` are the sizes of the blocks. Features that are all zero change nothing. `NotSolved`
    names the ridge that would do.
    """
    if not (products.gram.isfinite().all() and products.right.isfinite().all()):
        raise NotSolved(
            "what it reads or gives is not finite: its weights are damaged, or too large"
        )
    change = _solved(products, blocks, ridge)
    if change is not None:
        return same_in_all(change)
    while (ridge := ridge * 10) <= MOST_RIDGE:
        if _solved(products, blocks, ridge) is not None:
            raise NotSolved(f"its least squares have no solution: --ridge {ridge:g} would do")
    raise NotSolved(f"its least squares have no solution, even with --ridge {MOST_RIDGE:g}")


def with_ridge(gram: Tensor, blocks: tuple[int, ...], ridge: float) -> Tensor:
    """float64 `[P, P]`: `gram` with that share of the mean of each block added to its diagonal."""
    gram = gram.to(torch.float64, copy=True)
    diagonal = gram.diagonal()
    means = torch.stack([part.mean() for part in diagonal.split(blocks)])
    means[means == 0] = 1.0
    diagonal.add_(ridge * means.repeat_interleave(torch.tensor(blocks, device=means.device)))
    return gram


def _solved(products: Products, blocks: tuple[int, ...], ridge: float) -> Tensor | None:
    gram = with_ridge(products.gram, blocks, ridge)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    change = torch.cholesky_solve(products.right.double(), factor).float()
    return change if bool(change.isfinite().all()) else None


class tf32:
    """Products of float32 as TF32 inside, on GPUs that have it."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *failure: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before
