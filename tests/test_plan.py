"""Grids and sizes: on any device, for any shape, all is covered and nothing is too large."""

import random
from dataclasses import dataclass

import pytest

from twellctl.bundle import twell_plan as planning
from twellctl.bundle.twell_config import MAX_COLUMNS, TILE
from twellctl.bundle.twell_plan import ceil_div, chunk_tokens, hopper_cap, make_plan, why_unfit


@dataclass(frozen=True)
class Device:
    num_sms: int
    smem_bytes: int


DEVICES = {
    "H200": Device(132, 232448),
    "A100": Device(108, 166912),
    "L4": Device(58, 101376),
    "H100 PCIe": Device(114, 232448),
}
TOKENS = [1, 2, 7, 8, 9, 63, 64, 100, 255, 1000, 4096, 8191, 16384, 65536, 131072]
SIZES = [
    (64, 8), (64, 96), (576, 1536), (1024, 4096), (2048, 5632), (4096, 14336), (8192, 28672),
    (64, 65536), (8192, 65536), (16384, 65528),
]  # fmt: skip


def plans(device: Device):
    draw = random.Random(0)
    shapes = [(M, K, N) for M in TOKENS for K, N in SIZES]
    shapes += [
        (draw.randint(1, 40000), 64 * draw.randint(1, 128), 8 * draw.randint(1, 3000))
        for _ in range(80)
    ]
    for M, K, N in shapes:
        if why_unfit(K, N, TILE, device.smem_bytes):
            continue
        for cap, slots in ((hopper_cap(N), draw.choice([8, 64, 256])), (N, TILE)):
            size = chunk_tokens(M, N, K, slots, cap, device)
            for tokens in {size, M % size or size}:
                yield make_plan(tokens, N, K, slots, cap, device), M, size


@pytest.mark.parametrize("name", DEVICES)
def test_every_plan_is_sound(name):
    device = DEVICES[name]
    seen = 0
    for plan, M, size in plans(device):
        where = f"{plan} of {M} tokens"
        assert 1 <= size <= M, where
        # up: tiles cover the tokens, ranges the slabs
        assert plan.tile_tokens % 8 == 0, where
        assert plan.tile_tokens <= 1024, where
        assert (plan.num_tiles - 1) * plan.tile_tokens < plan.M, where
        assert plan.num_tiles * plan.tile_tokens >= plan.M, where
        slabs = ceil_div(plan.K, 64)
        assert (plan.num_ranges - 1) * plan.slabs_per_range < slabs, where
        assert slabs <= plan.num_ranges * plan.slabs_per_range, where
        assert 1 <= plan.neuron_ranges <= plan.num_neuron_groups, where
        assert plan.up_smem + 4096 <= device.smem_bytes, where
        # plan
        P = plan.num_panels
        assert plan.plan_cluster_smem <= device.smem_bytes, where
        # down: panels cover the neurons, shares the groups
        assert plan.panel_rows % 8 == 0, where
        assert plan.panel_rows <= planning.MAX_PANEL_ROWS, where
        assert (P - 1) * plan.panel_rows < plan.N <= P * plan.panel_rows, where
        assert plan.down_smem + 1024 <= device.smem_bytes, where
        assert 1 <= plan.down_splits <= max(1, plan.num_groups), where
        assert plan.cap % 8 == 0, where
        assert plan.most == plan.cap, where
        # buffers
        assert plan.num_pairs < 2**31, where
        assert 4 * plan.num_ranges * plan.num_pairs <= 2 << 30, where
        pairs = 8 * min(plan.cap, plan.panel_rows)  # of a group: all have rounds
        assert plan.group_rounds >= ceil_div(pairs, 16), where
        seen += 1
    assert seen > 300


@pytest.mark.parametrize(("K", "N"), SIZES)
def test_a_chunk_takes_little_memory(K, N):
    H200, M = DEVICES["H200"], 1 << 20
    cap, slots = hopper_cap(N), 32
    size = chunk_tokens(M, N, K, slots, cap, H200)
    plan = make_plan(size, N, K, slots, cap, H200)
    lists = plan.num_groups * plan.num_panels
    words = plan.M * plan.num_gate_tiles * (slots + 1) + plan.num_pairs * 2
    words += lists * (plan.group_rounds * 32 + plan.group_batches * planning.spec.BATCH_MASKS)
    words += plan.M * K if plan.num_panels > 1 else 0
    assert 4 * words <= 2.2 * 2**30 or size == 256
    assert 2 * planning.heavy_window(M, N, K) * (N + K) <= 2**30


def test_large_problems_fill_the_device():
    H200 = DEVICES["H200"]
    for M in (4096, 8192, 16384, 65536, 131072):
        for K, N in ((2048, 5632), (4096, 14336), (1024, 4096)):
            plan = make_plan(M, N, K, 64, hopper_cap(N), H200)
            blocks = plan.num_tiles * plan.num_ranges * plan.neuron_ranges
            assert blocks / (ceil_div(blocks, 132) * 132) > 0.9, plan
            assert 4 * plan.num_ranges * plan.num_pairs <= 512 << 20


def test_few_tokens_spread_over_the_device():
    for M in (1, 8, 64):
        plan = make_plan(M, 5632, 2048, 64, hopper_cap(5632), DEVICES["H200"])
        assert plan.num_tiles == 1
        assert 100 <= plan.num_ranges * plan.neuron_ranges <= 132


def test_grids_of_products_are_whole_clusters():
    for num_sms in (58, 108, 114, 132, 133):
        for M in TOKENS:
            for N in (8, 96, 5632, 65536):
                grid = planning.product_grid(M, N, num_sms)
                assert grid % 2 == 0
                assert 2 <= grid <= num_sms


def test_what_the_kernels_do_not_take():
    smem = DEVICES["H200"].smem_bytes
    assert why_unfit(2048, 5632, TILE, smem) is None
    assert why_unfit(64, MAX_COLUMNS, TILE, smem) is None
    assert "multiple of 64, not 100" in why_unfit(100, 5632, TILE, smem)
    assert "multiple of 8 up to 65536, not 300" in why_unfit(64, 300, TILE, smem)
    assert "not 65544" in why_unfit(64, 65544, TILE, smem)
    assert "tiles of 256 columns, not 128" in why_unfit(64, 96, 128, smem)
    assert "too little shared memory" in why_unfit(64, 65536, TILE, DEVICES["L4"].smem_bytes)
