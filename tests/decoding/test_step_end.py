"""What a round reads, and the end of it: which tokens are kept, and how they are chosen."""

import numpy as np
import pytest
import torch
from history_decoder import HistoryDecoder

from twellctl.decoding.batch import Batch
from twellctl.decoding.engine import Sampling
from twellctl.decoding.rounds import NO_TOKEN, NOT_KEPT, inputs_of
from twellctl.decoding.sampler import Field, Variant, fields_of, variant_of
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.weighing import Penalised, Weights

CPU = torch.device("cpu")


def rows_of(samplings: list[Sampling], positions: list[int], limits: list[int]) -> torch.Tensor:
    fields = np.stack([fields_of(sampling, 7 + i) for i, sampling in enumerate(samplings)], 1)
    fields[Field.TOKEN] = range(10, 10 + len(samplings))
    fields[Field.POSITION], fields[Field.LIMIT] = positions, limits
    return torch.from_numpy(fields)


def test_no_row_reads_beyond_its_limit():
    fields = rows_of([Sampling(1, 0)] * 3, [5, 5, 5], [5, 6, 99])
    tokens, positions = inputs_of(fields, torch.tensor([[1, 2], [3, 4], [6, 7]]))
    assert positions.tolist() == [[-1, -1, 5], [-1, 5, 6], [5, 6, 7]]
    assert [row[(at >= 0)].tolist() for row, at in zip(tokens, positions, strict=True)] == [
        [10],
        [11, 3],
        [12, 6, 7],
    ]


def test_tokens_are_kept_as_long_as_drafts_were_chosen():
    record, fields = Record((4,), 8), rows_of([Sampling(1, 0)] * 5, [5] * 5, [99, 99, 99, 6, 99])
    drafts = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2], [1, 2]])
    chosen = torch.tensor([[1, 2, 3], [1, 5, 3], [4, 2, 3], [7, 1, 3], [1, 2, 6]])
    logits = torch.nn.functional.one_hot(chosen, 8).float()
    logits[4, 1, 2] = torch.nan
    fired = torch.arange(15).view(1, 5, 3).int()
    records = torch.zeros(5, 3, record.width, dtype=torch.int32)
    inputs = inputs_of(fields, drafts)
    StepEnd(record, None, 5, CPU, 3)(logits, fired, inputs, fields, records, Variant())
    assert records[..., 0].tolist() == [
        [1, 2, 3], [1, 5, NOT_KEPT], [4, NOT_KEPT, NOT_KEPT],
        [NOT_KEPT, 1, 3], [1, NO_TOKEN, NOT_KEPT],
    ]  # fmt: skip
    assert fields[Field.TOKEN].tolist() == [3, 5, 4, 3, 2]
    assert fields[Field.POSITION].tolist() == [8, 7, 6, 6, 7]
    assert records[..., 1].tolist() == fired[0].tolist()


@pytest.mark.parametrize("cut", [1.0, 0.8])
def test_a_round_chooses_as_steps_do(cut):
    """Drawn tokens, with penalties, are those of one step after the other."""
    torch.manual_seed(0)
    how = Sampling(9, 0.9, cut, repetition_penalty=1.4, frequency_penalty=0.3, seed=5)
    variant = Variant(True, cut < 1, True, True)
    B, Q, V = 6, 4, 50
    logits, record = torch.randn(B, Q, V), Record((), V)
    positions, limits = [9] * B, [99, 99, 99, 99, 10, 99]
    fired = torch.zeros(0, B, Q)

    def opened() -> tuple[torch.Tensor, Weights]:
        weights = Weights.of(B, V, CPU)
        weights.load([Penalised([1, 2, 10 + row], 2, ()) for row in range(B)])
        return rows_of([how] * B, positions, limits), weights

    def step(fields: torch.Tensor, weights: Weights, of_rows: torch.Tensor) -> torch.Tensor:
        records = torch.zeros(B, 1, record.width, dtype=torch.int32)
        inputs = inputs_of(fields, None)
        StepEnd(record, None, B, CPU)(
            of_rows, fired[..., :1], inputs, fields, records, variant, weights
        )
        return records[:, 0]

    fields, weights = opened()
    steps = torch.stack([step(fields, weights, logits[:, j : j + 1]) for j in range(Q)], 1)
    drafts = steps[:, : Q - 1, 0].clone()
    drafts[1, 0] += 1
    drafts[2, 2] -= 1
    many, counted = opened()
    inputs = inputs_of(many, drafts)
    shifted = logits.clone()
    shifted[4, 2:] = logits[4, :2]  # a row near its limit reads two tokens
    records = torch.zeros(B, Q, record.width, dtype=torch.int32)
    StepEnd(record, None, B, CPU, Q)(shifted, fired, inputs, many, records, variant, counted)
    num_kept = (records[..., 0] != NOT_KEPT).sum(1).tolist()
    assert num_kept == [4, 1, 3, 4, 2, 4]
    for row, count in enumerate(num_kept):
        kept = records[row][records[row, :, 0] != NOT_KEPT]
        assert torch.equal(kept, steps[row, :count])
        wanted = torch.zeros(V, dtype=torch.int32)
        wanted[10 + row] = 1
        for token in steps[row, :count, 0].tolist():
            wanted[token] += 1
        assert torch.equal(counted.written[row], wanted)


@torch.inference_mode()
def test_rows_with_penalties_that_were_not_loaded_are_refused():
    """As if they had none, their tokens would be wrong."""
    batch, sampling = Batch(HistoryDecoder(), 1, 1), Sampling(5, 0, frequency_penalty=1.0)
    batch.put([0], [fields_of(sampling, 0)], [[1]])
    with pytest.raises(ValueError, match="no row was loaded with penalties"):
        batch.launch(1, variant_of(sampling))
    with pytest.raises(ValueError, match="no row was loaded with penalties"):
        batch.allow({0: b"\xff" * 27})
