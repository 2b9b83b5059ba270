"""Lists and sums of the backward pass, and `down`, emulated on the CPU: what tests/gpu/ asks."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from emulated_kernels import EmulatedKernels, needs_emulator

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


of_grad, of_down = on_cpu("test_grad"), on_cpu("test_up_down")


@pytest.fixture(scope="module")
def kernels():
    return EmulatedKernels()


def small(cases: list[tuple]) -> list[tuple]:
    return [case for case in cases if case[1].M * case[2] * case[1].N ** 0.5 < MOST]


@pytest.mark.parametrize("case", small(of_grad.CASES), ids=str)
@pytest.mark.parametrize(("splits", "as_bf16"), [(1, True), (3, False)])
def test_gradients_of_the_weights(kernels, case, splits, as_bf16):
    of_grad.test_gradients_of_the_weights(kernels, *case, splits, as_bf16)


def test_sums_are_added_to_if_there_are_heavy_rows(kernels):
    of_grad.test_sums_are_added_to_if_there_are_heavy_rows(kernels, 5)


@pytest.mark.parametrize("case", small(of_grad.X_CASES), ids=str)
def test_gradient_of_x(kernels, case):
    of_grad.test_gradient_of_x(kernels, *case, 2)


def test_lists(kernels):
    of_grad.test_lists_are_as_short_as_can_be_and_the_same_from_run_to_run(kernels)


@pytest.mark.parametrize("case", small(of_down.CASES), ids=str)
def test_down(kernels, case):
    kind, shape, K = case
    rng = np.random.default_rng(5)
    lists = of_down.build_lists(shape, kind, 6)
    w_down, bias = (of_down.random_bf16(rng, *size, scale=0.05) for size in [(shape.N, K), (K,)])
    found = of_down.run_down(kernels, lists, lists.rounds, w_down, bias, 3)
    wanted = lists.dense_gate() @ of_down.from_bf16(w_down).astype(float)
    wanted += of_down.from_bf16(bias)
    scale = max(1e-3, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=2e-5 * scale)
