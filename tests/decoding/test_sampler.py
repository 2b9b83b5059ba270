"""Drawing tokens: the distribution, its cuts, and what a draw depends on."""

import math

import numpy as np
import pytest
import torch
from launched import Launches
from torch import Tensor

from twellctl.decoding import sampler
from twellctl.decoding.engine import Sampling
from twellctl.decoding.rounds import inputs_of
from twellctl.decoding.sampler import Field, Variant, fields_of
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.weighing import Penalised, Weights

VOCAB = 12


def rows_of(samplings: list[Sampling], seeds: list[int], positions: list[int]) -> Tensor:
    fields = np.stack(list(map(sampler.fields_of, samplings, seeds)), 1)
    fields[sampler.Field.POSITION] = positions
    return torch.from_numpy(fields)


def chosen(logits: Tensor, fields: Tensor, variant: sampler.Variant) -> Tensor:
    logits = sampler.cut(logits, fields) if variant.cut else logits
    return sampler.choose(logits, fields, variant.drawn)


def drawn(logits: Tensor, sampling: Sampling, seed: int, count: int) -> Tensor:
    """Tokens of one seed at positions 0 to `count` - 1, all from the same logits `[VOCAB]`."""
    fields = rows_of([sampling] * count, [seed] * count, list(range(count)))
    return chosen(logits.expand(count, -1), fields, sampler.variant_of(sampling))


@pytest.fixture
def logits() -> Tensor:
    torch.manual_seed(0)
    return 2 * torch.randn(VOCAB)


def chi_square(tokens: Tensor, shares: Tensor) -> float:
    """Of the counts; about its degrees of freedom if tokens come in these shares."""
    counts, means = tokens.bincount(minlength=VOCAB).double(), shares.double() * len(tokens)
    assert not counts[means == 0].any()
    return float(((counts - means) ** 2 / means)[means > 0].sum())


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_draws_have_the_shares_of_softmax(logits, temperature):
    tokens = drawn(logits, Sampling(1, temperature), 3, 40_000)
    assert chi_square(tokens, (logits / temperature).softmax(-1)) < 35  # 11 degrees: 1 in 4000


def test_top_k_top_p_and_min_p_cut_as_transformers_does(logits):
    from transformers.generation import logits_process as stock

    kinds = (stock.TopKLogitsWarper, stock.TopPLogitsWarper, stock.MinPLogitsWarper)
    cuts = [(3, 1.0, 0.0), (5, 0.7, 0.0), (0, 0.999, 0.0), (100, 0.3, 0.0)]
    for top_k, top_p, min_p in cuts + [(0, 1.0, share) for share in (0.05, 0.2, 0.7, 1.0)]:
        warped = logits[None] / 0.9
        for kind, value in zip(kinds, (top_k, top_p % 1, min_p), strict=True):
            warped = kind(value)(None, warped) if value else warped
        tokens = drawn(logits, Sampling(1, 0.9, top_p, top_k, min_p=min_p), 5, 20_000)
        assert chi_square(tokens, warped[0].softmax(-1)) < 35, (top_k, top_p, min_p)


def test_noise_is_gumbels_and_of_no_pattern():
    seeds, positions = [1, 1, 2, 1 << 40], [7, 8, 7, 7]
    noise = sampler._gumbel(
        rows_of([Sampling(1)] * 4, seeds, positions), torch.arange(100_000).int()
    )
    assert noise.isfinite().all()
    assert noise.mean(-1).sub(0.5772).abs().max() < 0.02
    assert noise.var(-1).sub(math.pi**2 / 6).abs().max() < 0.05
    beside = torch.cat([noise, noise[:1].roll(1), noise[:1].roll(256)])
    assert torch.corrcoef(beside).fill_diagonal_(0).abs().max() < 0.015


def test_a_draw_depends_on_seed_position_and_logits_alone():
    torch.manual_seed(0)
    logits = torch.randn(8, 1000)
    warm, cut, greedy = Sampling(1, 1.0), Sampling(1, 1.2, 0.9, 50), Sampling(1, 0)
    mine = rows_of([warm], [99], [12])
    alone = chosen(logits[:1], mine, sampler.variant_of(warm))
    for row in range(8):
        mixed = [cut, greedy, warm, cut, greedy, warm, cut, greedy]
        mixed[row] = warm
        seeds, positions = list(range(8)), list(range(20, 28))
        seeds[row], positions[row] = 99, 12
        several = logits.clone()
        several[row] = logits[0]
        tokens = chosen(several, rows_of(mixed, seeds, positions), sampler.Variant(True, True))
        assert tokens[row] == alone
        others = [i for i in (1, 4, 7) if i != row]
        assert tokens[others].tolist() == several[others].argmax(-1).tolist()


def test_other_seeds_and_positions_draw_other_tokens():
    logits = torch.zeros(1000)
    fields = rows_of([Sampling(1)] * 4, [1, 2, 1, (1 << 32) + 1], [5, 5, 6, 5])
    assert len(set(chosen(logits.expand(4, -1), fields, sampler.Variant(True)).tolist())) == 4


@pytest.mark.parametrize(
    "sampling", [Sampling(1, 0), Sampling(1, 2, top_k=1), Sampling(1, 2, top_p=0)]
)
def test_what_leaves_one_token_is_greedy_and_needs_no_noise(logits, sampling):
    assert sampler.variant_of(sampling) == sampler.Variant()
    tied = torch.stack([logits, logits.clone().fill_(1.0)])
    fields = rows_of([sampling] * 2, [1, 2], [3, 4])
    for variant in (sampler.Variant(), sampler.Variant(True), sampler.Variant(True, True)):
        assert chosen(tied, fields, variant).tolist() == [int(logits.argmax()), 0]


