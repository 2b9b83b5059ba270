"""What tests on a GPU share."""

import pytest

from twellctl.bundle import twell_ffn, twell_reasons
from twellctl.bundle.twell_launch import KernelSet, kernels_for
from twellctl.bundle.twell_nvrtc import what_is_missing
from twellctl.here.own_kernels import own_kernels


@pytest.fixture(scope="session")
def kernels() -> KernelSet:
    """Of GPU 0, where they can be compiled and launched."""
    if said := what_is_missing():
        pytest.skip(said)
    return kernels_for(own_kernels(), 0)


@pytest.fixture
def no_fallback(monkeypatch):
    """A test fails if plain torch stands in, with which it would pass, too."""

    def fail(reason: str) -> None:
        pytest.fail(f"the kernels were not used: {reason}")

    for module in (twell_ffn, twell_reasons):
        monkeypatch.setattr(module, "say_once", fail)
