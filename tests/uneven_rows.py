"""Rows of `twellctl.firing.synthetic`, of which some fire more than others."""

import torch
from torch import Tensor

from twellctl.firing.synthetic import quantile


def make_uneven(
    x: Tensor, density: float, spread: str, generator: torch.Generator, share: float = 0.05
) -> None:
    """Change rows `x` of weights that fire at `density` so that, by `spread`, all fire alike
    ("even"), one in a hundred six times as much as the mean ("lognormal"), or a `share` of "heavy"
    ones at one half."""
    M, device = len(x), x.device
    if spread == "lognormal":
        exponent = torch.randn(M, generator=generator, device=device, dtype=torch.float64)
        densities = (density * (exponent - 0.5).exp()).clamp(1e-9, 0.999)
        x[:, 0] = (torch.special.ndtri(densities) / quantile(density)).to(x.dtype)
    if spread == "heavy":
        rows = torch.randperm(M, generator=generator, device=device)[: round(M * share)]
        x[rows, 0] = 0
