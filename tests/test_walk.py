"""The host side of the walk agrees with its kernels, and takes what it is faster for."""

import pytest
from launched import Launches, Map, bf16, zero_ffn

from twellctl.bundle import twell_sequence, twell_walk
from twellctl.bundle.twell_plan import Limits, hopper_cap
from twellctl.bundle.twell_spec import E4M3_END, WALK_BATCH

H200 = Limits(132, 232448, (9, 0))
SHAPES = [(1, 64, 8), (70, 64, 96), (257, 2048, 520), (300, 64, 16384), (65, 14336, 520)]


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    for module in (twell_sequence, twell_walk):
        monkeypatch.setattr(module, "tensor_map", Map)


def launches(M: int, K: int, N: int, *, biases: bool = True, end: str = "") -> Launches:
    kernels, x, ffn = Launches(), bf16(M, K), zero_ffn(K, N, biases, end)
    y = twell_walk.walk_gate_ffn(kernels, H200, x, ffn)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels


def test_the_order_and_what_starts_early():
    few = launches(100, 64, 96)
    heavy = ["heavy_hidden", "heavy_down"]
    assert [launch[0] for launch in few.made] == ["walk_gate", "heavy_walk_gate", *heavy]
    assert few.overlaps == [True] * 4


def test_over_e4m3_all_but_the_first_start_early():
    """But for torch's product, which has its place between the first two."""
    heavy = ["heavy_widen", "heavy_hidden_e4m3", "heavy_down_e4m3"]
    found = launches(100, 128, 256, end=E4M3_END)
    names = [launch[0] for launch in found.made]
    assert names == ["quantise_inputs", "walk_gate_e4m3", "heavy_walk_gate_e4m3", *heavy]
    assert found.overlaps == [False] + [True] * 5


@pytest.mark.parametrize("end", ["", E4M3_END])
def test_heavy_rows_are_those_of_the_walk(end):
    """The kernels behind it get its list, how many it names, and their inputs."""
    M = 100
    made = {name: args for name, _, _, args, _ in launches(M, 128, 256, end=end).made}
    walk, few = (
        next(args for name, args in made.items() if name.startswith(start))
        for start in ("walk", "heavy_walk")
    )
    rows, count, x_rows = walk[-7:-4]
    assert (rows.shape, count.shape, x_rows.shape) == ((M,), (1,), (M, 128))
    if end:
        assert made["quantise_inputs"][-1] is count
        assert made["heavy_widen"][2] is count
    assert made[f"heavy_hidden{end}"][0].tensor is x_rows
    for args in (few, made[f"heavy_down{end}"]):
        assert any(arg is rows for arg in args)
    heavy = few, made[f"heavy_hidden{end}"], made[f"heavy_down{end}"]
    for args in heavy:
        assert any(arg is count for arg in args)
    assert few[13] == twell_walk.FEW_HEAVY
    for args in heavy[1:]:
        place = next(i for i, arg in enumerate(args) if arg is count)
        assert args[place + 1] == twell_walk.FEW_HEAVY


def test_no_row_is_heavy_before_the_walk():
    """Torch's product is in front of walk_gate, so the host makes the count 0."""
    (walk, *_) = (args for _, _, _, args, _ in launches(100, 64, 96).made)
    assert walk[-6].tolist() == [0]


@pytest.mark.parametrize("end", ["", E4M3_END])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_fit_the_device(shape, end):
    M, K, N = shape
    plan = twell_walk.plan_walk(M, N, K, H200, end)
    assert twell_walk.takes_walk(M, N, K, H200, end)
    assert plan.threads % 32 == 0
    assert plan.threads <= 512
    assert plan.threads * plan.ways <= 1024
    assert plan.cap % WALK_BATCH == 0
    assert plan.cap >= WALK_BATCH * plan.ways
    assert plan.cap <= hopper_cap(N)
    warps = plan.threads // 32
    assert plan.smem_bytes >= 4 * plan.cap * (2 + warps) + 4 * plan.ways * K * (
        plan.ways > 1 or bool(end)
    )


def test_a_way_has_a_thread_for_eight_columns():
    for K, threads in ((64, 32), (896, 128), (2048, 256), (4096, 512), (5120, 320), (8192, 512)):
        plan = twell_walk.plan_walk(4096, 5632, K, H200)
        assert (plan.threads, plan.ways) == (threads, 1)
        plan = twell_walk.plan_walk(4096, 5632, 2 * K, H200, E4M3_END)  # of as many bytes
        assert (plan.threads, plan.ways) == (threads, 1)


def test_few_tokens_are_walked_in_several_ways():
    ways = [twell_walk.plan_walk(M, 5632, 2048, H200).ways for M in (65, 132, 133, 264, 265, 4096)]
    assert ways == sorted(ways, reverse=True)
    assert ways[0] > 1
    assert ways[-1] == 1


def test_it_is_taken_by_the_number_of_pairs():
    N, K = 5632, 2048
    assert twell_walk.takes_walk(256, N, K, H200)
    assert twell_walk.suits_walk(256, N, 0.005)
    assert twell_walk.suits_walk(256, N, None)
    for density in (0.005, 0.02):
        most = int(twell_walk.MOST_PAIRS / (N * density))
        assert twell_walk.suits_walk(most, N, density)
        assert not twell_walk.suits_walk(most + 1, N, density)
    assert not twell_walk.takes_walk(131072, N, K, H200)
    small = Limits(132, 8192, (9, 0))
    assert not twell_walk.takes_walk(256, N, K, small)


def test_every_row_has_a_place_in_the_window(monkeypatch):
    """Heavy rows are computed in one window."""
    monkeypatch.setattr(twell_walk, "heavy_window", lambda M, N, K: 100)
    assert twell_walk.takes_walk(100, 96, 64, H200)
    assert not twell_walk.takes_walk(101, 96, 64, H200)
