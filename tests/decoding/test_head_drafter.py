"""Rounds in which a draft head drafts: what it drafts, and that the tokens are the model's own."""

import itertools
from dataclasses import replace

import pytest
import torch
from draft_heads import guessed, random_head
from scheduled import all_of, assert_nothing_is_held, tokens_of

from twellctl.decoding.batch import Batch
from twellctl.decoding.drafted import MOST_DRAFTS
from twellctl.decoding.engine import Sampling
from twellctl.decoding.head_drafter import HeadDrafter
from twellctl.decoding.opening import open_scheduler, open_schedulers
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.sampler import Field
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence
from twellctl.errors import TwellError

SAMPLINGS = {
    "greedy": Sampling(24, 0),
    "drawn": Sampling(24, 0.8, seed=3),
    "cut": Sampling(24, 1.1, top_p=0.9, top_k=50, seed=4, top_logprobs=3),
    "penalised": Sampling(24, 0.7, seed=6, repetition_penalty=1.2, frequency_penalty=0.5),
}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(hidden_act="silu")


def said(scheduler: Scheduler, prompts: list[list[int]], sampling: Sampling) -> list[list]:
    sequences = [Sequence(prompt, sampling) for prompt in prompts]
    found = all_of(scheduler, sequences)
    assert_nothing_is_held(scheduler)
    return [found[sequence] for sequence in sequences]


@pytest.fixture
def drafted(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each round with drafts the fields that it began with, and the drafts."""
    rounds, draft = [], HeadDrafter.draft

    def drafting(self, fields, tables, *how):
        found = draft(self, fields, tables, *how)
        rounds.append((fields.clone(), found.clone()))
        return found

    monkeypatch.setattr(HeadDrafter, "draft", drafting)
    return rounds


@pytest.mark.parametrize(
    ("reads_late", "num_tokens"), [(False, None), (True, 100)], indirect=["reads_late"]
)
@pytest.mark.usefixtures("reads_late")
def test_drafts_are_what_the_head_guesses(model, prompts, drafted, num_tokens):
    """Of every round, those of the first behind a prompt and behind others too."""
    head = random_head(model, num_tokens)
    for prompt in (prompts[0], prompts[3], prompts[4]):
        scheduler = open_scheduler(model, draft=head, drafts=Drafts(MOST_DRAFTS))
        assert checked_drafts(scheduler, head, model, prompt, drafted) > 3


def checked_drafts(scheduler, head, model, prompt, drafted) -> int:
    """How many rounds had the drafts that `head` guesses."""
    drafted.clear()
    text = prompt + tokens_of(said(scheduler, [prompt], Sampling(20, 0))[0])
    checked = 0
    for fields, found in drafted:
        token, position, limit = fields[: Field.LIMIT + 1, 0].tolist()
        if position < len(text) and text[position] == token:
            count = min(found.shape[1], limit - position)
            wanted = guessed(head, model, text[: position + 1], count)
            assert found[0, :count].tolist() == wanted
            checked += 1
    return checked


def test_states_of_a_longer_round_before_are_not_taken(model, prompts, drafted, monkeypatch):
    """They stay behind those of a shorter one, with their positions."""
    counts = itertools.cycle([MOST_DRAFTS, 1, 3, 2])
    monkeypatch.setattr(Pace, "choose", lambda self, *given: Drafts(next(counts)))
    head = random_head(model)
    scheduler = open_scheduler(model, draft=head)
    assert checked_drafts(scheduler, head, model, prompts[0], drafted) > 5
    assert {found.shape[1] for _, found in drafted} == {1, 2, 3, MOST_DRAFTS}


def test_a_rehearsal_changes_no_draft(model, prompts, drafted, monkeypatch):
    """As before each capture of a CUDA graph: a round that is taken back."""
    prepared = Batch._prepared

    def rehearsed(self, *key):
        run = prepared(self, *key)
        return lambda: (self._rehearse(run), run())

    head = random_head(model)
    scheduler = open_scheduler(model, draft=head, drafts=Drafts(3))
    known = said(scheduler, [prompts[0]], Sampling(12, 0))
    drafts = [found for _, found in drafted]
    drafted.clear()
    monkeypatch.setattr(Batch, "_prepared", rehearsed)
    scheduler = open_scheduler(model, draft=head, drafts=Drafts(3))
    assert said(scheduler, [prompts[0]], Sampling(12, 0)) == known
    found = [found for _, found in drafted]
    for first_of in (0, 1):
        assert len(found[first_of::2]) == len(drafts)
        assert all(map(torch.equal, drafts, found[first_of::2]))


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_are_those_of_the_model_alone(model, prompts, kind):
    sampling = SAMPLINGS[kind]
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(3)]
    each = [replace(sampling, seed=seed) for seed in seeds]
    known = [
        said(open_scheduler(model, stable=True), [prompt], how)[0]
        for prompt, how in zip(prompts, each, strict=False)
    ]
    scheduler = open_scheduler(model, draft=random_head(model))
    for prompt, how, wanted in zip(prompts, each, known, strict=False):
        assert said(scheduler, [prompt], how)[0] == wanted
    sequences = [Sequence(prompt, how) for prompt, how in zip(prompts, each, strict=False)]
    found = all_of(scheduler, sequences)
    assert [found[sequence] for sequence in sequences] == known
    assert scheduler.tally.drafted.read["head"]


def test_a_head_drafts_for_one_sequence_and_is_not_served_alone(model, prompts):
    head = random_head(model)
    made = open_schedulers(model, draft=head, drafts=Drafts(3), draft_alone=True)
    assert len(made) == 1
    run, passes = made[0].decoder.run, []
    made[0].decoder.run = lambda tokens, *given, **how: (
        passes.append(tuple(tokens.shape)) or run(tokens, *given, **how)
    )
    said(made[0], [prompts[3]] * 2, Sampling(12, 0))
    assert {Q for B, Q in passes if B > 1} == {1}
    said(made[0], [prompts[3]], Sampling(12, 0))
    assert (1, 4) in passes


def test_what_lies_behind_a_row_in_the_cache_is_nobodys(model, prompts, drafted):
    """NaN there changes no draft."""
    scheduler = open_scheduler(model, draft=random_head(model), drafts=Drafts(3))
    known = said(scheduler, [prompts[0]], Sampling(12, 0))
    first = [found for _, found in drafted]
    drafted.clear()
    cache = scheduler.decoder._cache
    with torch.inference_mode():
        for pages in (*cache.keys, *cache.values):
            pages.fill_(torch.nan)
    assert said(scheduler, [prompts[0]], Sampling(12, 0)) == known
    assert all(map(torch.equal, first, [found for _, found in drafted]))


def test_a_model_without_pages_takes_no_head(tiny):
    with pytest.raises(TwellError, match="exact answers need a cache in pages"):
        open_scheduler(tiny("falcon_h1", hidden_act="silu"), draft=random_head(tiny()))
