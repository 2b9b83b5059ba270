"""The lists between the packed gate and the sparse products, from the kernel `plan_cluster`."""

import numpy as np
import pytest
import torch
from list_reference import Shape, cases, check_lists, heavy_rows, make_case
from on_gpu import HOPPER

from twellctl.bundle.twell_launch import device_limits
from twellctl.bundle.twell_spec import PLAN_CLUSTER, PLAN_CLUSTER_BLOCK

pytestmark = HOPPER
FEW_SEEDS = range(3)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def launch_plan(kernels, shape: Shape, counts, entries, smem_bytes: int):
    """What it writes, over garbage."""
    lists = {}
    for name, (sizes, dtype) in shape.buffers().items():
        signed = np.dtype(dtype).str.replace("u", "i")
        garbage = torch.full(sizes, -1515870811, dtype=torch.int64, device="cuda")
        lists[name] = garbage.to(torch.from_numpy(np.empty(0, signed)).dtype)
    lists["heavy_count"].zero_()
    kernels.launch(
        "plan_cluster",
        (shape.num_tiles * PLAN_CLUSTER,),
        PLAN_CLUSTER_BLOCK,
        {
            "counts": counts,
            "entries": entries,
            "M": shape.M,
            "N": shape.N,
            "S": shape.S,
            "cap": shape.cap,
            "most": shape.most or shape.cap,
            "tile_tokens": shape.tile_tokens,
            "panel_rows": shape.panel_rows,
            "num_panels": shape.num_panels,
            "group_rounds": shape.group_rounds,
            **lists,
        },
        smem_bytes,
    )
    dtypes = {name: dtype for name, (_, dtype) in shape.buffers().items()}
    return {name: t.cpu().numpy().view(dtypes[name]) for name, t in lists.items()}


def stages(shape: Shape, counts: np.ndarray) -> dict[str, int]:
    """Bytes for a stage on which no group, about half of the groups, or every group fits."""
    nnz = int(np.where(heavy_rows(shape, counts), 0, counts.sum(1)).sum())
    a_tile = 5 * nnz // shape.num_tiles
    return {"none": 0, "half": a_tile // 2, "all": 3 * a_tile + 4096}


@pytest.mark.parametrize(("kind", "shape"), cases(), ids=str)
def test_plan_lists_every_pair_twice(kernels, kind, shape):
    limit = device_limits(0).smem_bytes
    least = shape.least_shared_bytes()
    if least > limit:
        pytest.skip(f"needs {least} bytes of shared memory, this device has {limit}")
    for seed in FEW_SEEDS:
        counts, entries = make_case(kind, shape, seed)
        packed = on_device(counts), on_device(entries)
        for stage in stages(shape, counts).values():
            smem_bytes = min(least + stage // PLAN_CLUSTER, limit)
            lists = launch_plan(kernels, shape, *packed, smem_bytes)
            check_lists(shape, counts, entries, lists)


def test_rounds_are_the_same_in_every_run(kernels):
    shape = Shape(4000, 5632, 64, 240, 744, 5632)
    counts, entries = make_case("usual", shape, 0)
    packed = on_device(counts), on_device(entries)
    least = shape.least_shared_bytes()
    first, *others = (
        launch_plan(kernels, shape, *packed, least + stage) for stage in (0, 2000, 9000)
    )
    check_lists(shape, counts, entries, first)
    written = np.arange(shape.group_rounds) < first["num_rounds"][:, None]
    for lists in others:
        assert (lists["num_rounds"] == first["num_rounds"]).all()
        assert (lists["rounds"][written] == first["rounds"][written]).all()
