"""The plain torch form of TwELL, judge of every kernel, against loops."""

import pytest
import torch

from twellctl.bundle.twell_config import check_twell, new_twell
from twellctl.bundle.twell_format import fires, keep_fired, pack

DTYPES = [torch.bfloat16, torch.float16]
# (M, N, tile, slots): one row, ragged last tiles, a tile wider than N, no row, all 65536 columns
SHAPES = [
    (1, 1, 1, 1), (1, 256, 256, 64), (5, 300, 256, 8), (7, 1000, 64, 64), (3, 17, 32, 5),
    (0, 40, 16, 4), (2, 65536, 256, 8), (2, 65536, 65536, 65536),
]  # fmt: skip
# NaN with a payload (both signs), +-Inf, +-0, the smallest and largest denormal, one, minus one
ODD_16 = {
    torch.bfloat16: [0x7FC1, 0xFFA5, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x007F, 0x8001, 0x3F80, 0xBF80],
    torch.float16: [0x7E01, 0xFD55, 0x7C00, 0xFC00, 0, 0x8000, 1, 0x03FF, 0x8001, 0x3C00, 0xBC00],
}


@pytest.fixture
def seed() -> int:
    """A new seed each run; a failure shows it as a local."""
    fresh = torch.seed() % 2**31
    torch.manual_seed(fresh)
    print(f"torch.manual_seed({fresh})")
    return fresh


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern alike: NaNs with payloads, infinities, denormals, both zeros."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def assert_packed(gate: torch.Tensor, tile: int, slots: int) -> None:
    """Counts, entries and rows that do not fit, by loops."""
    packed = pack(gate, tile, slots)
    fired = (gate > 0) | gate.isnan()
    bits = gate.contiguous().view(torch.int16).long() & 0xFFFF
    found = packed.entries.long() & 0xFFFF_FFFF
    assert packed.counts.shape == (len(gate), -(-gate.shape[1] // tile))
    for row in range(len(gate)):
        fits = bool(gate[row].isfinite().all())
        for tile_idx, own in enumerate(fired[row].split(tile)):
            columns = own.nonzero().flatten() + tile_idx * tile
            fits &= len(columns) <= slots
            assert packed.counts[row, tile_idx] == len(columns), f"row {row}, tile {tile_idx}"
            kept = columns[:slots]
            wanted = torch.zeros(slots, dtype=torch.long)
            wanted[: len(kept)] = bits[row, kept] << 16 | kept
            assert torch.equal(found[row, tile_idx], wanted), f"row {row}, tile {tile_idx}"
        assert packed.overflowed[row] == (not fits), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sparse_gates(dtype, shape, seed):
    *size, tile, slots = shape
    for shift in (2.0, 1.0):
        assert_packed((torch.randn(size) - shift).to(dtype), tile, slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits_and_strides(dtype, seed):
    wide = random_bits((70, 128), dtype)
    finite = wide.clone()
    finite[~finite.isfinite()] = -1
    for gate in (wide.T, wide[::3, 1::2], wide[:1].expand(4, -1), finite):
        assert_packed(gate, 32, 20)
        assert_packed(gate, 2, 1)  # tiles that need no padding


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_odd_value_alone(dtype):
    for pattern in ODD_16[dtype]:
        gate = torch.full((3, 40), -1.0, dtype=dtype)
        gate[1, 17] = torch.tensor([pattern], dtype=torch.uint16).view(dtype)[0]
        assert_packed(gate, 16, 2)


def test_entries_by_hand():
    gate = torch.tensor([[1.0, -1.0, 0.5, 0.0, 2.0, -0.0]])
    packed = pack(gate.bfloat16(), tile=4, slots=3)
    assert packed.counts.tolist() == [[2, 1]]
    assert packed.entries.tolist() == [[[0x3F80_0000, 0x3F00_0002, 0], [0x4000_0004, 0, 0]]]
    half = pack(gate.half(), tile=4, slots=3)
    assert half.entries.tolist() == [[[0x3C00_0000, 0x3800_0002, 0], [0x4000_0004, 0, 0]]]


def test_all_zero_all_full_exactly_full_and_one_over():
    gate = torch.zeros(5, 50).bfloat16()
    gate[1] = -0.0
    gate[2] = 1
    gate[3, 16:20] = 2  # four slots of the second tile
    gate[4, 16:21] = 2
    assert_packed(gate, 16, 4)
    assert pack(gate, 16, 4).overflowed.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32, torch.float64])
def test_what_fires(dtype):
    least = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    gate = torch.tensor([[least, torch.inf, torch.nan, 0.0, -0.0, -least, -torch.inf]], dtype=dtype)
    assert fires(gate).tolist() == [[True, True, True, False, False, False, False]]
    assert not keep_fired(gate)[:, 3:].signbit().any()


def test_refused_with_a_sentence():
    for gate in (torch.zeros(3).half(), torch.zeros(1, 2), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"pack takes \[M, N\] of bf16 or fp16, got "):
            pack(gate)
    for N, tile, slots in ((65537, 16, 4), (16, 16, 17), (16, 16, 0), (16, 0, 0), (16, 65537, 1)):
        with pytest.raises(ValueError, match=f"got {N} neurons, {slots} slots of {tile}$"):
            pack(torch.zeros(1, N).half(), tile, slots)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format_version": 2}, "format_version 2"),
        ({"slots": [64]}, "2 slots"),
        ({"thresholds": [0.0, 0.0]}, "plain ReLU: fine-tune again from the SiLU model"),
        ({"tile": 0}, "a tile of 1 to 65536, got 0"),
        ({"tile": True}, "got True"),
        ({"slots": [64, 257]}, "slots of 1 to 256"),
        ({"slots": [64, 1.0]}, "got 1.0"),
    ],
)
def test_check_twell(change, sentence):
    twell = new_twell(2, "model", "silu")
    assert check_twell(twell, 2) is twell
    with pytest.raises(ValueError, match=sentence):
        check_twell(twell | change, 2)
