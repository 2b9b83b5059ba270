"""Rounds that keep several tokens: the texts of plain decoding, whatever a drafter proposes."""

import contextlib
import random

import numpy as np
import pytest
import torch
from history_decoder import HistoryDecoder, HistoryDrafter, expected

from twellctl.decoding.batch import Batch
from twellctl.decoding.bulk import Bulk
from twellctl.decoding.engine import Sampling, Token
from twellctl.decoding.pages import PAGE
from twellctl.decoding.rounds import NO_TOKEN, NOT_KEPT, inputs_of
from twellctl.decoding.sampler import Field, Variant, fields_of, variant_of
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.weighing import Penalised, Weights

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["at once", "a round late"], autouse=True)
def reads_late(request, monkeypatch) -> bool:
    """Rounds are read before or after the next one is launched, as on a CPU and on a GPU."""
    made = Batch.__init__

    def make(self, *arguments, **how):
        made(self, *arguments, **how)
        self.reads_late = request.param

    monkeypatch.setattr(Batch, "__init__", make)
    return request.param


def scheduler_of(
    num_pages: int = 40, max_running: int = 4, eos=frozenset(), drafts: int = 3, wrong: int = 5
) -> Scheduler:
    decoder = HistoryDecoder(num_pages)
    drafter = HistoryDrafter(decoder, drafts, wrong)
    return Scheduler(decoder, num_pages, max_running, eos, drafter)


def all_of(scheduler: Scheduler, sequences: list[Sequence]) -> dict[Sequence, list]:
    """Run to the end; the events of each sequence."""
    found = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(10_000):
        if not scheduler.busy:
            return found
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
    pytest.fail("it does not come to an end")


def ids_of(events: list) -> list[int]:
    *tokens, end = events
    assert end is None
    return [token.id for token in tokens]


def assert_nothing_is_held(scheduler: Scheduler) -> None:
    assert scheduler.pool.free == scheduler.pool.capacity
    assert not scheduler.busy
    assert scheduler.num_running == 0


@pytest.mark.parametrize("budget", range(1, 12))
@pytest.mark.parametrize("length", [1, 60, 64, 99])
def test_max_tokens_may_end_a_sequence_in_the_middle_of_a_round(length, budget):
    scheduler = scheduler_of()
    prompt = [i % 50 for i in range(length)]
    sequence = Sequence(prompt, Sampling(budget, 0, densities=True))
    events = all_of(scheduler, [sequence])[sequence]
    assert ids_of(events) == expected(prompt, budget)
    assert {token.densities for token in events[:-1]} == {(0.25, 0.5)}
    assert scheduler.generated_tokens == budget
    assert (scheduler.fired / budget).tolist() == [0.25, 0.5]
    assert_nothing_is_held(scheduler)


def test_rounds_are_fewer_than_tokens():
    scheduler = scheduler_of(wrong=1000)
    sequence = Sequence([1, 2, 3], Sampling(41, 0))
    assert ids_of(all_of(scheduler, [sequence])[sequence]) == expected([1, 2, 3], 41)
    rounds = [call for call in scheduler.decoder.calls if call[0] == "round"]
    assert 10 <= len(rounds) <= 11  # four tokens each, and one that was launched too early


def test_drafts_that_are_all_wrong_change_no_token():
    scheduler = scheduler_of(wrong=1)
    sequences = [Sequence([i], Sampling(30, 0)) for i in range(3)]
    for i, events in enumerate(all_of(scheduler, sequences).values()):
        assert ids_of(events) == expected([i], 30)


