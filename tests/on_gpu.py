"""Marks and draws of tests/gpu. Where there is no GPU conftest.py leaves these tests out."""

import pytest
import torch
from torch import Tensor

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
on_hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="no Hopper GPU")
on_e4m3 = pytest.mark.skipif(
    CAPABILITY < (8, 9), reason="FP8 products need compute capability 8.9 or newer"
)
HOPPER = [pytest.mark.gpu, on_hopper]


def whole(*shape: int, most: int = 1) -> Tensor:
    """Whole numbers of -most to most, bf16."""
    return torch.randint(-most, most + 1, shape, device="cuda").bfloat16()


def prompts_of(*lengths: int) -> list[list[int]]:
    """Drawn token ids below 1000, the same each time."""
    torch.manual_seed(1)
    return [torch.randint(1, 1000, (length,)).tolist() for length in lengths]