def test_half_precision_is_drawn_from_like_float32(logits):
    rounded = logits.bfloat16()
    sampling = Sampling(1, 0.7, 0.9, 8)
    assert torch.equal(drawn(rounded, sampling, 1, 500), drawn(rounded.float(), sampling, 1, 500))


def test_log_probabilities(logits):
    chosen, ids, values = sampler.log_probabilities(logits[None], torch.tensor([4]))
    known = logits.log_softmax(-1)
    assert chosen.item() == pytest.approx(known[4].item())
    assert ids.shape == (1, VOCAB)
    assert ids[0].tolist() == known.argsort(descending=True).tolist()
    assert torch.allclose(values[0], known[ids[0]])
    assert sampler.log_probabilities(torch.zeros(2, 100), torch.tensor([1, 2]))[1].shape == (2, 20)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_seed_of_64_bits(logits, seed):
    assert drawn(logits, Sampling(1, seed=seed), seed, 50).unique().numel() > 3


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, 2**40])
def test_a_top_k_that_cuts_nothing(logits, top_k):
    sampling = Sampling(1, 1.0, 0.999999, top_k)
    assert torch.equal(drawn(logits, sampling, 7, 300), drawn(logits, Sampling(1), 7, 300))


def test_penalties_weigh_as_transformers_and_openai_say(logits):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    tokens, num_prompt, bias = [3, 3, 5, 7, 7, 7], 3, ((1, 2.0), (7, -1.0))
    how = Sampling(1, 0.0, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5)
    assert sampler.variant_of(how).weighed
    weights = Weights.of(2, VOCAB, logits.device)
    weights.load([Penalised(tokens[:-1], num_prompt, bias), None])
    fields = rows_of([how, Sampling(1)], [0, 0], [0, 0])
    last = torch.tensor([[tokens[-1]], [tokens[-1]]])
    weights.count_kept(last, torch.zeros_like(last), last)
    got = weights.weighed(logits.expand(2, -1), fields)
    wanted = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([tokens]), logits[None].clone())[0]
    wanted[7] -= 3 * 0.25 + 0.5 + 1
    wanted[1] += 2
    assert torch.allclose(got[0], wanted)
    assert torch.equal(got[1], logits)


# ---- the end of a round: its records, what goes on, and how its kernel is launched


CPU = torch.device("cpu")


def fields(*samplings: Sampling) -> torch.Tensor:
    of_rows = np.stack([fields_of(sampling, 7) for sampling in samplings], 1)
    of_rows[Field.POSITION], of_rows[Field.LIMIT] = 5, range(5, 5 + len(samplings))
    return torch.from_numpy(of_rows)


def test_a_step_leaves_records_and_goes_on():
    record = Record((4, 8), 100)
    logits = torch.zeros(3, 100)
    logits[range(3), [7, 8, 9]] = 1.0
    rows = fields(*[Sampling(1, 0)] * 3)
    records = torch.zeros(3, 1, record.width, dtype=torch.int32)
    fired = torch.tensor([[0, 1, 2], [8, 6, 4]], dtype=torch.int32)
    end = StepEnd(record, None, 3, CPU)
    end(
        logits[:, None],
        fired[..., None],
        inputs_of(rows, None),
        rows,
        records,
        Variant(logprobs=True),
    )
    made = records[:, 0].numpy()
    assert rows[Field.TOKEN].tolist() == [7, 8, 9]
    assert rows[Field.POSITION].tolist() == [5, 6, 6]  # none goes beyond its limit
    token = record.token(made[1], Sampling(1, top_logprobs=2, densities=True))
    assert (token.id, token.densities) == (8, (0.25, 0.75))
    assert token.logprob == pytest.approx(logits[1].log_softmax(-1)[8].item())
    assert len(token.top) == 2
    assert token.top[0] == (8, token.logprob)
    assert record.shares(made).sum(0).tolist() == [0.75, 2.25]
    of_a_fit = Record((4, 8), 100, mapped=2)  # of which two always fire
    assert of_a_fit.shares(made).tolist() == [[0, 1], [0, 4 / 6], [0, 2 / 6]]


@pytest.mark.parametrize(
    ("B", "V", "num_drafts", "blocks"),
    [(1, 49152, 0, 48), (3, 41, 0, 1), (64, 49155, 0, 16), (8, 49155, 7, 16), (1, 49152, 4, 48)],
)
def test_the_kernel_is_launched_as_its_source_says(B, V, num_drafts, blocks):
    kernels, record, num_tokens = Launches(), Record((), V), 1 + num_drafts
    rows = fields(*[Sampling(1)] * B)
    records = torch.zeros(B, num_tokens, record.width, dtype=torch.int32)
    end = StepEnd(record, kernels, 64, CPU, num_tokens)
    fired = torch.zeros(0, B, num_tokens, dtype=torch.int32)
    logits = torch.zeros(B, num_tokens, V, dtype=torch.bfloat16)
    drafts = torch.zeros(B, num_drafts) if num_drafts else None
    end(logits, fired, inputs_of(rows, drafts), rows, records, Variant(drawn=True))
    ((name, grid, block, args, _),) = kernels.made
    assert (name, grid, block) == ("choose", (blocks, B * num_tokens), 256)
    assert args["logits"].shape == (B * num_tokens, V)


def test_the_kernel_needs_no_graph_of_its_own_for_draws():
    drawn, cut = Variant(drawn=True), Variant(drawn=True, cut=True)
    by_torch, by_kernel = (StepEnd(Record((), 8), k, 1, CPU) for k in (None, Launches()))
    assert by_torch.kind_of(drawn) == drawn
    assert by_kernel.kind_of(drawn) == by_kernel.kind_of(Variant()) == Variant()
    assert by_kernel.kind_of(cut) == Variant(cut=True)
