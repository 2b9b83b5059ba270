"""The kernel of a whole step (kernels/decode/step.cuh), emulated on the CPU: right, and no thread
waits forever, whatever the order in which threads and copies go."""

from functools import partial

import emulated_step as emulated
import pytest
import torch
from compiled import EVERY_CASE
from emulated_kernels import EmulatedKernels, needs_emulator
from emulated_step import Model

pytestmark = needs_emulator
# name: (model, blocks, form)
CASES = {
    "plain": (partial(Model, 1536, 64, 24, 24, 776, 2, 70, gate_mean=-1.5), 100, "sparse"),
    "all at once": (
        partial(
            Model, 2048, 64, 32, 8, 1448, 1, 200, biases=True, head_norms=True, mapped=401, seed=3
        ),
        132,
        "sparse",
    ),
    "first token, nothing fires": (
        partial(Model, 1536, 64, 24, 24, 776, 1, 0, gate_mean=-9, seed=6),
        97,
        "sparse",
    ),
    "heads of 256": (
        partial(Model, 3072, 256, 12, 4, 776, 1, 1000, head_norms=True, gate_mean=-1.5, seed=5),
        98,
        "sparse",
    ),
    "dense": (
        partial(Model, 1536, 128, 12, 2, 776, 1, 150, biases=True, head_norms=True, seed=7),
        97,
        "dense",
    ),
    "screened": (
        partial(
            Model,
            1536,
            64,
            24,
            24,
            9200,
            2,
            70,
            gate_mean=-1.5,
            biases=True,
            mapped=201,
            missed=-0.4,
        ),
        100,
        "screened",
    ),
    "e4m3, 1536": (  # slices of an odd number of groups
        partial(Model, 1536, 64, 24, 24, 976, 2, 70, gate_mean=-1.5, mapped=201, fp8=True),
        100,
        "sparse",
    ),
}
MORE = {
    "e4m3, large x": (
        partial(Model, 1536, 64, 24, 24, 392, 1, 3, fp8=True, ffn_size=1e15),
        96,
        "sparse",
    ),
    "a window": (  # and 128 rows of the gate a block, the most for this size
        partial(Model, 1536, 64, 24, 24, 12288, 1, 600, window=100, gate_mean=-1.5, seed=4),
        96,
        "sparse",
    ),
    "parts of heads, more logits than rows": (  # 134 a block
        partial(Model, 1536, 64, 24, 6, 392, 1, 1000, gate_mean=-1.0, seed=9, vocabulary=12800),
        96,
        "sparse",
    ),
    "many fire": (
        partial(Model, 1536, 64, 24, 12, 4096, 1, 100, gate_mean=-0.2, seed=6),
        96,
        "sparse",
    ),
    "3584, screened": (  # two row blocks of some warps
        partial(Model, 3584, 128, 28, 4, 17000, 1, 400, gate_mean=-1.5, missed=-0.4, seed=16),
        113,
        "screened",
    ),
    "e4m3, small x": (
        partial(Model, 1536, 64, 24, 24, 392, 1, 3, fp8=True, ffn_size=1e-15),
        96,
        "sparse",
    ),
    "3584": (
        partial(Model, 3584, 128, 28, 4, 1056, 1, 400, biases=True, gate_mean=-1.5, seed=16),
        113,
        "sparse",
    ),
    "2048, screened": (
        partial(Model, 2048, 64, 32, 8, 5000, 1, 200, mapped=601, missed=-0.4, gate_mean=-0.2),
        132,
        "screened",
    ),
    "4096, screened": (
        partial(Model, 4096, 128, 32, 8, 2500, 1, 130, gate_mean=-0.5, mapped=150, missed=-0.4),
        132,
        "screened",
    ),
    "wide heads": (
        partial(Model, 1536, 128, 12, 2, 776, 1, 2000, biases=True, seed=12),
        100,
        "sparse",
    ),
    "dense, 2048": (
        partial(Model, 2048, 128, 16, 2, 1048, 2, 150, biases=True, head_norms=True, seed=7),
        132,
        "dense",
    ),
    "3072, dense": (
        partial(Model, 3072, 128, 24, 8, 1048, 1, 300, head_norms=True, seed=15),
        98,
        "dense",
    ),
    "e4m3, 2048": (
        partial(Model, 2048, 64, 32, 8, 1048, 1, 150, head_norms=True, fp8=True, seed=23),
        132,
        "sparse",
    ),
    "e4m3, 1536, all at once": (
        partial(
            Model, 1536, 128, 12, 2, 776, 1, 200, biases=True, head_norms=True, fp8=True, seed=21
        ),
        100,
        "sparse",
    ),
    "e4m3, 1536, dense": (
        partial(Model, 1536, 64, 24, 6, 776, 2, 65, biases=True, fp8=True, seed=22),
        96,
        "dense",
    ),
    "e4m3, 4096": (
        partial(Model, 4096, 128, 32, 8, 1056, 1, 130, gate_mean=-0.5, fp8=True, seed=26),
        132,
        "sparse",
    ),
    "e4m3, 3072, dense": (
        partial(Model, 3072, 128, 24, 8, 1048, 1, 300, head_norms=True, fp8=True, seed=24),
        98,
        "dense",
    ),
    "e4m3, 3584": (
        partial(
            Model, 3584, 128, 28, 4, 7456, 1, 400, biases=True, gate_mean=-1.5, fp8=True, seed=25
        ),
        113,
        "sparse",
    ),
    "4096": (
        partial(Model, 4096, 128, 32, 8, 1056, 1, 130, gate_mean=-0.5, seed=10),
        132,
        "sparse",
    ),
}
ALL = CASES | (MORE if EVERY_CASE else {})


