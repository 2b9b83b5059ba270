"""The kernels for few tokens over e4m3 weights, emulated: what tests/gpu/test_few_e4m3.py asks."""

import pytest
from compiled import EVERY_CASE
from emulated_few import FewKernels, of_e4m3
from emulated_kernels import needs_emulator

pytestmark = needs_emulator


@pytest.fixture(scope="module")
def kernels():
    return FewKernels()


@pytest.mark.parametrize(
    ("M", "K", "N"),
    [
        *((M, 128, 8) for M in (1, 3, 8, 9)),
        *((M, 2176, 136) for M in (1, 8, 9)),
        # those of many tokens take long to compile
        *([(17, 128, 8), (40, 128, 8), (17, 1024, 24)] if EVERY_CASE else []),
    ],
)
def test_whole_numbers_are_exact(kernels, M, K, N):
    of_e4m3.test_whole_numbers_are_exact(kernels, M, K, N, -1.0, bool(M % 2))


@pytest.mark.parametrize("M", [1, 16] if EVERY_CASE else [1])
def test_long_inputs_do_not_stay(kernels, M):
    of_e4m3.test_whole_numbers_are_exact(kernels, M, 16384, 24, -1.0, True)


@pytest.mark.parametrize("M", [1, 12])
def test_numbers_err_as_bf16_rounds(kernels, M):
    of_e4m3.test_numbers_err_as_bf16_rounds(kernels, M, 1024, 24)


@pytest.mark.parametrize("M", [1, 8, 16])
def test_rows_of_any_size(kernels, M):
    of_e4m3.test_rows_of_any_size(kernels, M)


@pytest.mark.parametrize(("M", "N"), [(4, 128), *([(17, 264)] if EVERY_CASE else [])])
def test_no_pairs_and_all_pairs(kernels, M, N):
    of_e4m3.test_no_pairs_and_all_pairs(kernels, M, N)


@pytest.mark.parametrize("num", [1, 129])
def test_any_number_of_pairs(kernels, num):
    of_e4m3.test_any_number_of_pairs(kernels, 4, num)


def test_pairs_of_rows_of_any_size(kernels):
    of_e4m3.test_pairs_of_rows_of_any_size(kernels, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite(kernels, bad):
    of_e4m3.test_rows_that_are_not_finite(kernels, 9, bad)
    of_e4m3.test_pairs_of_rows_that_are_not_finite(kernels, 4, bad)
