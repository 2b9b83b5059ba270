"""The end of a step by its kernel: the tokens that torch would choose, and the same bits again."""

import numpy as np
import pytest
import torch

from twellctl.bundle.twell_launch import kernels_for
from twellctl.decoding.engine import Sampling
from twellctl.decoding.sampler import Field, Variant, fields_of
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.here.own_kernels import own_kernels

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SAMPLINGS = [Sampling(1, 0), Sampling(1, 0.7), Sampling(1, 1.3, seed=1), Sampling(1, 0.9, 0.8, 50)]
NEURONS = (64, 96, 100)


@pytest.fixture(scope="module")
def kernels():
    return kernels_for(own_kernels(), 0) if DEVICE == "cuda" else None


def rows_of(B: int) -> torch.Tensor:
    """Fields of B rows out of 70, greedy and drawn ones by turns."""
    rows = np.zeros((len(Field), 70), np.int32)
    for row in range(B):
        rows[:, row] = fields_of(SAMPLINGS[row % len(SAMPLINGS)], 1000 * row + (row << 40))
        rows[Field.POSITION, row], rows[Field.LIMIT, row] = 100 + row, 100 + row + row % 2
    return torch.from_numpy(rows).to(DEVICE)[:, :B]


def ended(kernels, logits: torch.Tensor, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    """Fields and records after a step that gave `logits`."""
    B, V = logits.shape
    record, fields = Record(NEURONS, V), rows_of(B)
    records = torch.zeros(70, record.width, dtype=torch.int32, device=DEVICE)
    fired = torch.arange(len(NEURONS) * B, dtype=torch.int32, device=DEVICE).view(-1, B)
    end = StepEnd(record, kernels, 70, torch.device(DEVICE))
    end(logits, fired, fields, records[:B], variant)
    assert not end._best.any()
    assert not end._tickets.any()
    return fields, records


@pytest.mark.parametrize("V", [4, 1000, 1021, 4096, 49155, 128256])
@pytest.mark.parametrize("B", [1, 3, 64])
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_torch_would_choose(kernels, B, V, is_cut):
    torch.manual_seed(B * V)
    logits = (3 * torch.randn(B, V)).to(DEVICE)
    variant = Variant(True, is_cut, True)
    fields, records = ended(kernels, logits, variant)
    wanted_fields, wanted = ended(None, logits, variant)
    assert torch.equal(fields[: Field.SLOT], wanted_fields[: Field.SLOT])
    assert torch.equal(records, wanted)
    for _ in range(3):
        assert torch.equal(ended(kernels, logits, variant)[1], records)


def test_records_go_by_turns(kernels):
    record, fields = Record(NEURONS, 1000), rows_of(3)
    end = StepEnd(record, kernels, 70, torch.device(DEVICE))
    records = torch.zeros(2, 70, record.width, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    fired = torch.ones(len(NEURONS), 3, dtype=torch.int32, device=DEVICE)
    assert end.tells_host(Variant(True, True))
    for best in (7, 8, 9):
        logits = torch.full((3, 1000), -50.0, device=DEVICE)
        logits[:, best] = 50.0
        end(logits, fired, fields, records[:, :3], Variant())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert records[:, :3, 0].tolist() == [[9] * 3, [8] * 3]
    assert (records[:, :3, record.fired] == 1).all()
    assert not records[:, 3:].any()


def test_of_several_the_first_and_nan_before_all(kernels):
    nan, inf = float("nan"), float("inf")
    logits = torch.zeros(8, 5000)
    logits[0, [70, 4000]] = 1.0
    logits[1, 0] = -0.0
    logits[2, [33, 4999]] = nan
    logits[2, 7] = inf
    logits[3, 4999] = inf
    logits[4] = -inf
    logits[5] = -1e30
    logits[5, 2500:] = -1e29
    logits[6, 3], logits[7, 3] = -nan, 1e-40
    logits = logits.to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        _, records = ended(kernels, logits.to(dtype), Variant())
        assert records[[0, 4], 0].tolist() == [70, 0]  # greedy ones
    rows = [ended(kernels, row.expand(1, -1), Variant())[1][0, 0].item() for row in logits]
    assert rows == [70, 0, -1, 4999, 0, 2500, -1, 3]
