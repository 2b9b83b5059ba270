"""What is launched, without a GPU: the kernels' signatures, grids, and buffers large enough."""

from dataclasses import replace

import pytest
import torch
from launched import Launches, Map, assert_taken, bf16, zero_ffn
from torch import Tensor

from twellctl.bundle import twell_sequence, twell_walk
from twellctl.bundle.twell_e4m3 import BARE_TOKENS, dense_e4m3_ffn, quantise_block
from twellctl.bundle.twell_plan import Limits, chunk_tokens, hopper_cap, make_plan
from twellctl.bundle.twell_sequence import hopper_ffn
from twellctl.bundle.twell_spec import E4M3_END

H200 = Limits(132, 232448, (9, 0))


def launches(M: int, K: int, N: int, *, biases: bool = True) -> list[tuple]:
    kernels, x = Launches(), bf16(M, K)
    y = hopper_ffn(kernels, H200, x, zero_ffn(K, N, biases), 64)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels.made


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    for module in (twell_sequence, twell_walk):
        monkeypatch.setattr(module, "tensor_map", Map)


def test_the_order():
    names = [launch[0] for launch in launches(10, 64, 96)]
    sparse = ["up", "hidden", "down"]
    heavy = ["heavy_walk", "heavy_gather", "heavy_hidden", "heavy_down"]
    assert names == ["gate_pack", "plan_cluster", *sparse, *heavy]


def test_boxes_are_those_of_the_kernels():
    M, K, N = 10000, 128, 520
    boxes = {
        name: [(arg.box_rows, *arg.tensor.shape) for arg in args if isinstance(arg, Map)]
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
    assert [args[8] for _, _, _, args, _ in downs] == list(range(plan.num_panels))
    assert len({args[-2].data_ptr() for _, _, _, args, _ in downs}) == 1  # fp32 sums
    (down,) = (x for x in launches(10, 64, 96) if x[0] == "down")
    assert down[3][-2] is None


def test_long_inputs_go_in_chunks_and_heavy_rows_in_windows(monkeypatch):
    monkeypatch.setattr(twell_sequence, "chunk_tokens", lambda *a, **k: 128)
    monkeypatch.setattr(twell_walk, "heavy_window", lambda M, N, K, **k: 50)
    made = launches(300, 64, 96)
    tokens = [args[2] for name, _, _, args, _ in made if name == "plan_cluster"]
    assert tokens == [128, 128, 44]
    starts = [args[4] for name, _, _, args, _ in made if name == "heavy_gather"]
    assert starts == [0, 50, 100, 0, 50, 100, 0]
    assert chunk_tokens(131072, 5632, 2048, 64, hopper_cap(5632), H200) == 131072


# ---- over e4m3 weights


def launches_e4m3(
    M: int, K: int, N: int, *, biases: bool = True, dense=False, together=False
) -> list[tuple]:
    kernels, x, ffn = Launches(), bf16(M, K), zero_ffn(K, N, biases, E4M3_END)
    if together:  # whose gate and up lie behind one another
        for part in ("w", "s", "b") if biases else ("w", "s"):
            both = torch.cat([getattr(ffn, f"{part}_gate"), getattr(ffn, f"{part}_up")]).chunk(2)
            ffn = replace(ffn, **{f"{part}_gate": both[0], f"{part}_up": both[1]})
    given = kernels, H200, x, ffn
    y = dense_e4m3_ffn(*given) if dense else hopper_ffn(*given, 64)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels.made


def test_rows_of_e4m3_count_shorts_where_bf16_counts_columns():
    M, K, N = 10000, 256, 520
    bf16, e4m3 = launches(M, K // 2, N), launches_e4m3(M, K, N)
    sizes = {name: grid for name, grid, *_ in bf16}
    assert [name for name, *_ in e4m3] == [
        "quantise_rows",
        "gate_pack_e4m3",
        "plan_cluster",
        *("up_e4m3", "hidden_e4m3", "down_e4m3"),
        *("heavy_walk_e4m3", "heavy_widen", "heavy_gather", "heavy_hidden_e4m3"),
        "heavy_down_e4m3",
    ]
    for name, grid, _, args, _ in e4m3:
        if name in ("up_e4m3", "down_e4m3"):
            assert grid == sizes[name.removesuffix("_e4m3")]
        if name == "up_e4m3":
            assert args[2:5] == (M, N, K // 2)
        if name == "down_e4m3":
            assert args[5:8] == (M, N, K // 2)


def test_scales_go_with_their_chunk_and_rows_of_e4m3_with_their_window(monkeypatch):
    monkeypatch.setattr(twell_sequence, "chunk_tokens", lambda *a, **k: 128)
    monkeypatch.setattr(twell_walk, "heavy_window", lambda M, N, K, **k: 50)
    made = launches_e4m3(300, 128, 96)
    (scales,) = (args[-1] for name, _, _, args, _ in made if name == "quantise_rows")
    downs = [args[-2] for name, _, _, args, _ in made if name == "down_e4m3"]
    assert [t.data_ptr() - scales.data_ptr() for t in downs] == [0, 128 * 8, 256 * 8]
    starts = [args[4] for name, _, _, args, _ in made if name == "heavy_gather"]
    assert starts == [0, 50, 100, 0, 50, 100, 0]
    assert sum(name == "heavy_widen" for name, *_ in made) == 3


def test_sums_of_several_panels_are_kept_for_whole_groups():
    downs = [x for x in launches_e4m3(11, 128, 16384) if x[0] == "down_e4m3"]
    assert [args[8] for _, _, _, args, _ in downs] == list(range(len(downs)))
    assert len(downs) > 1
    assert all(args[12].shape == (16, 128) for _, _, _, args, _ in downs)


@pytest.mark.parametrize(
    ("columns", "threads"),
    [(8, 32), (2048, 256), (4096, 512), (5120, 320), (5632, 352), (14336, 448), (28672, 512)],
)
def test_all_threads_of_a_row_have_as_many_eights(columns, threads):
    assert quantise_block(columns) == threads


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("together", [False, True], ids=["two products", "one product"])
@pytest.mark.parametrize("M", [9, BARE_TOKENS, BARE_TOKENS + 1])
def test_the_dense_way_over_e4m3(M, biases, together):
    K, N = 256, 1280
    made = launches_e4m3(M, K, N, biases=biases, dense=True, together=together)
    bare = M <= BARE_TOKENS
    names = ["quantise_inputs", "quantise_bare_hidden" if bare else "quantise_hidden"]
    assert [name for name, *_ in made] == names + ["scale_sums"] * bare
    for name, grid, block, args, smem_bytes in made:
        assert_taken(name, args)
        assert (grid, smem_bytes) == ((M,), 0)
        assert block == quantise_block(N if "hidden" in name else K)
    inputs, hidden, *_ = made
    assert all(t.is_contiguous() for t in inputs[3] if isinstance(t, Tensor))
    gate, up, _, pitch, *lacks, counts, values, scales = hidden[3]
    assert (len(lacks), counts) == (5 * bare, None)
    assert pitch == (2 * N if together else N)
    assert gate.stride() == up.stride() == (pitch, 1)
    assert (up.data_ptr() - gate.data_ptr() == 2 * N) == together
    assert values.is_contiguous()
    assert (gate.shape, up.shape, values.shape, scales.shape) == (*[(M, N)] * 3, (M, 1))
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
