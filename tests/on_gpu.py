"""`pytestmark` of tests/gpu. Where there is no GPU at all, conftest.py leaves them out."""

import pytest
import torch

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")]
