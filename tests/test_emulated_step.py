"""The kernel of a whole step (kernels/decode/step.cuh), emulated on the CPU: right, and no thread
waits forever, whatever the order in which threads and copies go."""

import platform
import shutil

import emulated_step as emulated
import pytest
from emulated_step import Model

from twellctl.decoding.whole_step import MOST_OF_BLOCK

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="the emulator needs g++ on x86-64",
)
# name: (model, blocks, sparse)
CASES = {
    "plain": (Model(2048, 64, 32, 32, 1024, 2, 70, gate_mean=-1.5), 132, True),
    "all at once": (
        Model(2048, 64, 32, 8, 1048, 2, 200, biases=True, head_norms=True, seed=3),
        132,
        True,
    ),
    "parts of heads": (Model(2048, 64, 32, 8, 1048, 1, 1000, gate_mean=-1.0, seed=9), 132, True),
    "a window": (Model(2048, 64, 32, 32, 1048, 1, 600, window=100, seed=4), 128, True),
    "first token": (Model(2048, 64, 32, 32, 1048, 1, 0, seed=5), 130, True),
    "nothing fires": (Model(2048, 64, 32, 32, 1048, 2, 65, gate_mean=-9.0, seed=6), 129, True),
    "many fire": (Model(2048, 64, 32, 16, 5632, 1, 100, gate_mean=-0.2, seed=6), 132, True),
    "wide heads": (
        Model(2048, 128, 16, 2, 1048, 2, 150, biases=True, head_norms=True, seed=7),
        132,
        True,
    ),
    "dense": (Model(2048, 64, 32, 8, 1048, 2, 100, biases=True, seed=8), 132, False),
    "4096": (Model(4096, 128, 32, 8, 1056, 1, 130, gate_mean=-0.5, seed=10), 132, True),
    "4096, dense": (Model(4096, 128, 32, 8, 1056, 1, 500, biases=True, seed=11), 132, False),
    "1536": (Model(1536, 128, 12, 2, 1056, 2, 2000, biases=True, seed=12), 132, True),
    "1536, dense": (Model(1536, 128, 12, 2, 1048, 1, 70, biases=True, seed=13), 96, False),
    "3072": (Model(3072, 128, 24, 8, 1056, 1, 130, gate_mean=-0.5, seed=14), 132, True),
    "3072, dense": (Model(3072, 128, 24, 8, 1048, 1, 300, head_norms=True, seed=15), 98, False),
    "3584": (  # 132 rows of the gate a block
        Model(3584, 128, 28, 4, 14916, 1, 400, biases=True, gate_mean=-1.5, seed=16),
        113,
        True,
    ),
    "3584, dense": (Model(3584, 128, 28, 4, 1048, 1, 70, biases=True, seed=17), 113, False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize("case", CASES)
def test_a_step(case, folder):
    model, blocks, sparse = CASES[case]
    step = emulated.library(folder, model.K, model.D, sparse)
    assert (step.most_quads(), step.most_rows()) == MOST_OF_BLOCK[model.K]
    wanted = emulated.judge(model)  # before the cache is written to
    done = emulated.emulate(step, model, blocks, seeds=(1, 2) if case == "plain" else (1,))
    assert (done.logits == done.logits[0]).all()
    error = (done.logits[0] - wanted.logits[0]).abs().max()
    assert error < 0.05, f"logits up to {wanted.logits.abs().max():.2f}"
    for made, exact in zip(done.new, wanted.new, strict=True):
        for own, other in zip(made, exact, strict=True):
            assert (own - other).abs().max() < 0.05
    # a gate within one rounding of 0 may fall on either side
    missed = (done.counts[0] - wanted.counts[0]).abs()
    assert (missed <= 2).all()
