"""Rounds in which a second model drafts: the tokens are those of the model alone, every one."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from compiled import EVERY_CASE
from exact_pairs import like_a_fit
from scheduled import all_of, assert_nothing_is_held

from twellctl.decoding.drafted import MOST_DRAFTS
from twellctl.decoding.engine import Sampling, Token
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence
from twellctl.errors import TwellError

BOTH = (False, True)  # whether rounds are read late
late_or_not = pytest.mark.usefixtures("reads_late")
PAGE_BYTES = 64 * 2 * (8 + 8) * 4  # of one layer, two heads of 8, float32
SAMPLINGS = {
    "greedy": Sampling(12, 0),
    "with log-probabilities": Sampling(12, 0, top_logprobs=5),
    "drawn": Sampling(12, 0.8, seed=3),
    "cut": Sampling(12, 1.1, top_p=0.9, top_k=50, seed=4, top_logprobs=0),
    "above a share": Sampling(12, 1.0, min_p=0.05, seed=5),
    "penalised": Sampling(12, 0.7, seed=6, repetition_penalty=1.2, frequency_penalty=0.5),
    "biased": Sampling(12, 0, presence_penalty=0.4, logit_bias=((7, 2.0), (9, -100.0))),
}


@pytest.fixture(scope="module")
def pair(tiny):
    """A SiLU model of one layer, and one that drafts for it: about half of what it drafts is kept.

    Those of `test_families_with_windows` have two layers.
    """
    model = tiny(hidden_act="silu", num_hidden_layers=1)
    return model, like_a_fit(model)


def told(
    scheduler: Scheduler, prompts: list[list[int]], sampling: Sampling, *, together: bool = True
) -> list[list]:
    """What came of each prompt, each with a seed of its own."""
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(len(prompts))]
    sequences = [
        Sequence(prompt, replace(sampling, seed=seed))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    found: dict[Sequence, list] = {}
    for some in [sequences] if together else [[sequence] for sequence in sequences]:
        found |= all_of(scheduler, some)
        assert_nothing_is_held(scheduler)
    return [found[sequence] for sequence in sequences]


@pytest.fixture(scope="module")
def of_the_original(pair, prompts):
    """What it says by itself, stably, of each kind of sampling to one of three prompts."""
    scheduler = open_scheduler(pair[0], stable=True)
    asked = list(zip(SAMPLINGS.values(), itertools.cycle(prompts[:3]), strict=False))
    return asked, [told(scheduler, [prompt], sampling)[0] for sampling, prompt in asked]


@pytest.mark.parametrize("drafts", [2, MOST_DRAFTS])
@late_or_not
def test_tokens_are_those_of_the_model_alone(pair, of_the_original, drafts):
    """With all that they come with, to the last bit: of each by itself, and of all kinds at once,
    more than run together."""
    (model, draft), (asked, known) = pair, of_the_original
    scheduler = open_scheduler(model, draft=draft, drafts=Drafts(drafts), max_running=5)
    for (sampling, prompt), tokens in zip(asked, known, strict=True):
        assert told(scheduler, [prompt], sampling) == [tokens]
    sequences = [Sequence(prompt, sampling) for sampling, prompt in asked]
    found = all_of(scheduler, sequences)
    assert_nothing_is_held(scheduler)
    assert [found[sequence] for sequence in sequences] == known
    assert 0.1 < scheduler.tally.drafted.num_kept / scheduler.tally.drafted.num_read < 0.95
    assert scheduler.tally.drafted.passes < scheduler.reports.generated_tokens


def test_the_model_drafts_for_one_sequence_alone(pair, prompts):
    model, draft = pair
    scheduler = open_scheduler(model, draft=draft, drafts=Drafts(3))
    run, rows = scheduler.decoder.run, []
    scheduler.decoder.run = lambda tokens, *inputs, **how: (
        rows.append(tuple(tokens.shape)) or run(tokens, *inputs, **how)
    )
    told(scheduler, [prompts[3]] * 3, Sampling(20, 0))
    assert (4, 1) in rows  # three rows, and one that fills up
    assert {Q for B, Q in rows if B > 1} == {1}
    told(scheduler, prompts[3:4], Sampling(20, 0))
    assert (1, 4) in rows


def test_who_is_beside_changes_nothing(pair, prompts):
    model, draft = pair
    prompts = [*prompts[:2], prompts[3]]
    for sampling in (SAMPLINGS["greedy"], replace(SAMPLINGS["cut"], top_logprobs=20)):
        alone = [told(open_scheduler(model, stable=True), [p], sampling)[0] for p in prompts]
        for most, first in ((2, 0), (4, 1), (3, 2)):
            scheduler = open_scheduler(model, draft=draft, drafts=Drafts(3), max_running=most)
            assert told(scheduler, [prompts[first], *prompts], sampling)[0] == alone[first]


def test_long_prompts_are_read_in_the_same_chunks(pair, monkeypatch):
    monkeypatch.setattr("twellctl.decoding.torch_decoder.TorchDecoder.prefill_chunk", 50)
    model, draft = pair
    torch.manual_seed(2)
    prompts = [torch.randint(1, 512, (length,)).tolist() for length in (180, 51, 101, 7, 50)]
    sampling = Sampling(30, 0, top_logprobs=2)
    known = [told(open_scheduler(model, stable=True), [prompt], sampling)[0] for prompt in prompts]
    assert told(open_scheduler(model, draft=draft, drafts=Drafts(5)), prompts, sampling) == known


@pytest.mark.parametrize(
    ("drafts", "reads_late"),
    [(drafts, late) for drafts in (0, 3) for late in BOTH if EVERY_CASE or drafts or late],
    indirect=["reads_late"],
)
@late_or_not
def test_what_was_evicted_goes_on_with_the_same_bits(pair, prompts, drafts):
    model, draft = pair
    sampling = Sampling(70, 0.8, seed=1, top_logprobs=3)
    some = [prompts[i] for i in (0, 3, 4)]
    known = told(open_scheduler(model, stable=True), some, sampling)
    how = {
        "draft": draft,
        "drafts": Drafts(drafts),
        "cache_bytes": 6 * PAGE_BYTES,
        "max_running": 5,
    }
    scheduler = open_scheduler(model, **how)
    calls, run = [], scheduler.decoder.run
    scheduler.decoder.run = lambda *inputs, **how: calls.append(how["last"]) or run(*inputs, **how)
    assert told(scheduler, some, sampling) == known
    assert 8 in calls  # one was evicted, and read again


@late_or_not
@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_and_goes(pair, seed):
    """Of each sequence, however far it came, the tokens are those that it has alone."""
    model, draft = pair
    draw = random.Random(seed)
    how = {"cache_bytes": draw.choice([6, 9, 30]) * PAGE_BYTES, "max_running": draw.choice([2, 4])}
    scheduler = open_scheduler(model, draft=draft, drafts=Drafts(draw.choice([2, 7])), **how)
    found: dict[Sequence, list] = {}
    for turn in range(10_000):
        if turn < 30 and draw.random() < 0.2:
            prompt = [draw.randrange(1, 500) for _ in range(draw.randint(1, 120))]
            budget = draw.randint(1, 60)
            sampling = Sampling(budget, draw.choice([0, 0.9]), seed=draw.randrange(99))
            found[sequence := Sequence(prompt, sampling)] = []
            scheduler.add(sequence)
        if found and turn < 30 and draw.random() < 0.05:
            scheduler.cancel(draw.choice(list(found)))
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
        if turn >= 30 and not scheduler.busy:
            break
    assert_nothing_is_held(scheduler)
    judge = open_scheduler(model, stable=True, max_running=1)
    for sequence, events in found.items():
        tokens = [event for event in events if isinstance(event, Token)]
        prompt = sequence.tokens[: sequence.num_prompt]
        known = told(judge, [prompt], sequence.sampling)[0]
        assert tokens == known[: len(tokens)]
        assert len(tokens) == len(known) - 1 or events[-1:] != [None]


def test_an_end_token_ends_the_answer_in_the_middle_of_a_round(pair, prompts):
    model, draft = pair
    [events] = told(open_scheduler(model, stable=True), prompts[:1], Sampling(16, 0))
    ids = [event.id for event in events[:-1]]
    for place in (1, 2, 5, 9):
        scheduler = open_scheduler(model, [ids[place]], draft=draft, drafts=Drafts(7))
        [found] = told(scheduler, prompts[:1], Sampling(16, 0))
        assert [event.id for event in found[:-1]] == ids[: ids.index(ids[place]) + 1]


class Odd:
    """A guide that allows odd tokens alone."""

    def compute_bitmask(self) -> bytes:
        return b"\xaa" * 64

    def consume_token(self, token: int) -> bool:
        return token % 2 == 1


def test_beside_a_guide_no_drafts_are_made(pair, prompts):
    model, draft = pair
    guided, plain = Sampling(12, 0, guide=Odd), Sampling(16, 0)
    known = told(open_scheduler(model, stable=True), prompts[:1], guided)
    scheduler = open_scheduler(model, draft=draft, drafts=Drafts(3))
    assert told(scheduler, prompts[:1], guided) == known
    assert scheduler.tally.drafted.num_read == 0
    sequences = [Sequence(prompts[0], guided), Sequence(prompts[1], plain)]
    found = all_of(scheduler, sequences)
    assert [found[sequences[0]]] == known
    assert [found[sequences[1]]] == told(open_scheduler(model, stable=True), prompts[1:2], plain)
    assert scheduler.tally.drafted.num_read > 0


def test_families_with_windows(tiny, prompts):
    prompts = prompts[1:3]
    for family in ("mistral", "qwen3", "gemma2"):
        model = tiny(family, hidden_act="silu", hidden_activation="silu")
        known = told(open_scheduler(model, stable=True), prompts, Sampling(30, 0))
        scheduler = open_scheduler(model, draft=like_a_fit(model), drafts=Drafts(4))
        for together in (True, False):
            assert told(scheduler, prompts, Sampling(30, 0), together=together) == known
        assert scheduler.tally.drafted.num_kept


def test_a_drafter_that_is_always_right_saves_most_passes(tiny, prompts):
    model = tiny(hidden_act="silu")
    scheduler = open_scheduler(model, draft=like_a_fit(model, 0.0), drafts=Drafts(7))
    told(scheduler, prompts[:1], Sampling(65, 0))
    assert scheduler.tally.drafted.num_kept == scheduler.tally.drafted.num_read
    assert scheduler.tally.drafted.passes == 8


def test_models_without_a_cache_that_can_be_shared_are_refused(tiny):
    model = tiny("falcon_h1")
    with pytest.raises(
        TwellError, match="a cache that two models share: FalconH1ForCausalLM keeps"
    ):
        open_scheduler(model, draft=model)
    with pytest.raises(TwellError, match="keys and values of the same shapes"):
        open_scheduler(tiny(), draft=tiny(num_key_value_heads=4))
