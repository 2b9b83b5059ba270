"""The end of a step: what is told, what goes on, and how its kernel is launched."""

import numpy as np
import pytest
import torch
from launched import Launches, assert_taken

from twellctl.decoding.engine import Sampling
from twellctl.decoding.sampler import Field, Variant, fields_of
from twellctl.decoding.step_end import Record, StepEnd

CPU = torch.device("cpu")


def fields(*samplings: Sampling) -> torch.Tensor:
    of_rows = np.stack([fields_of(sampling, 7) for sampling in samplings], 1)
    of_rows[Field.POSITION], of_rows[Field.LIMIT] = 5, range(5, 5 + len(samplings))
    return torch.from_numpy(of_rows)


def test_a_step_is_told_and_goes_on():
    record = Record((4, 8), 100)
    logits = torch.zeros(3, 100)
    logits[range(3), [7, 8, 9]] = 1.0
    rows, told = fields(*[Sampling(1, 0)] * 3), torch.zeros(3, record.width, dtype=torch.int32)
    fired = torch.tensor([[0, 1, 2], [8, 6, 4]], dtype=torch.int32)
    StepEnd(record, None, 3, CPU)(logits, fired, rows, told, Variant(logprobs=True))
    assert rows[Field.TOKEN].tolist() == [7, 8, 9]
    assert rows[Field.POSITION].tolist() == [5, 6, 6]  # none goes beyond its limit
    token = record.token(told[1].numpy(), Sampling(1, top_logprobs=2, densities=True))
    assert (token.id, token.densities) == (8, (0.25, 0.75))
    assert token.logprob == pytest.approx(logits[1].log_softmax(-1)[8].item())
    assert len(token.top) == 2
    assert token.top[0] == (8, token.logprob)
    assert record.shares(told.numpy()).sum(0).tolist() == [0.75, 2.25]
    of_a_fit = Record((4, 8), 100, mapped=2)  # of which two always fire
    assert of_a_fit.shares(told.numpy()).tolist() == [[0, 1], [0, 4 / 6], [0, 2 / 6]]


@pytest.mark.parametrize(("B", "V", "blocks"), [(1, 49152, 48), (3, 41, 1), (64, 49155, 16)])
def test_the_kernel_is_launched_as_its_source_says(B, V, blocks):
    kernels, record = Launches(), Record((), V)
    rows, told = fields(*[Sampling(1)] * B), torch.zeros(B, record.width, dtype=torch.int32)
    end = StepEnd(record, kernels, 64, CPU)
    fired = torch.zeros(0, B, dtype=torch.int32)
    end(torch.zeros(B, V, dtype=torch.bfloat16), fired, rows, told, Variant(drawn=True))
    ((name, grid, block, args, _),) = kernels.made
    assert (name, grid, block) == ("choose", (blocks, B), 256)
    assert_taken(name, args)
    assert args[0].dtype == torch.float32


def test_the_kernel_needs_no_graph_of_its_own_for_draws():
    drawn, cut = Variant(drawn=True), Variant(drawn=True, cut=True)
    by_torch, by_kernel = (StepEnd(Record((), 8), k, 1, CPU) for k in (None, Launches()))
    assert by_torch.kind_of(drawn) == drawn
    assert by_kernel.kind_of(drawn) == by_kernel.kind_of(Variant()) == Variant()
    assert by_kernel.kind_of(cut) == Variant(cut=True)
