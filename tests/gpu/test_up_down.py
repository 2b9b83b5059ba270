"""The kernels `up`, `hidden` and `down` by themselves, over lists made by NumPy, in float64."""

import numpy as np
import pytest
import torch
from list_builder import Lists, build_lists, from_bf16, masks_of, to_bf16
from list_launches import DOWN_STAGES, run_down, run_hidden, run_hidden_kept, run_up
from list_reference import Shape

from twellctl.bundle.twell_launch import device_limits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"  # the emulator has another (test_emulated_grad.py)
NAN, INF = 0x7FC0, 0x7F80
# kind of gate, shape, K: ragged tiles and groups, one token, several panels, empty, full, spills
CASES = [
    ("usual", Shape(70, 264, 64, 64, 32, 264), 128),
    ("usual", Shape(1, 5632, 64, 64, 8, 5632), 256),
    ("usual", Shape(3000, 5632, 64, 240, 896, 5632), 512),
    ("skewed", Shape(333, 2056, 256, 88, 128, 2056), 192),
    ("skewed", Shape(333, 2056, 256, 88, 128, 520), 192),
    ("skewed", Shape(700, 1032, 256, 1032, 256, 1032), 64),
    ("none", Shape(9, 256, 64, 64, 8, 256), 128),
    ("some rows", Shape(257, 768, 256, 768, 120, 384), 64),
    ("one class", Shape(120, 2048, 64, 96, 64, 2048), 128),
    ("all", Shape(9, 72, 256, 72, 8, 72), 64),
    ("all", Shape(100, 264, 256, 264, 104, 264), 128),
    ("all", Shape(19, 1032, 256, 1032, 16, 344), 192),
]


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return to_bf16(rng.standard_normal(shape) * scale)


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize(("slabs_per_range", "neuron_ranges"), [(99, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("slabs", [1, 2])
def test_up_gives_partial_dot_products(
    kernels, kind, shape, K, slabs_per_range, neuron_ranges, slabs
):
    if slabs * shape.tile_tokens * 128 > device_limits(0).smem_bytes:
        pytest.skip("too large a tile for this device's shared memory")
    rng = np.random.default_rng(1)
    lists = build_lists(shape, kind, 2)
    x, w_up = random_bf16(rng, shape.M, K), random_bf16(rng, shape.N, K, scale=K**-0.5)
    ranges = min(slabs_per_range, K // 64), neuron_ranges
    partial, again = (
        run_up(kernels, DEVICE, lists, x, w_up, ranges, slabs).view(torch.int32) for _ in range(2)
    )
    assert torch.equal(partial, again), "differs from run to run"
    found = partial.view(torch.float32).cpu().numpy()[:, lists.place]
    for q, of_range in enumerate(found):
        part = slice(q * ranges[0] * 64, (q + 1) * ranges[0] * 64)
        rows, columns = from_bf16(x[lists.token, part]), from_bf16(w_up[lists.column, part])
        wanted = (rows.astype(float) * columns).sum(1)
        np.testing.assert_allclose(of_range, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("ranges", "grid", "room"),
    [(1, (1000, 1), 0), (3, (7, 3), 0), (9, (40, 2), 0), (1, None, 5000), (7, None, 64)],
)
def test_hidden_fills_the_rounds(kernels, kind, shape, K, has_bias, ranges, grid, room):
    rng = np.random.default_rng(3)
    lists = build_lists(shape, kind, 4)
    places = shape.num_tiles * shape.tile_tokens * shape.cap
    # eighths: every sum is exact
    partial = (rng.integers(-64, 64, (ranges, places)) / 8).astype(np.float32)
    bias = to_bf16(rng.integers(-64, 64, shape.N) / 8) if has_bias else None
    found, found_masks = run_hidden(kernels, DEVICE, lists, partial, bias, grid, room)
    up = partial[:, lists.place].sum(0) + (from_bf16(bias)[lists.column] if has_bias else 0)
    wanted = lists.rounds.reshape(-1).copy()
    wanted[lists.dest] = to_bf16(from_bf16(lists.gate) * from_bf16(to_bf16(up)))
    np.testing.assert_array_equal(found, wanted)
    assert_masks(found_masks, lists)


def assert_masks(found: np.ndarray, lists: Lists) -> None:
    """Those of the rounds that there are."""
    wanted = masks_of(lists)
    for q, num in enumerate(lists.num_rounds):
        for batch in range(-(-num // 8)):
            live = ((1 << min(8, num - 8 * batch)) - 1) * 0x01010101
            differ = (found[q, batch] ^ wanted[q, batch]) & np.uint32(live)
            assert not differ.any(), f"masks of (group, panel) {q}, batch {batch}"


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize("grid", [(1000, 1), (7, 3)])
def test_hidden_kept_fills_the_rounds_and_keeps_gate_and_up(kernels, kind, shape, K, grid):
    rng = np.random.default_rng(9)
    lists = build_lists(shape, kind, 10)
    sums = rng.standard_normal(shape.num_tiles * shape.tile_tokens * shape.cap, np.float32)
    found, found_masks, kept = run_hidden_kept(kernels, DEVICE, lists, sums, grid)
    up = to_bf16(sums[lists.place])
    wanted = lists.rounds.reshape(-1).copy()
    wanted[lists.dest] = to_bf16(from_bf16(lists.gate) * from_bf16(up))
    np.testing.assert_array_equal(found, wanted)
    assert_masks(found_masks, lists)
    np.testing.assert_array_equal(kept[lists.place], lists.gate | up.astype(np.uint32) << 16)


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_down_gives_y(kernels, kind, shape, K, splits, has_bias):
    if shape.panel_rows * 32 + DOWN_STAGES > device_limits(0).smem_bytes:
        pytest.skip("too large a panel for this device's shared memory")
    rng = np.random.default_rng(5)
    lists = build_lists(shape, kind, 6)
    w_down = random_bf16(rng, shape.N, K, scale=0.05)
    bias = random_bf16(rng, K) if has_bias else None
    wanted = lists.dense_gate() @ from_bf16(w_down).astype(float)
    wanted += from_bf16(bias) if has_bias else 0
    given = kernels, DEVICE, lists, lists.rounds, w_down, bias, splits
    found, again = run_down(*given), run_down(*given)
    np.testing.assert_array_equal(found, again, "differs from run to run")
    scale = max(1e-3, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=2e-5 * scale)


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_finite_stays_with_its_token(kernels, value):
    shape, K = Shape(700, 1408, 64, 64, 248, 1408), 64
    lists = build_lists(shape, "usual", 7)
    w_down = random_bf16(np.random.default_rng(8), shape.N, K)
    odd = np.arange(len(lists.dest)) % 997 == 5
    rounds = lists.rounds.copy()
    rounds.reshape(-1)[lists.dest[odd]] = value
    plain, found = (
        run_down(kernels, DEVICE, lists, given, w_down, None, 1) for given in (lists.rounds, rounds)
    )
    is_odd = np.isin(np.arange(shape.M), lists.token[odd])
    assert not np.isfinite(found[is_odd]).any()
    np.testing.assert_array_equal(found[~is_odd], plain[~is_odd])
