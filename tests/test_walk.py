"""The host side of the walk agrees with its kernels, and takes what it is faster for."""

import pytest
import torch
from launched import Launches, Map, assert_taken
from torch import Tensor

from twellctl.bundle import twell_sequence, twell_walk
from twellctl.bundle.twell_launch import Limits
from twellctl.bundle.twell_plan import hopper_cap
from twellctl.bundle.twell_walk import (
    GATE_TOKENS,
    MOST_PAIRS,
    plan_walk,
    suits_walk,
    takes_walk,
    walk_gate_ffn,
    walk_packed_ffn,
)
from twellctl.bundle.twell_weights import FFN

H200 = Limits(132, 232448, 60 << 20, (9, 0))
SHAPES = [(1, 64, 8), (70, 64, 96), (257, 2048, 520), (300, 64, 16384), (65, 14336, 520)]


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    monkeypatch.setattr(twell_sequence, "tensor_map", Map)


def launches(M: int, K: int, N: int, *, biases: bool = True) -> Launches:
    weights = [torch.zeros(N, K, dtype=torch.bfloat16) for _ in range(3)]
    rest = [torch.zeros(n, dtype=torch.bfloat16) if biases else None for n in (N, N, K)]
    kernels, x = Launches(), torch.zeros(M, K, dtype=torch.bfloat16)
    here = kernels, H200, x, FFN(*weights, *rest)
    y = walk_gate_ffn(*here) if M <= GATE_TOKENS else walk_packed_ffn(*here, 24)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("M", [10, GATE_TOKENS + 1])
def test_arguments_are_the_parameters_of_the_kernels(M, biases):
    for name, _, _, args, _ in launches(M, 64, 520, biases=biases).made:
        assert_taken(name, args)


def test_the_order_and_what_starts_early():
    few = launches(GATE_TOKENS, 64, 96)
    assert [launch[0] for launch in few.made] == ["walk_gate", "heavy_hidden", "heavy_down"]
    assert few.overlaps == [True] * 3
    many = launches(GATE_TOKENS + 1, 64, 96)
    names = [launch[0] for launch in many.made]
    assert names == ["gate_pack_short", "walk", "heavy_hidden", "heavy_down"]
    assert many.overlaps == [False, True, True, True]  # weights may be new when the gate begins


def test_heavy_rows_are_flagged_or_listed():
    """The kernels behind the walk get what it made."""
    for M, size in ((100, 100), (GATE_TOKENS + 1, 1)):  # a flag a token, or a count
        walk, *heavy = (made[3] for made in launches(M, 64, 96).made[-3:])
        made = [arg for arg in walk if isinstance(arg, Tensor) and arg.dtype == torch.int32][-1]
        assert made.numel() == size
        assert all(any(arg is made for arg in args) for args in heavy)
        rows = heavy[0][0].tensor  # x itself, or what the walk gathered
        assert any(arg is rows for arg in walk)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launches_fit_the_device(shape):
    M, K, N = shape
    plan = plan_walk(M, N, K, H200)
    assert takes_walk(M, N, K, H200)
    assert plan.threads % 32 == 0
    assert plan.threads <= 512
    assert plan.threads * plan.ways <= 1024
    assert plan.cap % 8 == 0
    assert plan.cap <= hopper_cap(N)
    warps = plan.threads // 32
    assert plan.smem_bytes >= 4 * plan.cap * (2 + warps) + 4 * plan.ways * K * (plan.ways > 1)
    for _, grid, block, args, smem_bytes in launches(M, K, N).made:
        assert all(1 <= size < 2**31 for size in grid)
        assert block <= 1024
        assert smem_bytes <= H200.smem_bytes
        assert all(t.is_contiguous() for t in args if isinstance(t, Tensor))


def test_a_way_has_a_thread_for_eight_columns():
    for K, threads in ((64, 32), (896, 128), (2048, 256), (4096, 512), (5120, 320), (8192, 512)):
        plan = plan_walk(4096, 5632, K, H200)
        assert (plan.threads, plan.ways) == (threads, 1)


def test_few_tokens_are_walked_in_several_ways():
    ways = [plan_walk(M, 5632, 2048, H200).ways for M in (65, 132, 133, 264, 265, 4096)]
    assert ways == sorted(ways, reverse=True)
    assert ways[0] > 1
    assert ways[-1] == 1


def test_it_is_taken_by_the_number_of_pairs():
    N, K = 5632, 2048
    assert takes_walk(256, N, K, H200)
    assert suits_walk(256, N, 0.005)
    assert suits_walk(256, N, None)
    for density in (0.005, 0.02):
        most = int(MOST_PAIRS / (N * density))
        assert suits_walk(most, N, density)
        assert not suits_walk(most + 1, N, density)
    assert not takes_walk(131072, N, K, H200)
    small = Limits(132, 8192, 60 << 20, (9, 0))
    assert not takes_walk(256, N, K, small)


def test_every_row_has_a_place_in_the_window(monkeypatch):
    """Heavy rows are computed in one window."""
    monkeypatch.setattr(twell_walk, "heavy_window", lambda M, N, K: 100)
    assert takes_walk(100, 96, 64, H200)
    assert not takes_walk(101, 96, 64, H200)
