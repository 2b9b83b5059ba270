"""The host side of few_hidden_hopper agrees with what the kernel is."""

import re

import pytest
import torch
from launched import Launches, Map, kind_of, parameters

from twellctl.bundle import twell_few_clusters
from twellctl.bundle.twell_few import few_ffn_kernels, few_kernels, few_union
from twellctl.bundle.twell_few_clusters import CLUSTER_KERNEL, plan_clusters, takes_clusters
from twellctl.bundle.twell_launch import Limits
from twellctl.bundle.twell_nvrtc import find_nvrtc
from twellctl.bundle.twell_weights import FFN
from twellctl.resources import resource_dir

H200 = Limits(132, 232448, 60 << 20, (9, 0))
OTHERS = [Limits(108, 166912, 40 << 20, (8, 0)), Limits(148, 232448, 126 << 20, (10, 0))]
SIZES = [(64, 8), (128, 520), (576, 24), (896, 4864), (2048, 5632), (2048, 6240), (4096, 6240)]
KERNEL = (resource_dir("kernels") / f"{CLUSTER_KERNEL}.cu").read_text()


@pytest.fixture(autouse=True)
def _maps(monkeypatch):
    monkeypatch.setattr(twell_few_clusters, "tensor_map", Map)


def launched(M: int, K: int, N: int, limits: Limits = H200):
    """The two launches of few_union."""
    x, *weights = (torch.zeros(n, K, dtype=torch.bfloat16) for n in (M, N, N, N))
    kernels = Launches()
    few_union(kernels, limits, x, FFN(*weights, None, None, None), overlap=True)
    assert kernels.overlaps == [True, True]
    return kernels.made


@pytest.mark.parametrize("M", [17, 32, 33, 64])
@pytest.mark.parametrize(("K", "N"), SIZES)
def test_what_is_launched(K, N, M):
    (name, grid, block, args, size), (_, _, _, down, _) = launched(M, K, N)
    plan = plan_clusters(M, N, K, H200, 30)
    assert (name, grid, block, size) == (
        CLUSTER_KERNEL,
        (4 * plan.clusters,),
        256,
        plan.smem_bytes,
    )
    assert [kind_of(argument) for argument in args] == parameters(name)
    x, gate, hidden = args[0], args[1], args[-3]
    assert (tuple(x.tensor.shape), x.box_rows) == ((M, K), 8 * plan.octets)
    assert (tuple(gate.tensor.shape), gate.box_rows) == ((N, K), plan.rows)
    assert hidden.shape == (N, 8 * plan.octets)
    assert down[1] is hidden


@pytest.mark.parametrize("M", [17, 32, 33, 64])
@pytest.mark.parametrize(("K", "N"), SIZES)
@pytest.mark.parametrize("at_once", [1, 7, 30])
def test_all_neurons_have_a_cluster_and_all_clusters_neurons(at_once, K, N, M):
    plan = plan_clusters(M, N, K, H200, at_once)
    if plan is None:
        assert 208 * at_once < N or K > 2048
        return
    assert 8 * (plan.octets // 2) < M <= 8 * plan.octets
    assert plan.rows % 8 == 0
    assert 0 < plan.rows <= 104
    assert (plan.clusters - 1) * 2 * plan.rows < N <= plan.clusters * 2 * plan.rows
    assert plan.clusters <= at_once
    assert plan.smem_bytes <= H200.smem_bytes


def test_sizes_that_were_measured():
    plan = plan_clusters(64, 5632, 2048, H200, 30)
    assert (plan.clusters, plan.rows, plan.stages) == (30, 96, 4)


@pytest.mark.parametrize(
    ("M", "K", "N", "limits"),
    [(16, 2048, 5632, H200), (64, 4096, 14336, H200), (64, 65536, 8, H200)]
    + [(64, 2048, 5632, limits) for limits in OTHERS],
)
def test_what_few_hidden_is_left(M, K, N, limits):
    (name, *_), _ = launched(M, K, N, limits)
    assert re.fullmatch(r"few_hidden_\d(_long)?", name)


def test_it_is_loaded_where_it_may_be_launched():
    for limits in (H200, *OTHERS):
        for M in range(1, 65):
            assert (CLUSTER_KERNEL in few_kernels(M, limits)) == takes_clusters(M, limits)
    assert CLUSTER_KERNEL in few_ffn_kernels(H200)
    assert not any(CLUSTER_KERNEL in few_ffn_kernels(limits) for limits in OTHERS)


def test_shared_memory_is_what_the_kernel_asks_for():
    library = find_nvrtc() or pytest.skip("no NVRTC: pip install 'twellctl[test]' on Linux")
    claims = [
        f"kRanks == {twell_few_clusters._RANKS} && few::kThreads == {twell_few_clusters._BLOCK}",
        f"kMostRows == {twell_few_clusters._MOST_ROWS} && kSlab == {twell_few_clusters._SLAB}",
        f"kAlignment == {twell_few_clusters._ALIGNMENT}",
    ]
    for M in (17, 33):
        for K, N in SIZES:
            for at_once in (1, 7, 30):
                if plan := plan_clusters(M, N, K, H200, at_once):
                    sizes = K, plan.rows, plan.stages, plan.octets
                    claims.append(f"Places::bytes{sizes} == {plan.smem_bytes}")
    assert len(claims) > 20
    head = KERNEL[: KERNEL.index("class Hidden")]
    assert head.count("__device__ static") == 2  # made constants, for the compiler to judge
    head = head.replace("__device__ static", "__device__ static constexpr")
    text = head + "}\n" + "\n".join(f"static_assert({claim});" for claim in claims)
    headers = {
        path.name: path.read_bytes()
        for path in resource_dir("kernels").iterdir()
        if path.suffix == ".cuh"
    }
    library.compile("probe.cu", headers | {"probe.cu": text.encode()}, "sm_90a")
