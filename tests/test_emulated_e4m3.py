"""Kernels of many tokens over e4m3 weights, emulated: what tests/gpu/test_lists_e4m3.py asks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_kernels import EmulatedKernels, needs_emulator
from list_builder import build_lists, from_bf16
from list_reference import Shape
from test_emulated_grad import on_cpu, small

from twellctl.bundle.twell_launch import Limits
from twellctl.bundle.twell_lists_e4m3 import quantise_rows
from twellctl.bundle.twell_plan import make_plan
from twellctl.bundle.twell_sequence import PairLists, launch_down, launch_hidden, launch_up

pytestmark = needs_emulator
H200 = Limits(132, 232448, 60 << 20, (9, 0))
of_lists = on_cpu("test_lists_e4m3")
of_lists.limits = lambda: H200
CASES = pytest.mark.parametrize("case", small(of_lists.CASES), ids=str)


@pytest.fixture(scope="module")
def kernels():
    return EmulatedKernels()


@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_rounded_as_the_judge_does(kernels, bias):
    of_lists.test_rows_are_rounded_as_the_judge_does(kernels, 70, 384, bias)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_product(kernels, bad):
    of_lists.test_a_row_that_is_not_finite_has_no_finite_product(kernels, bad)


@CASES
@pytest.mark.parametrize(("ranges", "slabs"), [((99, 1), 2), ((1, 1), 1)])
def test_up(kernels, case, ranges, slabs):
    of_lists.test_up_gives_partial_dot_products(kernels, *case, *ranges, slabs)


@CASES
@pytest.mark.parametrize("how", [(3, (7, 3), 0), (7, None, 64)])
def test_hidden(kernels, case, how):
    of_lists.test_hidden_fills_the_rounds(kernels, *case, True, *how)


@CASES
@pytest.mark.parametrize(("splits", "has_bias"), [(1, False), (3, True)])
def test_down(kernels, case, splits, has_bias):
    of_lists.test_down_gives_y(kernels, *case, splits, has_bias)


@pytest.mark.parametrize(
    ("M", "N", "tokens"),
    [(40, 264, None), (19, 1032, None), (40, 264, 24)],
    ids=["small", "several panels", "two tiles"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_all_behind_the_gate(kernels, M, N, tokens, bias):
    """The host's launches of up, hidden and down, over x of any size and gates that are given."""
    K = 256
    x = of_lists.drawn(M, K, seed=1) * 10 ** (4 * of_lists.drawn(M, 1, seed=2))
    weights = (of_lists.drawn(*size, seed=3) / 16 for size in [(N, K), (N, K), (K, N)])
    biases = [of_lists.drawn(N, seed=4).bfloat16() if bias else None for _ in range(2)]
    ffn = of_lists.e4m3_ffn(*weights, *biases, None)
    problem, plan = of_lists.Problem(x.bfloat16(), ffn), make_plan(M, N, K // 2, 64, 64, H200)
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
    lists = PairLists(*(of_lists.on_device(getattr(made, name)) for name in names), None, None)
    scales = token_scales, ffn.s_up
    partial = launch_up(kernels, plan, values, ffn.w_up, lists)
    lists = launch_hidden(kernels, H200, plan, partial, ffn, lists, scales)
    y = torch.full((M, K), float("nan"), dtype=torch.bfloat16)
    launch_down(kernels, plan, ffn, lists, y, (token_scales, ffn.s_down))

    hidden = torch.zeros(M, N, dtype=torch.float64)
    gates = torch.from_numpy(from_bf16(gate).astype(np.float64))
    hidden[made.token, made.column] = gates * problem.up()[made.token, made.column]
    weight = ffn.w_down.double() * ffn.s_down.double()
    terms = hidden.abs() @ weight.abs()
    # up and y are rounded to bf16, up of a float32 sum
    assert ((y.double() - hidden @ weight).abs() <= 2**-7 * terms + 1e-37).all()