@pytest.mark.parametrize("case", ALL)
def test_a_step(case):
    make, blocks, form = ALL[case]
    model = make()
    wanted = emulated.judge(model)  # before the cache is written to
    seeds = (1, 2) if case == "plain" and EVERY_CASE else (1,)
    done = emulated.emulate(EmulatedKernels(), model, blocks, form, seeds)
    assert (done.logits == done.logits[0]).all()
    error = (done.logits[0] - wanted.logits[0]).abs().max()
    assert error < 0.05, f"logits up to {wanted.logits.abs().max():.2f}"
    for made, exact in zip(done.new, wanted.new, strict=True):
        for own, other in zip(made, exact, strict=True):
            assert (own - other).abs().max() < 0.05
    # a gate within one rounding of 0 may fall on either side
    missed = (done.counts[0] - wanted.counts[0]).abs()
    assert (missed <= 2).all()


def test_what_a_screen_leaves_out_does_not_fire():
    """Nothing does where limits are infinite, but the map; all of it where they are -infinite."""

    def counts(form: str, missed: float) -> torch.Tensor:
        given = {"gate_mean": -0.5, "biases": True, "mapped": 32, "missed": missed}
        model = Model(1536, 64, 24, 24, 784, 1, 3, **given)
        return emulated.emulate(EmulatedKernels(), model, 96, form, (1,)).counts

    assert counts("screened", torch.inf).tolist() == [[32]]
    if EVERY_CASE:
        assert torch.equal(counts("screened", -torch.inf), counts("sparse", -torch.inf))


@pytest.mark.parametrize("value", [torch.inf, torch.nan] if EVERY_CASE else [torch.inf])
def test_beside_e4m3_what_is_not_finite_stays_so(value):
    model = Model(1536, 64, 24, 24, 392, 1, 3, fp8=True)
    model.weights[0]["values"][..., 5] = value  # of one column of each head, which o takes
    assert emulated.judge(model).logits.isnan().all()
    done = emulated.emulate(EmulatedKernels(), model, 96, "sparse", (1,))
    assert done.logits.isnan().all()
    assert (done.counts == model.N).all()  # a gate that is NaN fires
