"""The kernel of a step of several rows (kernels/decode/step_rows.cuh), emulated on the CPU: right,
and no thread waits forever, whatever the order in which threads and copies go."""

from functools import partial

import emulated_rows as emulated
import pytest
from emulated_kernels import EVERY_CASE, EmulatedKernels, needs_emulator
from emulated_step import Model, judge

pytestmark = needs_emulator
# name: (model, blocks)
CASES = {
    "plain": (partial(Model, 2048, 64, 32, 32, 1056, 2, 150, gate_mean=-1.5, rows=2), 132),
    "a window": (partial(Model, 2048, 64, 32, 32, 1048, 1, 600, window=100, seed=4, rows=3), 128),
    "nothing fires": (
        partial(Model, 2048, 64, 32, 8, 1048, 1, 65, gate_mean=-9, seed=6, rows=2, vocabulary=7680),
        129,  # more than six octets of logits a block
    ),
    "many fire": (
        partial(Model, 2048, 64, 32, 16, 6336, 1, 100, gate_mean=-0.2, seed=6, rows=16),
        132,
    ),
}
MORE = {
    "wide heads": (
        partial(
            Model, 2048, 128, 16, 2, 1048, 1, 200, biases=True, head_norms=True, seed=7, rows=9
        ),
        144,
    ),
}
ALL = CASES | (MORE if EVERY_CASE else {})


@pytest.mark.parametrize("case", ALL)
def test_a_step_of_rows(case):
    make, blocks = ALL[case]
    model = make()
    # before the cache is written to
    wanted = [judge(row, late_root=True) for row in emulated.rows_of(model)]
    seeds = (1, 2) if case == "a window" else (1,)
    found = emulated.emulate(EmulatedKernels(), model, blocks, seeds)
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
