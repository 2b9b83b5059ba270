"""What tests on a GPU share."""

import gc
import os
from unittest import mock

import pytest
import torch
from compiled import compiled_whole

from twellctl.bundle import twell_ffn, twell_launch, twell_reasons
from twellctl.bundle.twell_launch import KernelSet, kernels_for
from twellctl.bundle.twell_nvrtc import what_is_missing
from twellctl.decoding import batch, opening
from twellctl.here.own_kernels import own_kernels

SHARE = opening.GPU_SHARE / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_once():
    """By one of the processes of a session, whatever cache a test uses, or ahead of it."""
    with mock.patch.object(twell_launch, "load_cubin", compiled_whole):
        yield


@pytest.fixture(scope="session", autouse=True)
def _memory_is_shared():
    """Caches of engines in several processes together take what one alone would take."""
    with mock.patch.object(opening, "GPU_SHARE", SHARE):
        yield


@pytest.fixture(scope="module", autouse=True)
def _memory_is_given_back():
    """What torch keeps of the tests of a file is free for other processes after it."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def sources() -> str:
    """The kernels, where they can be compiled and launched."""
    if said := what_is_missing():
        pytest.skip(said)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels need compute capability 8.0")
    return own_kernels()


@pytest.fixture(scope="session")
def kernels(sources) -> KernelSet:
    """Those of GPU 0."""
    return kernels_for(sources, 0)


@pytest.fixture
def no_fallback(monkeypatch):
    """A test fails if plain torch stands in, with which it would pass, too."""

    def fail(reason: str) -> None:
        pytest.fail(f"the kernels were not used: {reason}")

    for module in (twell_ffn, twell_reasons):
        monkeypatch.setattr(module, "say_once", fail)


@pytest.fixture
def captured_only(monkeypatch):
    """A test fails if a step is not captured, with which it would pass, too."""

    def fail(reason: str, *rest) -> None:
        pytest.fail(f"not captured: {reason % rest}")

    monkeypatch.setattr(batch.logger, "warning", fail)
