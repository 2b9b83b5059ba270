"""Many prompts at once: each is continued as transformers' own generate continues it alone."""

import contextlib
import random

import pytest
import torch
from greedy import greedy

from twellctl.decoding import bulk, opening
from twellctl.decoding.bulk import answers, open_bulk
from twellctl.decoding.engine import Sampling
from twellctl.decoding.paged_cache import page_bytes
from twellctl.decoding.pages import PagePool
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.errors import TwellError
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", "smollm3", "diffllama", "minicpm3")
ENDS = frozenset(range(0, 512, 9))  # random models seldom find one end


@pytest.fixture(scope="module")
def opened(make_model):
    """`opened(family, **config)`: a random model."""
    return lambda family="llama", **how: load_model(open_checkpoint(make_model(family, **how)))


def ragged(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 90 tokens."""
    draw = random.Random(seed)
    sizes = [1, 2, 64, 65, *(draw.randint(1, 90) for _ in range(count))][:count]
    return [[draw.randrange(1, 511) for _ in range(size)] for size in sizes]


def run(model, prompts, most: int, ends=ENDS, temperature: float = 0.0, **how) -> dict:
    """The tokens behind each prompt."""
    waiting = (Sequence(p, Sampling(most, temperature, seed=i), i) for i, p in enumerate(prompts))
    with contextlib.closing(open_bulk(model, ends, **how)) as made:
        return {s.client: s.tokens[s.num_prompt :] for s in made.run(lambda: next(waiting, None))}


@pytest.fixture(scope="module")
def with_ends(opened):
    """A model, prompts, and what it answers to each."""
    model, (*some, last) = opened(), ragged(30)
    prompts = [*some[:15], last]  # the last one ends at once
    return model, prompts, {i: greedy(model, prompt, 20, ENDS) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(opened, tokenizer, family):
    model = opened(family)
    before, prompts = model.config._attn_implementation, ragged(7)
    made = dict(answers(model, tokenizer, prompts, max_new_tokens=12, rows=4))
    assert model.config._attn_implementation == before
    assert [made[i] for i in range(len(prompts))] == [greedy(model, p, 12, [0]) for p in prompts]


@pytest.mark.usefixtures("reads_late")
@pytest.mark.parametrize("consecutive", [True, False])
def test_rows_end_and_are_taken_again(with_ends, monkeypatch, consecutive):
    if not consecutive:
        monkeypatch.setattr(bulk, "why_not_consecutive", lambda model: "not today")
    model, prompts, known = with_ends
    assert min(map(len, known.values())) == 1  # one ends at once
    assert run(model, prompts, 20, rows=6) == known
    # of a cache where three rows find room
    size = page_bytes(TorchDecoder(model).shapes)
    monkeypatch.setattr(opening, "CPU_CACHE_BYTES", 7 * size)
    assert run(model, prompts, 20, rows=6, longest=128) == known


def test_a_window_hides_what_lies_before_it(opened):
    model = opened("mistral", sliding_window=24)
    prompts = ragged(8)
    known = {i: greedy(model, prompt, 30, ENDS) for i, prompt in enumerate(prompts)}
    assert run(model, prompts, 30, rows=3) == known


def test_a_draw_does_not_depend_on_the_other_rows(opened):
    model = opened()
    prompts = ragged(10)
    made = run(model, prompts, 20, temperature=1.0, rows=5)
    assert made == run(model, prompts, 20, temperature=1.0, rows=16)
    assert made != run(model, prompts, 20, rows=5)
    alone = run(model, [prompts[0]] * 9, 20, temperature=1.0, rows=9)
    assert len({tuple(tokens) for tokens in alone.values()}) > 5


def test_what_does_not_fit_is_refused(opened, tokenizer, make_model):
    model = opened()
    with pytest.raises(TwellError, match="need room for 300 tokens, there is room for 256"):
        list(answers(model, tokenizer, [[1] * 100], max_new_tokens=200))
    with pytest.raises(TwellError, match="needs at least one token before it"):
        list(answers(model, tokenizer, [[]], max_new_tokens=2))
    hybrid = load_model(open_checkpoint(make_model("falcon_h1")))
    with pytest.raises(TwellError, match=r"several texts at once: FalconH1\w* keeps more"):
        list(answers(hybrid, tokenizer, [[1]]))


def test_numbers_that_are_none_end_it(opened, tokenizer):
    model = opened()
    model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(TwellError, match="computed NaN"):
        list(answers(model, tokenizer, [[1]], max_new_tokens=9))


def test_runs_of_pages_are_lent_once():
    pool, draw, lent = PagePool(200), random.Random(0), []
    for _ in range(2000):
        if draw.random() < 0.5 and (run := pool.take_run(draw.randint(1, 20))):
            assert run == list(range(run[0], run[0] + len(run)))
            lent.append(run)
        elif lent:
            pool.give_back(lent.pop(draw.randrange(len(lent))))
        taken = [page for run in lent for page in run]
        assert len(set(taken)) == len(taken)
        assert not taken or 0 < min(taken) <= max(taken) < 200
    for run in lent:
        pool.give_back(run)
    assert pool.take_run(199) == list(range(1, 200))


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lent_twice_and_none_is_lost(seed):
    draw = random.Random(seed)
    pool, held = PagePool(num_pages=17), []
    assert pool.capacity == 16
    for _ in range(300):
        if held and draw.random() < 0.5:
            again = list(pages := held.pop(draw.randrange(len(held))))
            pool.give_back(pages)
            assert pages == []
            if again:
                with pytest.raises(KeyError):
                    pool.give_back(again)
        else:
            count, free = draw.randint(0, 6), pool.free
            pages = pool.take(count)
            assert (pages is None) == (count > free)
            if pages is not None:
                assert len(pages) == count
                held.append(pages)
        lent = [page for pages in held for page in pages]
        assert len(set(lent)) == len(lent)
        assert set(lent) <= set(range(1, 17))  # never the one that belongs to nobody
        assert pool.free + len(lent) == pool.capacity
