"""How drafts are chosen out of what is guessed: of some tokens as of all."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from played_kernels import Kernels
from torch import Tensor

from twellctl.decoding.draft_end import DraftEnd
from twellctl.decoding.engine import Sampling
from twellctl.decoding.sampler import Field, fields_of, variant_of
from twellctl.decoding.weighing import Penalised, Weights

CPU = torch.device("cpu")
VOCAB, COUNT = 300, 7
SAMPLINGS = {
    "greedy": Sampling(9, 0),
    "drawn": Sampling(9, 0.8),
    "cut": Sampling(9, 1.1, top_p=0.9, top_k=20),
    "at least": Sampling(9, 1.3, min_p=0.3),
    "with chances": Sampling(9, 0.8, top_logprobs=3),
    "penalised": Sampling(9, 0.7, repetition_penalty=1.3, frequency_penalty=0.9),
    "penalised and cut": Sampling(9, 0.7, top_k=9, presence_penalty=2.0),
}


def row_of(sampling: Sampling) -> Tensor:
    """Fields of one row, near its limit."""
    fields = torch.from_numpy(np.stack([fields_of(sampling, 5)], 1))
    fields[Field.TOKEN], fields[Field.POSITION], fields[Field.LIMIT] = 9, 20, 25
    return fields


@pytest.mark.parametrize("kernels", [None, Kernels()], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_drafts_out_of_some_tokens_are_those_out_of_all(kind, kernels):
    """The others have -inf among all. Some logits are equal, and NaN is no draft."""
    sampling = SAMPLINGS[kind]
    variant, weights = variant_of(sampling), None
    torch.manual_seed(0)
    ids = torch.randperm(VOCAB)[:80].sort().values
    logits = (2 * torch.randn(COUNT, 1, 1, len(ids))).round()
    logits[4, 0, 0, 33] = torch.nan
    whole = torch.full((COUNT, 1, 1, VOCAB), -torch.inf).index_copy_(3, ids, logits)
    if variant.weighed:
        weights = Weights.of(1, VOCAB, CPU)
        weights.load([Penalised([1, *ids[:30].tolist()], 9, ())])
    decoder = SimpleNamespace(kernels=kernels, vocab_size=VOCAB, device=CPU)
    fields, read, drafts = row_of(sampling), [], []
    known = fields.clone(), None if weights is None else weights.written.clone()
    for end, guesses in ((DraftEnd(decoder, ids=ids.int()), logits), (DraftEnd(decoder), whole)):

        def guess(number: int, inputs: tuple[Tensor, Tensor], guesses=guesses):
            read.append(torch.cat(inputs, 1)[0].tolist())
            return guesses[number], torch.zeros(0, 1, 1, dtype=torch.int32)

        drafts.append(end.drafts(fields, COUNT, variant, weights, guess)[0].tolist())
        assert torch.equal(fields, known[0])
        assert weights is None or torch.equal(weights.written, known[1])
    assert drafts[0] == drafts[1]
    assert read[:COUNT] == read[COUNT:]
    assert [token for token, _ in read[1:COUNT]] == [*drafts[0][:4], int(ids[33]), drafts[0][5]]
    assert [position for _, position in read[:COUNT]] == [20, 21, 22, 23, 24, 25, 25]
    assert {*drafts[0][:4], *drafts[0][5:]} <= {*ids.tolist()}
    assert drafts[0][4] == 0
