"""Which logits are wanted of a decoder: exact ones, but of greedy rows and of drafts."""

import pytest
import torch
from history_decoder import HistoryDecoder, expected
from scheduled import all_of, tokens_of

from twellctl.decoding.decoder import Wanted
from twellctl.decoding.drafting import ModelDrafter
from twellctl.decoding.engine import Sampling
from twellctl.decoding.pages import PagePool
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence


class Asked(HistoryDecoder):
    """Keeps what is wanted of passes with one token a row."""

    def __init__(self, most_rough: int):
        super().__init__()
        self.most_rough, self.wanted = most_rough, set()

    def run(self, tokens, *inputs, wanted=Wanted.EXACT, **how):
        if tokens.shape[1] == 1:
            self.wanted.add(wanted)
        return super().run(tokens, *inputs, **how)


@pytest.mark.parametrize(
    ("sampling", "rows", "most_rough", "wanted"),
    [
        ({}, 1, 1, Wanted.CHOICE),
        ({}, 2, 2, Wanted.CHOICE),
        ({}, 2, 1, Wanted.EXACT),
        ({}, 1, 0, Wanted.EXACT),
        ({"temperature": 0.7}, 1, 1, Wanted.EXACT),
        ({"temperature": 0.7, "top_k": 3}, 1, 1, Wanted.EXACT),
        ({"top_logprobs": 0}, 1, 1, Wanted.EXACT),
        ({"repetition_penalty": 1.2}, 1, 1, Wanted.EXACT),
    ],
)
def test_who_wants_which(sampling, rows, most_rough, wanted):
    decoder = Asked(most_rough)
    scheduler = Scheduler(decoder, PagePool(40), rows, frozenset())
    sequences = [
        Sequence([3, i], Sampling(9, **({"temperature": 0} | sampling))) for i in range(rows)
    ]
    events = all_of(scheduler, sequences)
    assert decoder.wanted == {wanted}
    if not sampling:
        assert all(tokens_of(events[s]) == expected(s.tokens[:2], 9) for s in sequences)


def test_rows_that_are_drawn_do_not_share_what_greedy_ones_run():
    decoder = Asked(1)
    scheduler = Scheduler(decoder, PagePool(40), 1, frozenset())
    for temperature, wanted in ((0, Wanted.CHOICE), (1, Wanted.EXACT), (0, Wanted.CHOICE)):
        decoder.wanted.clear()
        all_of(scheduler, [Sequence([3, 1], Sampling(9, temperature))])
        assert decoder.wanted == {wanted}


@pytest.mark.parametrize("variant", [Variant(), Variant(drawn=True, cut=True)])
def test_drafts_are_rough(variant):
    decoder = Asked(1)
    fields, tables = torch.zeros(len(Field), 1, dtype=torch.int32), torch.ones(1, 1).int()
    fields[Field.LIMIT] = 99
    drafts = ModelDrafter(decoder).draft(fields, tables, 3, variant, None)
    assert drafts.shape == (1, 3)
    assert decoder.wanted == {Wanted.ROUGH}
