"""Rows in bf16: drawn, as transformers normalises them, and compared."""

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

EPS = 1e-5


def drawn_rows(*shape: int, device: str, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers times `scale`, the same on any device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.bfloat16().to(device)


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    layer = LlamaRMSNorm(len(weight), eps).to(x.device)
    layer.weight.data = weight
    with torch.no_grad():
        return layer(x)


def close(found: Tensor, wanted: Tensor, steps: float = 1.0, atol: float | None = None) -> None:
    """Within so many roundings of bf16, and of float32 sums of numbers near 1, or `atol`."""
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=steps * 2**-8, atol=atol or 2e-5 * steps
    )
