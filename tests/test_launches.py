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
from twellctl.bundle.twell_spec import KINDS, WALK_BATCH, entry

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
    sums = {(args[-2].data_ptr(), args[-2].shape) for _, _, _, args, _ in downs}  # in fp32
    assert len(sums) == 1
    assert sums.pop()[1] == (16, 64)  # of whole groups of tokens
    (down,) = (x for x in launches(10, 64, 96) if x[0] == "down")
    assert down[3][-2] is None


# ---- over e4m3 weights


def launches_e4m3(
    M: int, K: int, N: int, *, biases: bool = True, dense=False, together=False
) -> list[tuple]:
    kernels, x, ffn = Launches(), bf16(M, K), zero_ffn(K, N, biases, "e4m3")
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
    assert chunk_tokens(131072, 5632, 2048, 64, hopper_cap(5632), H200) == 131072
    monkeypatch.setattr(twell_sequence, "chunk_tokens", lambda *a, **k: 128)
    monkeypatch.setattr(twell_walk, "heavy_window", lambda M, N, K, **k: 50)
    made = launches_e4m3(300, 128, 96)
    tokens = [args[2] for name, _, _, args, _ in made if name == "plan_cluster"]
    assert tokens == [128, 128, 44]
    (scales,) = (args[-1] for name, _, _, args, _ in made if name == "quantise_rows")
    downs = [args[-2] for name, _, _, args, _ in made if name == "down_e4m3"]
    assert [t.data_ptr() - scales.data_ptr() for t in downs] == [0, 128 * 8, 256 * 8]
    starts = [args[4] for name, _, _, args, _ in made if name == "heavy_gather"]
    assert starts == [0, 50, 100, 0, 50, 100, 0]
    assert sum(name == "heavy_widen" for name, *_ in made) == 3


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


# ---- the walk


SHAPES = [(1, 64, 8), (70, 64, 96), (257, 2048, 520), (300, 64, 16384), (65, 14336, 520)]


def walk_launches(M: int, K: int, N: int, *, biases: bool = True, kind: str = "bf16") -> Launches:
    kernels, x, ffn = Launches(), bf16(M, K), zero_ffn(K, N, biases, kind)
    y = twell_walk.walk_gate_ffn(kernels, H200, x, ffn)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels


def test_the_order_and_what_starts_early():
    few = walk_launches(100, 64, 96)
    heavy = ["heavy_hidden", "heavy_down"]
    assert [launch[0] for launch in few.made] == ["walk_gate", "heavy_walk_gate", *heavy]
    assert few.overlaps == [True] * 4


def test_over_e4m3_all_but_the_first_start_early():
    """But for torch's product, which has its place between the first two."""
    heavy = ["heavy_widen", "heavy_hidden_e4m3", "heavy_down_e4m3"]
    found = walk_launches(100, 128, 256, kind="e4m3")
    names = [launch[0] for launch in found.made]
    assert names == ["quantise_inputs", "walk_gate_e4m3", "heavy_walk_gate_e4m3", *heavy]
    assert found.overlaps == [False] + [True] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_heavy_rows_are_those_of_the_walk(kind):
    """The kernels behind it get its list, how many it names, and their inputs."""
    M = 100
    made = {name: args for name, _, _, args, _ in walk_launches(M, 128, 256, kind=kind).made}
    walk, few = (
        next(args for name, args in made.items() if name.startswith(start))
        for start in ("walk", "heavy_walk")
    )
    rows, count, x_rows = walk[-7:-4]
    assert (rows.shape, count.shape, x_rows.shape) == ((M,), (1,), (M, 128))
    if kind == "e4m3":
        assert made["quantise_inputs"][-1] is count
        assert made["heavy_widen"][2] is count
    assert made[entry("heavy_hidden", kind)][0].tensor is x_rows
    for args in (few, made[entry("heavy_down", kind)]):
        assert any(arg is rows for arg in args)
    heavy = few, made[entry("heavy_hidden", kind)], made[entry("heavy_down", kind)]
    for args in heavy:
        assert any(arg is count for arg in args)
    assert few[13] == twell_walk.FEW_HEAVY
    for args in heavy[1:]:
        place = next(i for i, arg in enumerate(args) if arg is count)
        assert args[place + 1] == twell_walk.FEW_HEAVY


def test_no_row_is_heavy_before_the_walk():
    """Torch's product is in front of walk_gate, so the host makes the count 0."""
    (walk, *_) = (args for _, _, _, args, _ in walk_launches(100, 64, 96).made)
    assert walk[-6].tolist() == [0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_fit_the_device(shape, kind):
    M, K, N = shape
    plan = twell_walk.plan_walk(M, N, K, H200, kind)
    assert twell_walk.takes_walk(M, N, K, H200, kind)
    assert plan.threads % 32 == 0
    assert plan.threads <= 512
    assert plan.threads * plan.ways <= 1024
    assert plan.cap % WALK_BATCH == 0
    assert plan.cap >= WALK_BATCH * plan.ways
    assert plan.cap <= hopper_cap(N)
    warps = plan.threads // 32
    assert plan.smem_bytes >= 4 * plan.cap * (2 + warps) + 4 * plan.ways * K * (
        plan.ways > 1 or kind == "e4m3"
    )


def test_a_way_has_a_thread_for_eight_columns():
    for K, threads in ((64, 32), (896, 128), (2048, 256), (4096, 512), (5120, 320), (8192, 512)):
        plan = twell_walk.plan_walk(4096, 5632, K, H200)
        assert (plan.threads, plan.ways) == (threads, 1)
        plan = twell_walk.plan_walk(4096, 5632, 2 * K, H200, "e4m3")  # of as many bytes
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
