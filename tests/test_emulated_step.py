"""The kernel of a whole step (kernels/decode/step.cuh), emulated on the CPU: right, and no thread
waits forever, whatever the order in which threads and copies go."""

from functools import partial

import emulated_step as emulated
import pytest
import torch
from compiled import EVERY_CASE
from emulated_kernels import EmulatedKernels, needs_emulator
from emulated_step import Model

from twellctl.bundle.twell_spec import STEP_KINDS

pytestmark = needs_emulator


def case(*sizes, blocks: int = 100, form: str = "sparse", **how) -> tuple:
    """(model, blocks, form); `sizes`: K, D, H, Hkv, N, layers, position of a `Model`."""
    return partial(Model, *sizes, **how), blocks, form


ALL_OF_IT = {"biases": True, "head_norms": True}
CASES = {
    "plain": case(1536, 128, 12, 3, 776, 2, 70, gate_mean=-1.5),
    "first token, nothing fires": case(
        1536, 128, 12, 2, 392, 1, 0, gate_mean=-9, seed=6, blocks=97
    ),
    "screened": case(
        *(1536, 128, 12, 4, 4600, 1, 70),
        **{"gate_mean": -1.5, "biases": True, "mapped": 201, "missed": -0.4, "form": "screened"},
    ),
    # slices of an odd number of groups
    # two and three groups of neurons of a block, and a map between two
    "int4": case(
        1536, 128, 12, 3, 4680, 1, 70, **ALL_OF_IT, gate_mean=-1.0, mapped=201, kind="int4"
    ),
    "int4, dense": case(
        1536, 128, 12, 2, 776, 2, 150, **ALL_OF_IT, seed=7, blocks=97, form="dense", kind="int4"
    ),
}
MORE = {  # test_emulated_draft_head has a dense one over e4m3
    "dense": case(1536, 128, 12, 2, 776, 1, 150, **ALL_OF_IT, seed=7, blocks=97, form="dense"),
    "all at once": case(2048, 64, 32, 8, 1448, 1, 200, **ALL_OF_IT, mapped=401, seed=3, blocks=132),
    "e4m3, 1536": case(1536, 128, 12, 12, 976, 1, 70, gate_mean=-1.5, mapped=201, kind="e4m3"),
    "heads of 256": case(
        3072, 256, 12, 2, 392, 1, 330, head_norms=True, gate_mean=-1.5, seed=5, blocks=98
    ),
    "e4m3, large x": case(1536, 128, 12, 12, 392, 1, 3, kind="e4m3", ffn_size=1e15, blocks=96),
    # and 128 rows of the gate a block, the most for this size
    "a window": case(
        1536, 128, 12, 12, 12288, 1, 600, window=100, gate_mean=-1.5, seed=4, blocks=96
    ),
    "parts of heads, more logits than rows": case(  # 134 a block
        1536, 128, 12, 3, 392, 1, 1000, gate_mean=-1.0, seed=9, vocabulary=12800, blocks=96
    ),
    "many fire": case(1536, 128, 12, 6, 4096, 1, 100, gate_mean=-0.2, seed=6, blocks=96),
    "3584, screened": case(  # two row blocks of some warps, and more units than the ring holds
        *(3584, 128, 28, 4, 9 * 16 * 113 + 456, 1, 400),
        **{"gate_mean": -1.5, "missed": -0.4, "seed": 16, "blocks": 113, "form": "screened"},
        mapped=456,
    ),
    "e4m3, small x": case(1536, 128, 12, 12, 392, 1, 3, kind="e4m3", ffn_size=1e-15, blocks=96),
    "3584": case(3584, 128, 28, 4, 1056, 1, 400, biases=True, gate_mean=-1.5, seed=16, blocks=113),
    "4096, screened": case(
        *(4096, 128, 32, 8, 2500, 1, 130),
        **{"gate_mean": -0.5, "mapped": 150, "missed": -0.4, "blocks": 132, "form": "screened"},
    ),
    "e4m3, 2048": case(
        2048, 64, 32, 8, 1048, 1, 150, head_norms=True, kind="e4m3", seed=23, blocks=132
    ),
    "e4m3, 1536, dense": case(
        1536, 128, 12, 3, 776, 2, 65, biases=True, kind="e4m3", seed=22, blocks=96, form="dense"
    ),
    "e4m3, 3584": case(
        3584,
        128,
        28,
        4,
        7456,
        1,
        400,
        biases=True,
        gate_mean=-1.5,
        kind="e4m3",
        seed=25,
        blocks=113,
    ),
    "e4m3, 4096": case(
        4096, 128, 32, 8, 1056, 1, 130, gate_mean=-0.5, kind="e4m3", seed=26, blocks=132
    ),
    "int4, nothing fires": case(
        1536, 128, 12, 2, 392, 1, 0, gate_mean=-9, seed=6, blocks=97, kind="int4"
    ),
    "int4, all fire": case(
        1536, 128, 12, 6, 12288, 1, 100, window=60, gate_mean=9, seed=6, blocks=96, kind="int4"
    ),
    "int4, 2048": case(
        2048, 64, 32, 8, 1048, 1, 150, head_norms=True, seed=23, blocks=132, kind="int4"
    ),
    "int4, 3072": case(
        3072, 128, 24, 8, 1048, 1, 70, gate_mean=-0.5, mapped=300, seed=24, blocks=98, kind="int4"
    ),
    "int4, 3584, dense": case(  # three groups of a block
        3584, 128, 28, 4, 20000, 1, 70, biases=True, seed=25, blocks=113, form="dense", kind="int4"
    ),
    "int4, 3584": case(
        3584, 128, 28, 4, 20456, 1, 70, gate_mean=-0.3, mapped=456, seed=25, blocks=113, kind="int4"
    ),
    "int4, 4096": case(
        4096, 128, 32, 8, 6144, 1, 130, gate_mean=-0.5, mapped=256, seed=26, blocks=132, kind="int4"
    ),
    "int4, large x": case(1536, 128, 12, 12, 392, 1, 3, kind="int4", ffn_size=1e15, blocks=96),
    "int4, small x": case(1536, 128, 12, 12, 392, 1, 3, kind="int4", ffn_size=1e-15, blocks=96),
    "SiLU, dense": case(
        1536, 128, 12, 3, 776, 2, 65, biases=True, is_silu=True, seed=8, form="dense"
    ),
    "SiLU, int4, dense": case(
        1536, 128, 12, 3, 776, 2, 65, is_silu=True, seed=8, form="dense", kind="int4"
    ),
    "4096": case(4096, 128, 32, 8, 1056, 1, 130, gate_mean=-0.5, seed=10, blocks=132),
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
    assert (done.state - wanted.state).abs().max() < 0.05
    for made, exact in zip(done.new, wanted.new, strict=True):
        for own, other in zip(made, exact, strict=True):
            assert (own - other).abs().max() < 0.05
    if model.is_silu:
        return
    # a gate within one rounding of 0 may fall on either side
    missed = (done.counts[0] - wanted.counts[0]).abs()
    assert (missed <= 2).all()


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_without_a_head_there_is_a_state(kind):
    how = {"biases": True, "is_silu": True, "vocabulary": 0, "kind": kind}
    model = Model(1536, 128, 12, 2, 392, 1, 70, **how)
    wanted = emulated.judge(model)
    done = emulated.emulate(EmulatedKernels(), model, 96, "dense", (1,))
    assert done.logits.shape == (1, 0)
    assert (done.state - wanted.state).abs().max() < 0.05


def test_what_a_screen_leaves_out_does_not_fire():
    """Nothing does where limits are infinite, but the map; all of it where they are -infinite."""

    def counts(form: str, missed: float) -> torch.Tensor:
        given = {"gate_mean": -0.5, "biases": True, "mapped": 32, "missed": missed}
        model = Model(1536, 128, 12, 12, 784, 1, 3, **given)
        return emulated.emulate(EmulatedKernels(), model, 96, form, (1,)).counts

    assert counts("screened", torch.inf).tolist() == [[32]]
    if EVERY_CASE:
        assert torch.equal(counts("screened", -torch.inf), counts("sparse", -torch.inf))


@pytest.mark.parametrize("value", [torch.inf, torch.nan] if EVERY_CASE else [torch.inf])
@pytest.mark.parametrize("kind", ["e4m3", "int4"] if EVERY_CASE else ["int4"])
def test_over_rounded_weights_what_is_not_finite_stays_so(kind, value):
    model = Model(1536, 128, 12, 12, 392, 1, 3, kind=kind)
    model.weights[0]["values"][..., 5] = value  # of one column of each head, which o takes
    assert emulated.judge(model).logits.isnan().all()
    done = emulated.emulate(EmulatedKernels(), model, 96, "sparse", (1,))
    assert done.logits.isnan().all()
    assert (done.counts == model.N).all()  # a gate that is NaN fires
