"""The plain torch form of TwELL, judge of every kernel, against loops and the dense equation."""

import pytest
import torch

from twellctl.bundle.twell_config import check_twell, new_twell
from twellctl.bundle.twell_format import fired_positions, fires, keep_fired, pack, unpack

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# (M, N, tile, slots): one row, ragged last tiles, a tile wider than N, no row, all 65536 columns
SHAPES = [
    (1, 1, 1, 1), (1, 256, 256, 64), (5, 300, 256, 8), (7, 1000, 64, 64), (3, 17, 32, 5),
    (0, 40, 16, 4), (2, 65536, 256, 8), (2, 65536, 65536, 65536),
]  # fmt: skip


@pytest.fixture
def seed() -> None:
    """A new one each run; a failure shows it. torch.manual_seed takes it."""
    print("seed", torch.seed())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.dtype.itemsize])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern alike: NaNs with payloads, infinities, denormals, both zeros."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def expected(gate: torch.Tensor) -> torch.Tensor:
    fired = (gate > 0) | gate.isnan()
    return torch.where(fired, gate, torch.zeros((), dtype=gate.dtype))


def assert_round_trip(gate: torch.Tensor, tile: int, slots: int) -> None:
    packed = pack(gate, tile, slots)
    wanted, got = bits(expected(gate)), bits(unpack(packed))
    wrong = [(r, c // tile, c) for r, c in (wanted != got).nonzero().tolist()]
    assert not wrong, f"(row, tile, column) that differ: {wrong[:5]}"
    assert_sound(gate, packed, slots)


def assert_sound(gate: torch.Tensor, packed, slots: int) -> None:
    """Counts, columns, values and backup rows, by loops."""
    fired = (gate > 0) | gate.isnan()
    assert torch.equal(packed.nnz, fired.sum(-1))
    in_backup = []
    for row in range(gate.shape[0]):
        fits = bool(gate[row].isfinite().all())
        for tile_idx, columns in enumerate(fired[row].split(packed.tile)):
            fits &= int(columns.sum()) <= slots
            assert packed.counts[row, tile_idx] == columns.sum(), f"row {row}, tile {tile_idx}"
        in_backup += [] if fits else [row]
    assert packed.overflowed.nonzero().flatten().tolist() == in_backup
    assert packed.backup_row[packed.overflowed].tolist() == list(range(len(in_backup)))
    assert torch.equal(bits(packed.backup), bits(expected(gate[packed.overflowed])))

    row, column, value = fired_positions(packed)
    wanted_row, wanted_column = (fired & ~packed.overflowed[:, None]).nonzero(as_tuple=True)
    assert torch.equal(row, wanted_row)
    assert torch.equal(column, wanted_column)
    assert torch.equal(bits(value), bits(gate[row, column]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_of_sparse_gates(dtype, shape, seed):
    *size, tile, slots = shape
    for shift in (2.0, 1.0):
        gate = torch.randn(size) - shift
        gate[:, -1:] = 1  # the last of 65536 columns, which int16 has for -1, too
        assert_round_trip(gate.to(dtype), tile, slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_of_any_bits(dtype, seed):
    assert_round_trip(random_bits((64, 70), dtype), 32, 16)
    finite = random_bits((64, 70), dtype)
    finite[~finite.isfinite()] = -1
    assert_round_trip(finite, 32, 20)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_round_trip_of_all_that_16_bits_hold(dtype):
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(-1, 64)
    assert_round_trip(patterns, 16, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_all_full_exactly_full_and_one_over(dtype):
    gate = torch.zeros(5, 50, dtype=dtype)
    gate[1] = -0.0
    gate[2] = 1
    gate[3, 16:20] = 2  # four slots of the second tile
    gate[4, 16:21] = 2
    assert_round_trip(gate, 16, 4)
    packed = pack(gate, 16, 4)
    assert packed.overflowed.tolist() == [False, False, True, False, True]
    assert packed.backup_row.tolist() == [-1, -1, 0, -1, 1]
    assert packed.counts[2].tolist() == [16, 16, 16, 2]
    assert packed.nnz.tolist() == [0, 0, 50, 4, 5]
    assert not unpack(packed)[:2].signbit().any()


def test_entries_by_hand():
    gate = torch.tensor([[1.0, -1.0, 0.5, 0.0, 2.0, -0.0]])
    packed = pack(gate.bfloat16(), tile=4, slots=3)
    assert packed.counts.tolist() == [[2, 1]]
    assert packed.entries.tolist() == [[[0x3F80_0000, 0x3F00_0002, 0], [0x4000_0004, 0, 0]]]
    assert packed.columns is None
    half = pack(gate.half(), tile=4, slots=3)
    assert half.entries.tolist() == [[[0x3C00_0000, 0x3800_0002, 0], [0x4000_0004, 0, 0]]]
    single = pack(gate - 0.5, tile=4, slots=2)
    assert single.entries is None
    assert single.columns.tolist() == [[[0, 0], [4, 0]]]
    assert single.values.tolist() == [[[0.5, 0.0], [1.5, 0.0]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype, seed):
    wide = random_bits((70, 128), dtype)
    for gate in (wide.T, wide[::3, 1::2], wide[:1].expand(4, -1)):
        assert_round_trip(gate, 32, 20)
        assert_round_trip(gate, 2, 1)  # tiles that need no padding


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_fires(dtype):
    least = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    gate = torch.tensor([[least, torch.inf, torch.nan, 0.0, -0.0, -least, -torch.inf]], dtype=dtype)
    assert fires(gate).tolist() == [[True, True, True, False, False, False, False]]
    assert not keep_fired(gate)[:, 3:].signbit().any()


def test_refused_with_a_sentence():
    with pytest.raises(ValueError, match="at most 65536 neurons, got 65537"):
        pack(torch.zeros(1, 65537))
    for gate in (torch.zeros(3), torch.zeros(1, 2, 3), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"pack takes \[M, N\]"):
            pack(gate)
    for tile, slots in ((16, 17), (16, 0), (0, 0), (65537, 1)):
        with pytest.raises(ValueError, match="1 <= slots <= tile"):
            pack(torch.zeros(1, 16), tile, slots)


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
