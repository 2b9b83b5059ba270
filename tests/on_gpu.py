"""`pytestmark` and draws of tests/gpu. Where there is no GPU conftest.py leaves them out."""

import pytest
import torch
from torch import Tensor

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")]


def whole(*shape: int, most: int = 1) -> Tensor:
    """Whole numbers of -most to most, bf16."""
    return torch.randint(-most, most + 1, shape, device="cuda").bfloat16()
