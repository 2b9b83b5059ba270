"""The kernels `up`, `hidden` and `down` by themselves, over lists made by NumPy, in float64."""

import numpy as np
import pytest
import torch
from list_builder import Lists, build_lists, from_bf16, masks_of, to_bf16
from list_reference import Shape

from twellctl.bundle.twell_launch import device_limits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"  # the emulator has another (test_emulated_grad.py)
DOWN_STAGES = 32768
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


def on_device(array: np.ndarray) -> torch.Tensor:
    """The same bits, signed."""
    return torch.from_numpy(array.view(array.dtype.str.replace("u", "i"))).to(DEVICE)


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return to_bf16(rng.standard_normal(shape) * scale)


def launch_up(
    kernels, lists: Lists, x, w_up, slabs_per_range: int, neuron_ranges: int, slabs: int
) -> torch.Tensor:
    """partial [Q, places], over NaN."""
    shape, K = lists.shape, x.shape[1]
    num_ranges = -(-(K // 64) // slabs_per_range)
    places = shape.num_tiles * shape.tile_tokens * shape.cap
    partial = torch.full((num_ranges, places), float("nan"), device=DEVICE)
    kernels.launch(
        "up",
        (shape.num_tiles, num_ranges, neuron_ranges),
        512,
        (
            *(x, w_up, shape.M, shape.N, K, shape.tile_tokens, shape.cap, slabs_per_range),
            *(on_device(lists.pair_start), on_device(lists.pairs), partial, np.int64(places)),
        ),
        slabs * shape.tile_tokens * 128,
    )
    return partial


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
    tensors = on_device(x), on_device(w_up)
    ranges = min(slabs_per_range, K // 64), neuron_ranges
    partial = launch_up(kernels, lists, *tensors, *ranges, slabs)
    again = launch_up(kernels, lists, *tensors, *ranges, slabs)
    assert torch.equal(partial.view(torch.int32), again.view(torch.int32)), (
        "differs from run to run"
    )
    found = partial.cpu().numpy()[:, lists.place]
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
    rounds = on_device(lists.rounds)
    masks = torch.zeros(masks_of(lists).shape, dtype=torch.int32, device=DEVICE)
    kernels.launch(
        "hidden",
        grid or (shape.num_tiles,),
        512,
        (
            *(on_device(partial), np.int64(places), ranges, on_device(lists.links)),
            *(on_device(lists.pair_start), on_device(lists.pairs), shape.M, shape.N),
            *(shape.tile_tokens, shape.cap, shape.panel_rows, shape.num_panels),
            *(shape.group_rounds, on_device(bias) if has_bias else None),
            *(on_device(lists.num_rounds), rounds, masks, None, None, None),
        ),
        2 * room,
    )
    up = partial[:, lists.place].sum(0) + (from_bf16(bias)[lists.column] if has_bias else 0)
    wanted = lists.rounds.reshape(-1).copy()
    wanted[lists.dest] = to_bf16(from_bf16(lists.gate) * from_bf16(to_bf16(up)))
    found = rounds.cpu().numpy().view(np.uint16).reshape(-1)
    np.testing.assert_array_equal(found, wanted)

    found_masks, wanted_masks = masks.cpu().numpy().view(np.uint32), masks_of(lists)
    for q, num in enumerate(lists.num_rounds):
        for batch in range(-(-num // 8)):
            live = ((1 << min(8, num - 8 * batch)) - 1) * 0x01010101
            differ = (found_masks[q, batch] ^ wanted_masks[q, batch]) & np.uint32(live)
            assert not differ.any(), f"masks of (group, panel) {q}, batch {batch}"


def run_down(
    kernels, lists: Lists, rounds: np.ndarray, w_down: np.ndarray, bias: np.ndarray | None, splits
) -> np.ndarray:
    """float32 [M, K]: y, over NaN; `w_down` [N, K]."""
    shape, K = lists.shape, w_down.shape[1]
    y = torch.full((shape.M, K), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    sums = torch.full((shape.M, K), float("nan"), device=DEVICE) if shape.num_panels > 1 else None
    given = [on_device(a) for a in (lists.num_rounds, rounds, masks_of(lists))]
    weights = on_device(w_down), None if bias is None else on_device(bias)
    for panel in range(shape.num_panels):
        kernels.launch(
            "down",
            (K // 16, splits),
            512,
            (
                *(*weights, *given, shape.M, shape.N, K, panel, shape.panel_rows),
                *(shape.num_panels, shape.group_rounds, sums, y),
            ),
            shape.panel_rows * 32 + DOWN_STAGES,
        )
    return y.float().cpu().numpy()


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
    found = run_down(kernels, lists, lists.rounds, w_down, bias, splits)
    again = run_down(kernels, lists, lists.rounds, w_down, bias, splits)
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
    plain = run_down(kernels, lists, lists.rounds, w_down, None, 1)
    found = run_down(kernels, lists, rounds, w_down, None, 1)
    is_odd = np.isin(np.arange(shape.M), lists.token[odd])
    assert not np.isfinite(found[is_odd]).any()
    np.testing.assert_array_equal(found[~is_odd], plain[~is_odd])
