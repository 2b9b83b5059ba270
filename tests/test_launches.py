"""What is launched, without a GPU: the kernels' signatures, grids, and buffers large enough."""

import pytest
from launched import Launches, Map, bf16, zero_ffn

from twellctl.bundle import twell_heavy, twell_sequence
from twellctl.bundle.twell_plan import Limits, chunk_tokens, hopper_cap, make_plan
from twellctl.bundle.twell_sequence import hopper_ffn

H200 = Limits(132, 232448, (9, 0))


def launches(M: int, K: int, N: int, *, biases: bool = True) -> list[tuple]:
    kernels, x = Launches(), bf16(M, K)
    y = hopper_ffn(kernels, H200, x, zero_ffn(K, N, biases), 64)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels.made


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    for module in (twell_sequence, twell_heavy):
        monkeypatch.setattr(module, "tensor_map", Map)


def test_the_order():
    names = [launch[0] for launch in launches(10, 64, 96)]
    sparse = ["up", "hidden", "down"]
    heavy = ["heavy_gather", "heavy_hidden", "heavy_down"]
    assert names == ["gate_pack", "plan_cluster", *sparse, *heavy]


def test_boxes_are_those_of_the_kernels():
    M, K, N = 10000, 128, 520
    boxes = {
        name: [(arg.box_rows, *arg.tensor.shape) for arg in args.values() if isinstance(arg, Map)]
        for name, _, _, args, _ in launches(M, K, N)
    }
    assert boxes["gate_pack"] == [(64, M, K), (128, N, K)]
    window = boxes["heavy_hidden"][0][1]
    assert boxes["heavy_hidden"] == [(64, window, K), (128, N, K), (128, N, K)]
    assert boxes["heavy_down"] == [(64, window, N), (64, N, K)]


def test_many_neurons_take_several_panels():
    downs = [x for x in launches(10, 64, 16384) if x[0] == "down"]
    plan = make_plan(10, 16384, 64, 64, hopper_cap(16384), H200)
    assert len(downs) == plan.num_panels > 1
    assert [args["panel"] for _, _, _, args, _ in downs] == list(range(plan.num_panels))
    sums = {(args["y32"].data_ptr(), args["y32"].shape) for _, _, _, args, _ in downs}
    assert len(sums) == 1
    assert sums.pop()[1] == (10, 64)
    (down,) = (x for x in launches(10, 64, 96) if x[0] == "down")
    assert down[3]["y32"] is None


def test_heavy_rows_are_computed_window_by_window(monkeypatch):
    assert chunk_tokens(131072, 5632, 2048, 64, hopper_cap(5632), H200) == 131072
    monkeypatch.setattr(twell_sequence, "chunk_tokens", lambda *a, **k: 128)
    monkeypatch.setattr(twell_heavy, "heavy_window", lambda M, N, K, **k: 50)
    made = launches(300, 128, 96)
    lists = [args for name, _, _, args, _ in made if name == "plan_cluster"]
    assert [args["M"] for args in lists] == [128, 128, 44]
    gathers = [args for name, _, _, args, _ in made if name == "heavy_gather"]
    assert [args["window_start"] for args in gathers] == [0, 50, 100, 0, 50, 100, 0]
    listed_by = [lists[chunk] for chunk in (0, 0, 0, 1, 1, 1, 2)]
    for args, plan in zip(gathers, listed_by, strict=True):
        assert args["heavy_rows"] is plan["heavy_rows"]
        assert args["heavy_count"] is plan["heavy_count"]
