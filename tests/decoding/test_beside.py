"""Two schedulers over one cache, a model and what drafts for it: each as if it were alone."""

import asyncio
import random

import pytest
from compiled import EVERY_CASE
from exact_pairs import like_a_fit
from history_decoder import HistoryDecoder, HistoryDrafter, expected
from scheduled import all_of, assert_nothing_is_held, tokens_of

from twellctl.decoding.decode_engine import DecodeEngine
from twellctl.decoding.engine import EngineClosed, Sampling, Token
from twellctl.decoding.opening import open_engines, open_scheduler, open_schedulers
from twellctl.decoding.pages import PAGE, PagePool
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence

PAGE_BYTES = 2 * 64 * 2 * (8 + 8) * 4  # of two layers, two heads of 8, float32


def two_over_one_cache(num_pages: int) -> list[Scheduler]:
    """The first has drafts."""
    one, other = HistoryDecoder(num_pages), HistoryDecoder(num_pages)
    other.cache, pool = one.cache, PagePool(num_pages)
    return [
        Scheduler(one, pool, 3, frozenset(), [HistoryDrafter(one, 3, 5)]),
        Scheduler(other, pool, 3, frozenset()),
    ]


@pytest.mark.usefixtures("reads_late")
@pytest.mark.parametrize("seed", range(6 if EVERY_CASE else 3))
def test_each_sequence_gets_its_own_tokens(seed):
    draw = random.Random(seed)
    schedulers = two_over_one_cache(draw.choice([6, 9, 30]))
    found: dict[Sequence, tuple[Scheduler, list]] = {}
    for turn in range(4000):
        if turn < 40 and draw.random() < 0.5:
            prompt = [draw.randrange(50) for _ in range(draw.randint(1, 2 * PAGE))]
            sequence = Sequence(prompt, Sampling(draw.randint(1, 2 * PAGE), 0))
            found[sequence] = draw.choice(schedulers), []
            found[sequence][0].add(sequence)
        if found and turn < 40 and draw.random() < 0.05:
            sequence = draw.choice(list(found))
            found[sequence][0].cancel(sequence)
        for scheduler in schedulers:
            for sequence, event in scheduler.advance():
                assert found[sequence][0] is scheduler
                found[sequence][1].append(event)
        if turn >= 40 and not any(scheduler.busy for scheduler in schedulers):
            break
    for scheduler in schedulers:
        assert_nothing_is_held(scheduler)
    for sequence, (_, events) in found.items():
        tokens = [event.id for event in events if isinstance(event, Token)]
        prompt = sequence.tokens[: sequence.num_prompt]
        assert tokens == expected(prompt, len(tokens))
        assert events[-1:] != [None] or len(tokens) == sequence.sampling.max_tokens


def test_a_sequence_waits_for_pages_that_another_scheduler_has():
    one, other = two_over_one_cache(num_pages=6)
    first, second = (Sequence([i] * 3 * PAGE, Sampling(PAGE, 0)) for i in (1, 2))
    one.add(first)
    events = one.advance()
    other.add(second)
    for _ in range(5):
        assert other.advance() == []
    while one.busy:
        events += one.advance()
    assert tokens_of([event for _, event in events]) == expected([1] * 3 * PAGE, PAGE)
    events = []
    while other.busy:
        events += other.advance()
    assert tokens_of([event for _, event in events]) == expected([2] * 3 * PAGE, PAGE)


def test_a_model_and_its_draft(tiny, prompts):
    """At once, where there are pages for half of them."""
    model = tiny(hidden_act="silu")
    draft = like_a_fit(model)
    sampling = Sampling(30, 0.8, seed=3)

    def those_of(scheduler: Scheduler) -> list[list[int]]:
        sequences = [Sequence(prompt, sampling) for prompt in prompts]
        found = all_of(scheduler, sequences)
        return [tokens_of(found[sequence]) for sequence in sequences]

    known = those_of(open_scheduler(model, stable=True)), those_of(open_scheduler(draft))
    both = open_schedulers(model, draft=draft, draft_alone=True, cache_bytes=8 * PAGE_BYTES)
    found = {Sequence(prompt, sampling): [] for _ in both for prompt in prompts}
    for i, sequence in enumerate(found):
        both[i // len(prompts)].add(sequence)
    while any(scheduler.busy for scheduler in both):
        for scheduler in both:
            for sequence, event in scheduler.advance():
                found[sequence].append(event)
    for scheduler in both:
        assert_nothing_is_held(scheduler)
    assert list(map(tokens_of, found.values())) == [*known[0], *known[1]]
    assert known[0] != known[1]


def test_engines_of_both_have_one_worker_and_end_together(tiny, prompts):
    model = tiny(hidden_act="silu")
    draft = like_a_fit(model)

    async def answered(engine: DecodeEngine) -> list[list[int]]:
        async def answer(prompt: list[int]) -> list[int]:
            return [token.id async for token in engine.generate(prompt, Sampling(20, 0))]

        return await asyncio.gather(*map(answer, prompts))

    async def both(engines: list[DecodeEngine]) -> list[list[list[int]]]:
        return await asyncio.gather(*map(answered, engines))

    engines = open_engines(model, draft=draft)
    found = asyncio.run(both(engines))
    for engine, tokens, alone in zip(engines, found, (model, draft), strict=True):
        [judge] = open_engines(alone, stable=True)
        assert asyncio.run(answered(judge)) == tokens
        assert engine.stats().generated_tokens == 20 * len(prompts)
        judge.close()
    engines[0].close()
    for engine in engines:
        with pytest.raises(EngineClosed):
            asyncio.run(answered(engine))