@pytest.mark.parametrize("place", range(9))
def test_an_end_token_in_the_middle_of_a_round(place):
    prompt = [3, 1, 4]
    known = expected(prompt, 30)
    eos = frozenset({known[place]})
    stop = next(i for i, token in enumerate(known) if token in eos)
    scheduler = scheduler_of(eos=eos, wrong=1000)
    goes_on = Sequence(prompt, Sampling(30, 0, ignore_eos=True))
    sequence = Sequence(prompt, Sampling(30, 0))
    found = all_of(scheduler, [sequence, goes_on])
    assert ids_of(found[sequence]) == known[: stop + 1]
    assert ids_of(found[goes_on]) == known
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_tokens_are_right_and_pages_are_free_at_the_end(seed, drafts):
    """With evictions, and sequences that are cancelled while rounds run."""
    draw = random.Random(seed)
    num_pages, most = draw.choice([6, 9, 30]), draw.choice([1, 3, 6])
    scheduler = scheduler_of(num_pages, most, drafts=drafts, wrong=draw.choice([3, 7]))
    longest = min(scheduler.context, 350)
    found: dict[Sequence, list] = {}
    for _ in range(150):
        if draw.random() < 0.15:
            length = draw.randint(1, longest - 1)
            prompt = [draw.randrange(200) for _ in range(length)]
            budget = draw.randint(1, min(150, longest - length))
            found[sequence := Sequence(prompt, Sampling(budget, 0))] = []
            scheduler.add(sequence)
        if found and draw.random() < 0.03:
            scheduler.cancel(draw.choice(list(found)))
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
    while scheduler.busy:
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
    ended = [sequence for sequence, events in found.items() if events[-1:] == [None]]
    assert len(ended) > len(found) / 4
    for sequence, events in found.items():
        known = expected(sequence.tokens[: sequence.num_prompt], sequence.sampling.max_tokens)
        tokens = [event.id for event in events if isinstance(event, Token)]
        assert tokens == known[: len(tokens)]
        assert len(tokens) == len(known) or sequence not in ended
    assert_nothing_is_held(scheduler)


def test_a_round_may_need_several_pages():
    scheduler = scheduler_of(num_pages=12, drafts=3 * PAGE, wrong=10_000)
    sequences = [Sequence([i] * 40, Sampling(4 * PAGE, 0)) for i in range(2)]
    for i, events in enumerate(all_of(scheduler, sequences).values()):
        assert ids_of(events) == expected([i] * 40, 4 * PAGE)
    assert_nothing_is_held(scheduler)


class Choices:
    """A guide that allows all; it must be asked about each token by itself."""

    def __init__(self):
        self.tokens = []

    def compute_bitmask(self) -> bytes:
        return b"\xff" * 27

    def consume_token(self, token: int) -> bool:
        self.tokens.append(token)
        return True


def test_with_a_guide_rounds_have_no_drafts():
    scheduler, guide = scheduler_of(), Choices()
    guided = Sequence([1], Sampling(9, 0, guide=lambda: guide))
    plain = Sequence([2], Sampling(30, 0))
    found = all_of(scheduler, [guided, plain])
    assert ids_of(found[guided]) == guide.tokens == expected([1], 9)
    assert ids_of(found[plain]) == expected([2], 30)
    kinds = [call[0] for call in scheduler.decoder.calls]
    assert kinds.index("round") > 8


@pytest.mark.parametrize("drafts", [0, 1, 4, 11])
def test_bulk_reads_rounds_as_the_scheduler_does(drafts):
    draw = random.Random(drafts)
    prompts = [[draw.randrange(200) for _ in range(draw.randint(1, 90))] for _ in range(25)]
    ends, decoder = frozenset(range(0, 200, 23)), HistoryDecoder(40)
    decoder.prefill_chunk = 10_000
    drafter = HistoryDrafter(decoder, drafts, 5) if drafts else None
    most = [draw.randint(1, 60) for _ in prompts]
    sequences = [Sequence(prompts[i], Sampling(most[i], 0), i) for i in range(len(prompts))]
    waiting = iter(sequences)
    with contextlib.closing(Bulk(decoder, 40, ends, rows=6, longest=150, drafter=drafter)) as bulk:
        found = {s.client: s.tokens[s.num_prompt :] for s in bulk.run(lambda: next(waiting, None))}
    assert len(found) == len(prompts)
    for i, prompt in enumerate(prompts):
        known = expected(prompt, most[i])
        stop = next((j for j, token in enumerate(known) if token in ends), most[i])
        assert found[i] == known[: stop + 1]
    assert bulk.num_drawn == sum(map(len, found.values()))
    assert bulk.num_tokens == 0


# ---- what a round reads, and the end of it


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
