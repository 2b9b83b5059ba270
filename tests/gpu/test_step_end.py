"""The end of a round by its kernel: the tokens that torch would choose, and the same bits again."""

import numpy as np
import pytest
import torch

from twellctl.bundle.twell_launch import kernels_for
from twellctl.decoding.engine import Sampling
from twellctl.decoding.rounds import NO_TOKEN, NOT_KEPT, inputs_of
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


def ended(
    kernels,
    logits: torch.Tensor,
    variant: Variant,
    drafts: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fields and records after a round that gave `logits` `[B, V]`, or `[B, Q, V]` with drafts; of
    the tokens `ids` alone, if these are given."""
    logits = logits if logits.dim() == 3 else logits[:, None]
    B, Q, V = logits.shape
    record, fields = Record(NEURONS, V), rows_of(B)
    if drafts is not None:  # every fourth row is near its limit
        fields[Field.LIMIT] += Q * (torch.arange(1, B + 1, dtype=torch.int32, device=DEVICE) % 4)
    records = torch.zeros(70, Q, record.width, dtype=torch.int32, device=DEVICE)
    fired = torch.arange(len(NEURONS) * B * Q, dtype=torch.int32, device=DEVICE).view(-1, B, Q)
    end = StepEnd(record, kernels, 70, torch.device(DEVICE), Q)
    end(logits, fired, inputs_of(fields, drafts), fields, records[:B], variant, ids=ids)
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


@pytest.mark.parametrize("V", [4, 1021, 49155])
@pytest.mark.parametrize(("B", "Q"), [(1, 2), (1, 16), (3, 5), (12, 5)])
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_torch_would_keep_of_a_round(kernels, B, Q, V, is_cut):
    """Rows near their limits, and drafts of which 0 to all are what is chosen."""
    torch.manual_seed(B * V * Q)
    logits = (3 * torch.randn(B, Q, V)).to(DEVICE)
    logits[0, Q - 1, V // 2] = float("nan")
    variant = Variant(True, is_cut, True)
    nothing = torch.full((B, Q - 1), -5, device=DEVICE)
    drafts = nothing.clone()
    for place in range(Q - 1):  # what is chosen after those before
        _, records = ended(None, logits, variant, drafts)
        column = torch.where(records[:B, place, 0] < 0, 1, records[:B, place, 0])
        drafts[:, place] = column
    counts = set()
    for wrong in range(Q):
        given = drafts.clone()
        given[:, wrong : wrong + 1] += 1
        fields, records = ended(kernels, logits, variant, given)
        wanted_fields, wanted = ended(None, logits, variant, given)
        assert torch.equal(fields[: Field.SLOT], wanted_fields[: Field.SLOT])
        assert torch.equal(records, wanted)
        assert (fields[Field.SLOT] == 1).all()
        counts |= set((records[:B, :, 0] != NOT_KEPT).sum(1).tolist())
    assert len(counts) > 1


@pytest.mark.parametrize("V", [4, 1021, 32768])
@pytest.mark.parametrize("is_cut", [False, True])
def test_of_some_tokens_what_is_chosen_of_all(kernels, V, is_cut):
    """Those left out have -inf among all; of equal ones the first is taken."""
    torch.manual_seed(V)
    ids = torch.randperm(3 * V)[:V].sort().values.to(DEVICE)
    logits = (3 * torch.randn(8, V)).round().to(DEVICE)
    logits[5, V // 3] = float("nan")
    whole = torch.full((8, 3 * V), -torch.inf, device=DEVICE).index_copy_(1, ids, logits)
    variant, known = Variant(True, is_cut), slice(1 + len(NEURONS))
    wanted_fields, wanted = ended(None, whole, variant)
    for by in (None, kernels):
        fields, records = ended(by, logits, variant, ids=ids.int())
        assert torch.equal(fields[: Field.SLOT], wanted_fields[: Field.SLOT])
        assert torch.equal(records[..., known], wanted[..., known])
    assert {NO_TOKEN} < set(wanted[:8, 0, 0].tolist())


def test_records_go_by_turns(kernels):
    record, fields = Record(NEURONS, 1000), rows_of(3)
    end = StepEnd(record, kernels, 70, torch.device(DEVICE))
    on_host = torch.zeros(2, 70, 1, record.width, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    fired = torch.ones(len(NEURONS), 3, 1, dtype=torch.int32, device=DEVICE)
    assert end.writes_to_host(Variant(True, True))
    for best in (7, 8, 9):
        logits = torch.full((3, 1, 1000), -50.0, device=DEVICE)
        logits[..., best] = 50.0
        end(logits, fired, inputs_of(fields, None), fields, on_host[:, :3], Variant())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert on_host[:, :3, 0, 0].tolist() == [[9] * 3, [8] * 3]
    assert (on_host[:, :3, 0, record.fired] == 1).all()
    assert not on_host[:, 3:].any()


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
        assert records[[0, 4], 0, 0].tolist() == [70, 0]  # greedy ones
    rows = [ended(kernels, row.expand(1, -1), Variant())[1][0, 0, 0].item() for row in logits]
    assert rows == [70, 0, -1, 4999, 0, 2500, -1, 3]
