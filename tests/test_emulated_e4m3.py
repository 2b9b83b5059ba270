"""Kernels of some hundred and many tokens over e4m3 weights, emulated.

They are asked what tests/gpu/test_lists_e4m3.py and test_many_e4m3.py ask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_kernels import EmulatedKernels, needs_emulator
from launched import Map
from list_builder import build_lists, from_bf16
from list_launches import there
from list_reference import Shape
from test_emulated_grad import asked, in_turn, on_cpu, small

from twellctl.bundle import twell_e4m3, twell_sequence, twell_walk
from twellctl.bundle.twell_e4m3 import quantise_inputs, quantise_rows
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_plan import Limits, make_plan
from twellctl.bundle.twell_sequence import PairLists, launch_down, launch_hidden, launch_up
from twellctl.bundle.twell_spec import HEAVY_WALK_SIZE
from twellctl.bundle.twell_walk import plan_heavy_walk, plan_walk

pytestmark = needs_emulator
H200 = Limits(132, 232448, (9, 0))
of_lists, of_many = on_cpu("test_lists_e4m3"), on_cpu("test_many_e4m3")
of_lists.limits = of_many.limits = lambda: H200
CASES = small(of_lists.CASES)


@pytest.fixture(scope="module")
def kernels():
    return EmulatedKernels()


BOTH = (False, True)
OF_LISTS = {
    "test_rows_are_rounded_as_the_judge_does": [(70, 384, bias) for bias in BOTH],
    "test_rows_for_a_walk_are_rounded_as_the_judge_does": [(70, 384), (3, 8192)],
    "test_a_row_that_is_not_finite_has_no_finite_product": [
        (float("nan"),), (float("inf"),), (-float("inf"),),
    ],
    "test_hidden_rows_are_rounded_as_the_judge_does": [(1, 8), (20, 264), (3, 5632), (2, 16392)],
    "test_hidden_rows_of_bare_sums": [
        (*size, bias) for size in ((20, 264), (2, 16392)) for bias in BOTH
    ],
    "test_scaled_sums": [(*size, more) for size in ((1, 16), (3, 5632)) for more in BOTH],
    "test_up_gives_partial_products": in_turn(CASES, ((99, 1, 2), (1, 1, 1))),
    "test_hidden_fills_the_rounds": in_turn(CASES, ((True, 3, (7, 3), 0), (True, 7, None, 64))),
    "test_down_gives_y": in_turn(CASES, ((3, True), (1, False))),
}  # fmt: skip


@asked(OF_LISTS)
def test_kernels_as_on_a_gpu(kernels, name, given):
    getattr(of_lists, name)(kernels, *given)


@pytest.mark.parametrize(
    ("M", "N", "tokens", "bias"),
    [(40, 264, None, True), (19, 1032, None, False), (40, 264, 24, True)],
    ids=["small", "several panels", "two tiles"],
)
def test_all_behind_the_gate(kernels, M, N, tokens, bias):
    """The host's launches of up, hidden and down, over x of any size and gates that are given."""
    K = 256
    x = of_lists.drawn(M, K, seed=1) * 10 ** (4 * of_lists.drawn(M, 1, seed=2))
    weights = (of_lists.drawn(*size, seed=3) / 16 for size in [(N, K), (N, K), (K, N)])
    biases = [of_lists.drawn(N, seed=4).bfloat16() if bias else None for _ in range(2)]
    ffn = of_many.e4m3_ffn(*weights, *biases, None)
    problem, plan = of_many.Problem(x.bfloat16(), ffn), make_plan(M, N, K // 2, 64, 64, H200)
    if tokens:
        plan = replace(plan, tile_tokens=tokens)
    shape = Shape(M, N, 64, plan.cap, plan.tile_tokens, plan.panel_rows)
    made = build_lists(shape, "usual", 5)
    values, token_scales = quantise_rows(kernels, H200, problem.x, ffn)
    # gates as large as x and biases make them; powers of two are exact
    size = token_scales[made.token, 0].clamp_min(float(bias)).log2().round().exp2().numpy()
    gate = of_lists.to_bf16(from_bf16(made.gate) * size)
    made.rounds.reshape(-1)[made.dest] = gate
    names = "pair_start", "pairs", "num_rounds", "rounds", "links"
    lists = PairLists(*(there(getattr(made, name), "cpu") for name in names), None, None)
    partial = launch_up(kernels, plan, values, ffn.w_up, lists)
    lists = launch_hidden(kernels, H200, plan, partial, ffn, lists, token_scales)
    y = torch.full((M, K), float("nan"), dtype=torch.bfloat16)
    launch_down(kernels, plan, ffn, lists, y, token_scales)

    hidden = torch.zeros(M, N, dtype=torch.float64)
    gates = torch.from_numpy(from_bf16(gate).astype(np.float64))
    hidden[made.token, made.column] = gates * problem.up()[made.token, made.column]
    weight = ffn.w_down.double() * ffn.s_down.double()
    terms = hidden.abs() @ weight.abs()
    # up and y are rounded to bf16, up of a float32 sum
    assert ((y.double() - hidden @ weight).abs() <= 2**-7 * terms + 1e-37).all()


SIZES = in_turn([(1, 128, 256), (5, 4224, 384)], ((False,), (True,)))
OF_DENSE = {
    "test_the_way_dense_is_torchs_own_bit_for_bit": SIZES,
    "test_the_way_dense_of_few_tokens_errs_as_torch": SIZES,
}


@asked(OF_DENSE)
def test_the_way_dense(kernels, monkeypatch, name, given):
    if "bit_for_bit" in name:
        monkeypatch.setattr(twell_e4m3, "BARE_TOKENS", 0)
    getattr(of_many, name)(kernels, *given)


# ---- the walks


class Walks:
    """As a KernelSet; the host's launches in their order, each behind the end of what is in front.

    More than few heavy rows, which go by wgmma, stay NaN. `heavy`: the tokens that were set aside;
    `rows`: their inputs.
    """

    def __init__(self, kernels: EmulatedKernels, seed: int):
        self.kernels, self.seed = kernels, seed
        self.heavy, self.rows = [], None

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        if name.startswith("heavy_walk"):
            self.kernels.launch(
                *(name, grid, block, args, smem_bytes),
                cluster=HEAVY_WALK_SIZE,
                from_previous=args[5:7],
                seed=self.seed,
            )
        elif not name.startswith("heavy"):
            previous = args[5:6] if name.startswith("walk") else ()
            self.kernels.launch(
                name, grid, block, args, smem_bytes, from_previous=previous, seed=self.seed
            )
        if name.startswith("walk"):
            assert overlap
            rows, count, self.rows, y = args[-7:-3]
            self.heavy = rows[: count.item()].tolist()
            y[self.heavy] = torch.nan


@contextmanager
def without_maps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (twell_sequence, twell_walk):
            patch.setattr(module, "tensor_map", Map)
        yield


def walked(kernels: EmulatedKernels, problem, seed: int = 1) -> Walks:
    """Checks y of all finite rows against float64, and which rows are heavy."""
    gate = problem.gate().bfloat16()
    walks, cap = Walks(kernels, seed), plan_walk(*walk_sizes(problem), H200, "e4m3").cap
    with without_maps():
        y = of_many.by_walk_gate(walks, problem)
    fired = fires(gate)
    heavy = (fired.sum(1) > cap) | (~gate.isfinite()).any(1)
    assert sorted(walks.heavy) == heavy.nonzero().flatten().tolist()
    values = quantise_inputs(kernels, problem.x).values.view(torch.uint8)
    of_heavy = walks.rows.view(torch.uint8)[: len(walks.heavy)]
    assert torch.equal(of_heavy, values[walks.heavy])
    finite = gate.isfinite().all(1)
    if plan_heavy_walk(problem.ffn.N, problem.ffn.K, H200, "e4m3", packed=False):
        assert not y[~finite].isfinite().any()
    else:
        finite &= ~heavy
    hidden = (keep_fired(gate).double() * problem.up()).bfloat16().double()[finite]
    weight, bias = problem.ffn.w_down.double() * problem.ffn.s_down.double(), problem.ffn.b_down
    wanted = hidden @ weight + (0 if bias is None else bias.double())
    terms = hidden.abs() @ weight.abs() + (0 if bias is None else bias.double().abs())
    # h may be rounded to a neighbour where float32 and float64 disagree about up
    assert ((y[finite].double() - wanted).abs() <= 2**-7 * terms + 1e-37).all()
    error = (y[finite].double() - wanted).norm() / wanted.norm().clamp_min(1e-300)
    assert error < 4e-3
    return walks


def walk_sizes(problem) -> tuple[int, int, int]:
    return problem.x.shape[0], problem.ffn.N, problem.x.shape[1]


WALKED = [(5, 128, 264, -2.0), (3, 640, 1032, -1.6), (2, 2048, 520, -1.9), (2, 8320, 136, -0.5)]


@pytest.mark.parametrize(("M", "K", "N", "mean", "bias"), in_turn(WALKED, ((False,), (True,))))
def test_walks(kernels, M, K, N, mean, bias):
    """One way and eight, ragged tiles, two passes over K."""
    torch.manual_seed(M)
    problem = of_many.random_problem(M, K, N, mean=mean, bias=bias, decades=1.0)
    walked(kernels, problem)


def test_walks_of_more_tokens_than_multiprocessors(kernels):
    """Each has one way of its own."""
    torch.manual_seed(1)
    problem = of_many.random_problem(140, 2048, 136, mean=-1.5, bias=False, decades=0.0)
    few = Limits(8, 232448, (9, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_lists, "limits", lambda: few)
        assert plan_walk(*walk_sizes(problem), few, "e4m3").ways == 1
        walked(kernels, problem)


def test_walks_of_no_pair_of_all_and_of_as_many_as_the_list_holds(kernels):
    torch.manual_seed(2)
    N = 520
    cap = plan_walk(5, N, 512, H200, "e4m3").cap
    fired = torch.zeros(5, N, dtype=torch.bool)
    fired[1] = True
    for row, num in ((2, cap), (3, cap + 1), (4, 1)):
        fired[row, torch.randperm(N)[:num]] = True
    walks = walked(kernels, of_many.patterned(fired, 256))
    assert sorted(walks.heavy) == [1, 3]


def test_walks_leave_rows_that_are_not_finite(kernels):
    torch.manual_seed(3)
    problem = of_many.random_problem(6, 256, 264, mean=-2.0, bias=False, decades=0.0)
    problem.x[1, 3], problem.x[2, 5], problem.x[4, 7] = torch.nan, torch.inf, -torch.inf
    problem.x[5] = 0
    walks = walked(kernels, problem)
    assert sorted(walks.heavy) == [1, 2, 4]
