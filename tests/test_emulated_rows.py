"""The kernel of a step of several rows (kernels/decode/step_rows.cuh), emulated on the CPU: right,
and no thread waits forever, whatever the order in which threads and copies go."""

import platform
import shutil

import emulated_rows as emulated
import pytest
from emulated_step import Model, judge

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="the emulator needs g++ on x86-64",
)
# name: (model, blocks)
CASES = {
    "plain": (Model(2048, 64, 32, 32, 1056, 2, 150, gate_mean=-1.5, rows=16), 132),
    "all at once": (
        Model(2048, 64, 32, 8, 1048, 2, 300, biases=True, head_norms=True, seed=3, rows=7),
        132,
    ),
    "a window": (
        Model(2048, 64, 32, 32, 1048, 1, 600, window=100, seed=4, rows=3),
        128,
    ),
    "nothing fires": (Model(2048, 64, 32, 32, 1048, 2, 65, gate_mean=-9.0, seed=6, rows=2), 129),
    "many fire": (Model(2048, 64, 32, 16, 6336, 1, 100, gate_mean=-0.2, seed=6, rows=16), 132),
    "wide heads": (
        Model(2048, 128, 16, 2, 1048, 2, 200, biases=True, head_norms=True, seed=7, rows=16),
        144,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated_rows")


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_rows(case, folder):
    model, blocks = CASES[case]
    step = emulated.library(folder, model.D)
    # before the cache is written to
    wanted = [judge(row, late_root=True) for row in emulated.rows_of(model)]
    found = emulated.emulate(step, model, blocks, seeds=(1, 2, 3) if case == "plain" else (1,))
    for row, (done, exact) in enumerate(zip(found, wanted, strict=True)):
        assert (done.logits == done.logits[0]).all()
        # a gate within one rounding of 0 may fall on either side, and count for much
        missed = (done.counts[0] - exact.counts[0]).abs()
        assert (missed <= 2).all(), f"row {row}"
        error = (done.logits[0] - exact.logits[0]).abs().max()
        assert error < (0.5 if missed.any() else 0.05), f"row {row}"
        for made, right in zip(done.new, exact.new, strict=True):
            for own, other in zip(made, right, strict=True):
                assert (own - other).abs().max() < (0.5 if missed.any() else 0.05), f"row {row}"
