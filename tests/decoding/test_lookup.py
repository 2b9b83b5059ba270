"""Drafts of what the text repeats: against a search by hand, and in rounds."""

import random

import pytest
import torch
from exact_pairs import like_a_fit
from history_decoder import HistoryDecoder
from scheduled import all_of, assert_nothing_is_held, tokens_of

from twellctl.decoding.engine import Sampling
from twellctl.decoding.lookup import LookupDrafter, Repeats
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.pages import PAGE, PagePool
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence

LOOKUP = 1  # the second drafter of an exact engine


def told_by_hand(text: list[int], count: int) -> list[int]:
    """What follows the last place where as many as 4 to 2 of the last tokens stood before."""
    for length in (4, 3, 2):
        for end in range(len(text) - 2, length - 2, -1):
            if len(text) > length and text[end - length + 1 : end + 1] == text[-length:]:
                goes_on = list(text)
                for i in range(count):
                    goes_on.append(goes_on[end + 1 + i])
                return goes_on[-count:]
    return [text[-1]] * count


def fields_of_rows(texts: list[list[int]]) -> torch.Tensor:
    fields = torch.zeros(len(Field), len(texts), dtype=torch.int32)
    fields[Field.TOKEN] = torch.tensor([text[-1] for text in texts])
    fields[Field.POSITION] = torch.tensor([len(text) - 1 for text in texts])
    return fields


def test_drafts_are_those_of_a_search_by_hand():
    draw = random.Random(0)
    tables = torch.zeros(6, 2, dtype=torch.int32)
    for _ in range(60):
        texts = [
            [draw.randrange(draw.choice([2, 3, 9])) for _ in range(draw.randint(1, 2 * PAGE))]
            for _ in range(6)
        ]
        drafter = LookupDrafter(8, 300, torch.device("cpu"))
        drafter.follow(torch.full((8, 300), 1).int(), torch.arange(300).expand(8, 300))  # garbage
        drafter.load(texts)
        found = drafter.draft(fields_of_rows(texts), tables, 5, Variant(), None)
        assert found.tolist() == [told_by_hand(text, 5) for text in texts]


def test_rows_that_stay_follow_what_is_read():
    drafter, tables = LookupDrafter(2, 300, torch.device("cpu")), torch.zeros(2, 2).int()
    text, other = [1, 2, 3, 4, 5], [7]
    drafter.load([other, text])
    read = torch.tensor([[9, 9], [5, 1]]), torch.tensor([[-1, 0], [4, 5]])
    drafter.follow(*(part.int() for part in read))
    text += [1, 2]  # 2 comes with the next round
    drafter.load([[8, 8], text])
    assert drafter.draft(fields_of_rows([[8, 8], text]), tables, 3, Variant(), None).tolist() == [
        [8, 8, 8],
        [3, 4, 5],
    ]


def test_the_host_knows_what_a_text_repeats():
    """By three tokens."""
    draw = random.Random(0)
    text = [draw.randrange(3) for _ in range(200)]
    repeats, told = Repeats(text[:40]), []
    for at in range(40, 200):
        before = [i for i in range(3, at) if text[i - 3 : i] == text[at - 3 : at]]
        told.append(bool(before) and text[before[-1]] == text[at])
        assert repeats.add(text[at]) == told[-1]
    assert 30 < sum(told) < 130


@pytest.mark.usefixtures("reads_late")
@pytest.mark.parametrize("num_pages", [9, 40])
def test_whatever_is_looked_up_tokens_are_right(num_pages):
    """In rows that come, go and move."""
    draw = random.Random(1)
    decoder = HistoryDecoder(num_pages)
    drafter = LookupDrafter(4, decoder.context, decoder.device)
    scheduler = Scheduler(decoder, PagePool(num_pages), 4, frozenset(), [drafter], Drafts(5))
    plain = Scheduler(HistoryDecoder(40), PagePool(40), 4, frozenset())
    prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 120))] for _ in range(12)]
    how = [Sampling(draw.randint(1, 60), 0) for _ in prompts]
    found = [
        list(
            all_of(engine, [Sequence(*given) for given in zip(prompts, how, strict=True)]).values()
        )
        for engine in (scheduler, plain)
    ]
    assert list(map(tokens_of, found[0])) == list(map(tokens_of, found[1]))
    assert_nothing_is_held(scheduler)


def test_a_model_that_repeats_itself_is_followed(tiny):
    model = tiny(hidden_act="silu")
    for layer in model.model.layers:  # each token says by itself which one is next
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    known = all_of(open_scheduler(model, stable=True), [Sequence([5], Sampling(150, 0))])
    for drafts in (Drafts(7, LOOKUP), None):
        scheduler = open_scheduler(model, draft=like_a_fit(model), drafts=drafts)
        found = all_of(scheduler, [Sequence([5], Sampling(150, 0))])
        assert list(found.values()) == list(known.values())
        assert drafts is None or scheduler.tally.drafted.passes < 80
