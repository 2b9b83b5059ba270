"""What fires, the packed form by hand, and what config.json may say of it."""

import pytest
import torch
from packed import pack

from twellctl.bundle.twell_config import check_twell, new_twell
from twellctl.bundle.twell_format import fires, keep_fired

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_entries_by_hand():
    gate = torch.tensor([[1.0, -1.0, 0.5, 0.0, 2.0, -0.0], [torch.nan, 1, 1, 1, 1, 0]])
    packed = pack(gate.bfloat16(), tile=4, slots=3)
    assert packed.counts.tolist() == [[2, 1], [4, 1]]
    assert packed.entries[0].tolist() == [[0x3F80_0000, 0x3F00_0002, 0], [0x4000_0004, 0, 0]]
    assert packed.overflowed.tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_fires(dtype):
    least = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    gate = torch.tensor([[least, torch.inf, torch.nan, 0.0, -0.0, -least, -torch.inf]], dtype=dtype)
    assert fires(gate).tolist() == [[True, True, True, False, False, False, False]]
    assert not keep_fired(gate)[:, 3:].signbit().any()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format_version": 2}, "format_version 2"),
        ({"slots": [64]}, "2 slots"),
        ({"thresholds": [0.0, 0.0]}, "plain ReLU: fine-tune again from the SiLU model"),
        ({"tile": 0}, "a tile of 1 to 65536, got 0"),
        ({"tile": True}, "got True"),
        ({"slots": [64, 257]}, "slots of 1 to 256"),
        ({"slots": [64, 1.0]}, "got 1.0"),
    ],
)
def test_check_twell(change, sentence):
    twell = new_twell(2, "model", "silu")
    assert check_twell(twell, 2) is twell
    with pytest.raises(ValueError, match=sentence):
        check_twell(twell | change, 2)
