"""The plain torch form on a CUDA device: the same bits as on the CPU, and nothing done there."""

import dataclasses

import pytest
import torch

from twellctl.bundle.twell_format import Packed, pack, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {2: torch.int16, 4: torch.int32}
# (M, N, tile, slots): one row, ragged last tile, exactly full, overflowing, no row, all columns
SHAPES = [
    (1, 256, 256, 64),
    (129, 1000, 256, 64),
    (7, 512, 64, 64),
    (65, 300, 32, 8),
    (0, 512, 256, 64),
    (3, 65536, 256, 16),
]


def assert_same_bits(ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert ours.device.type == DEVICE, f"{what} lies on {ours.device}"
    ours = ours.cpu()
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), what
    if ours.is_floating_point():
        ours, expected = (x.view(BITS[x.dtype.itemsize]) for x in (ours, expected))
    differ = (ours != expected).nonzero().tolist()
    assert not differ, f"{what} differs at (row, tile or column, slot) {differ[:5]}"


def assert_same_packed(ours: Packed, expected: Packed) -> None:
    for field in dataclasses.fields(Packed):
        a, b = getattr(ours, field.name), getattr(expected, field.name)
        if isinstance(b, torch.Tensor):
            assert_same_bits(a, b, field.name)
        else:
            assert a == b, field.name


def gate_of(M: int, N: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows from almost empty to almost full; in some, what is not finite, and both zeros."""
    shift = torch.linspace(-3, 1, max(M, 1))[:M, None]
    gate = (torch.randn(M, N) + shift).to(dtype)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=dtype)
    for row in range(0, M, 4):
        gate[row, torch.randint(0, N, (1,))] = odd[row // 4 % len(odd)]
    return gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_and_unpack_give_the_bits_of_the_cpu(dtype, shape):
    M, N, tile, slots = shape
    torch.manual_seed(0)
    gate = gate_of(M, N, dtype)
    expected = pack(gate, tile, slots)
    ours = pack(gate.to(DEVICE), tile, slots)
    assert_same_packed(ours, expected)
    assert_same_bits(unpack(ours), unpack(expected), "unpack")
