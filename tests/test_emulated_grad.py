"""Kernels for lists of the forward and the backward pass, emulated: what tests/gpu/ asks."""

import importlib.util
from pathlib import Path

import pytest
from compiled import EVERY_CASE
from emulated_kernels import EmulatedKernels, needs_emulator

from twellctl.bundle.twell_plan import Limits

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
