"""Kernels for lists of the forward and the backward pass, emulated: what tests/gpu/ asks."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled import EVERY_CASE
from emulated_kernels import EmulatedKernels, needs_emulator

from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import PAGE

pytestmark = needs_emulator
MOST = 320_000  # of what a case multiplies, so that it takes no more than a second


def on_cpu(name: str):
    """A module of tests/gpu/ whose tensors lie on the CPU."""
    path = Path(__file__).parent / "gpu" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cpu_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "cpu"
    return module


def asked(tests: dict[str, list[tuple]]):
    """Parametrizes `name` and `given`: of each test of tests/gpu/ what it is called with."""
    calls = [(name, given) for name, all_given in tests.items() for given in all_given]
    ids = [f"{name.removeprefix('test_')}-{given}" for name, given in calls]
    return pytest.mark.parametrize(("name", "given"), calls, ids=ids)


def small(cases: list[tuple]) -> list[tuple]:
    return [case for case in cases if case[1].M * case[2] * case[1].N ** 0.5 < MOST]


def in_turn(cases: list[tuple], hows: tuple[tuple, ...]) -> list[tuple]:
    """Each case in one of the ways `hows`, the next one in the next; or each in all of them."""
    return [
        (*case, *how)
        for i, case in enumerate(cases)
        for j, how in enumerate(hows)
        if EVERY_CASE or j == i % len(hows)
    ]


of_grad, of_down = on_cpu("test_grad"), on_cpu("test_up_down")
of_down.device_limits = lambda index: Limits(132, 232448, (9, 0))
OF_GRAD = {
    "test_gradients_of_the_weights": in_turn(small(of_grad.CASES), ((1, True), (3, False))),
    "test_sums_are_added_to_if_there_are_heavy_rows": [(5,)],
    "test_gradient_of_x": [(*case, 2) for case in small(of_grad.X_CASES)],
    "test_lists_are_as_short_as_can_be_and_the_same_from_run_to_run": [()],
}


@pytest.fixture(scope="module")
def kernels():
    return EmulatedKernels()


@asked(OF_GRAD)
def test_as_on_a_gpu(kernels, name, given):
    getattr(of_grad, name)(kernels, *given)


SMALL = small(of_down.CASES)
OF_FORWARD = {
    "test_up_gives_partial_dot_products": in_turn(SMALL, ((99, 1, 2), (1, 1, 1))),
    "test_hidden_fills_the_rounds": in_turn(SMALL, ((True, 3, (7, 3), 0), (True, 7, None, 64))),
    "test_hidden_kept_fills_the_rounds_and_keeps_gate_and_up": in_turn(SMALL, (((7, 3),),)),
    "test_down_gives_y": [(*case, 3, True) for case in SMALL],
}


@asked(OF_FORWARD)
def test_the_forward_pass_as_on_a_gpu(kernels, name, given):
    getattr(of_down, name)(kernels, *given)


# ---- `attend` and the norms: what tests/gpu/test_attend.py asks, of rows that stay whole


of_gpu = on_cpu("test_attend")


def stored_heads(args) -> Iterator[torch.Tensor]:
    """What `store_keys` writes for an `attend` with these arguments, each head by itself."""
    for position, table in zip(args["positions"].tolist(), args["tables"].tolist(), strict=True):
        if position >= 0:
            page, slot = table[position // PAGE], position % PAGE
            yield from (*args["keys"][page, :, slot], *args["values"][page, :, slot])


class Kernels(EmulatedKernels):
    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        """As `KernelSet.launch`; the kernel in front has ended, but `store_keys`."""
        assert grid[2:] in ((), (1,))
        stored = stored_heads(args) if args.get("new_is_cached") else ()
        super().launch(name, grid[:2], block, args, smem_bytes, from_previous=stored)


@pytest.mark.parametrize(
    ("heads", "how"),
    [
        ((4, 2, 64), {"turned": 48}),
        ((7, 1, 38), {"normed": True}),
        ((4, 2, 100), {"window": 33}),
        ((2, 1, 128), {"cap": 2.0, "turned": 96}),
        ((4, 2, 256), {"normed": True}),
    ],
    ids=str,
)
def test_heads(heads, how):
    of_gpu.check_attend(Kernels(), heads, [0, 15, 64, 77], splits=1, **how)


@pytest.mark.parametrize(
    ("heads", "spans", "how"),
    [
        ((4, 2, 64), [(14, 5), (62, 3), (0, 1)], {"turned": 48}),
        ((7, 1, 38), [(0, 3), (30, 2)], {"normed": True, "cap": 2.0}),
        ((2, 1, 100), [(5, 16)], {"window": 9}),
        ((2, 1, 128), [(77, 2), (60, 2)], {"window": 33, "turned": 96}),
        ((2, 1, 256), [(63, 3)], {"normed": True}),
        (
            (2, 1, 128),
            [(15, 16)],
            {},
        ),  # the first of a batch sees the last but 15 of the one before
    ],
    ids=str,
)
def test_heads_of_several_tokens(heads, spans, how):
    of_gpu.check_queries(Kernels(), heads, spans, splits=1, **how)


def test_norms():
    of_gpu.test_norms(Kernels(), 2, 264)
    of_gpu.test_a_norm_that_is_added(Kernels(), 264)
    of_gpu.test_a_norm_of_a_part_of_rows(Kernels())
    of_gpu.test_embeddings_and_their_norm(Kernels(), 264)
    of_gpu.test_norms_that_are_joined(Kernels(), 264)
    of_gpu.test_a_state_that_is_found_by_its_position(Kernels(), 16)


# ---- the end of a round: what tests/gpu/test_step_end.py asks, of few logits


of_end = on_cpu("test_step_end")


@pytest.mark.parametrize("V", [4, 1021])
def test_the_end_of_a_round(V):
    of_end.test_what_torch_would_choose(Kernels(), 3, V, False)
    of_end.test_what_torch_would_keep_of_a_round(Kernels(), 3, 5, V, False)
    of_end.test_of_some_tokens_what_is_chosen_of_all(Kernels(), V, False)


def test_records_of_a_round():
    of_end.test_records_go_by_turns(Kernels())
    of_end.test_of_several_the_first_and_nan_before_all(Kernels())
