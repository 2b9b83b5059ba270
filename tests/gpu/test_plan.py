"""The lists between the packed gate and the sparse products, from the kernels `pack` and `plan`."""

import numpy as np
import pytest
import torch
from list_reference import TILE, Shape, cases, check_lists, heavy_rows, make_case

from twellctl.bundle.twell_format import keep_fired, pack
from twellctl.bundle.twell_launch import device_limits, kernels_for, register_sources
from twellctl.here.resources import kernel_files

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FEW_SEEDS = range(3)


@pytest.fixture(scope="module")
def kernels():
    return kernels_for(register_sources(kernel_files()), 0)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def launch_plan(
    kernels, shape: Shape, counts, entries, block: int, smem_bytes: int, parts: int = 1
):
    """What `plan` writes, over garbage; `plan_cluster` with 8 parts."""
    lists = {}
    for name, (sizes, dtype) in shape.buffers().items():
        signed = np.dtype(dtype).str.replace("u", "i")
        garbage = torch.full(sizes, -1515870811, dtype=torch.int64, device="cuda")
        lists[name] = garbage.to(torch.from_numpy(np.empty(0, signed)).dtype)
    lists["heavy_count"].zero_()
    M, N, S, cap, tile_tokens, panel_rows = (
        shape.M, shape.N, shape.S, shape.cap, shape.tile_tokens, shape.panel_rows
    )  # fmt: skip
    kernels.launch(
        "plan" if parts == 1 else "plan_cluster",
        (shape.num_tiles * parts,),
        block,
        (
            *(counts, entries, M, N, S, cap, shape.most or cap, tile_tokens, panel_rows),
            *(shape.num_panels, shape.group_rounds, *lists.values()),
        ),
        smem_bytes,
    )
    dtypes = {name: dtype for name, (_, dtype) in shape.buffers().items()}
    return {name: t.cpu().numpy().view(dtypes[name]) for name, t in lists.items()}


def stages(shape: Shape, counts: np.ndarray) -> dict[str, int]:
    """Bytes for a stage on which no group, about half of the groups, or every group fits."""
    nnz = int(np.where(heavy_rows(shape, counts), 0, counts.sum(1)).sum())
    a_tile = 5 * nnz // shape.num_tiles
    return {"none": 0, "half": a_tile // 2, "all": 3 * a_tile + 4096}


@pytest.mark.parametrize(("block", "parts"), [(512, 1), (1024, 1), (512, 8)])
@pytest.mark.parametrize(("kind", "shape"), cases(), ids=str)
def test_plan_lists_every_pair_twice(kernels, kind, shape, block, parts):
    if parts > 1 and device_limits(0).capability < (9, 0):
        pytest.skip("this device has no clusters")
    limit = device_limits(0).smem_bytes
    least = shape.least_shared_bytes(block, parts)
    if least > limit:
        pytest.skip(f"needs {least} bytes of shared memory, this device has {limit}")
    for seed in FEW_SEEDS:
        counts, entries = make_case(kind, shape, seed)
        packed = on_device(counts), on_device(entries)
        for stage in stages(shape, counts).values():
            smem_bytes = min(least + stage // parts, limit)
            lists = launch_plan(kernels, shape, *packed, block, smem_bytes, parts)
            check_lists(shape, counts, entries, lists)


def test_rounds_are_the_same_in_every_run(kernels):
    shape = Shape(4000, 5632, 64, 240, 744, 5632)
    counts, entries = make_case("usual", shape, 0)
    packed = on_device(counts), on_device(entries)
    least = shape.least_shared_bytes(512)
    first, *others = (
        launch_plan(kernels, shape, *packed, 512, least + stage) for stage in (0, 20000, 40000)
    )
    check_lists(shape, counts, entries, first)
    written = np.arange(shape.group_rounds) < first["num_rounds"][:, None]
    if device_limits(0).capability >= (9, 0):
        least = shape.least_shared_bytes(512, 8)
        others += [launch_plan(kernels, shape, *packed, 512, least + s, 8) for s in (0, 2000, 9000)]
    for lists in others:
        assert (lists["num_rounds"] == first["num_rounds"]).all()
        assert (lists["rounds"][written] == first["rounds"][written]).all()


def launch_pack(kernels, gate: torch.Tensor):
    """(counts, entries) that `pack` writes over garbage; heavy_count must come out 0."""
    M, N = gate.shape
    T = -(-N // TILE)
    counts = torch.full((M, T), -1, dtype=torch.int32, device="cuda")
    entries = torch.full((M, T, TILE), -1, dtype=torch.int32, device="cuda")
    heavy_count = torch.full((1,), 7, dtype=torch.int32, device="cuda")
    args = (gate, M, N, counts, entries, heavy_count)
    kernels.launch("pack", (M,), 256, args)
    assert heavy_count.item() == 0
    return counts, entries


@pytest.mark.parametrize("N", [8, 256, 1000, 5632, 65536])
def test_pack_is_the_format_of_finite_rows(kernels, N):
    torch.manual_seed(0)
    gate = (torch.randn(33, N) + torch.linspace(-3, 2, 33)[:, None]).bfloat16()
    gate[:, :4] = torch.tensor([2.0**-126, -0.0, 0.0, -(2.0**-126)])
    counts, entries = launch_pack(kernels, gate.cuda())
    expected = pack(gate, TILE, TILE)
    assert torch.equal(counts.cpu(), expected.counts)
    filled = torch.arange(TILE) < expected.counts[..., None]
    assert torch.equal(entries.cpu()[filled], expected.entries[filled])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_pack_lists_all_columns_of_a_row_that_is_not_finite(kernels, odd):
    torch.manual_seed(0)
    M, N = 6, 1000
    gate = torch.randn(M, N).bfloat16()
    gate[3, 777] = odd
    counts, entries = (t.cpu() for t in launch_pack(kernels, gate.cuda()))
    assert counts[3].tolist() == [256, 256, 256, 232]
    listed = entries[3].flatten()[:N]
    assert torch.equal(listed & 0xFFFF, torch.arange(N, dtype=torch.int32))
    value = (listed >> 16).short()
    assert torch.equal(value, keep_fired(gate[3]).view(torch.int16))
    others = [0, 1, 2, 4, 5]
    assert torch.equal(counts[others], pack(gate[others], TILE, TILE).counts)


def test_plan_takes_what_pack_gives(kernels):
    M, N = 1003, 2816
    shape = Shape(M, N, TILE, N, 256, 1408)
    torch.manual_seed(0)
    gate = (torch.randn(M, N) - 2).bfloat16()
    gate[5, 6] = float("inf")
    counts, entries = launch_pack(kernels, gate.cuda())
    smem_bytes = shape.least_shared_bytes(512) + 20000
    lists = launch_plan(kernels, shape, counts, entries, 512, smem_bytes)
    check_lists(shape, counts.cpu().numpy(), entries.cpu().numpy(), lists)
    assert lists["heavy_count"][0] == 0
