"""What tests on a GPU share."""

import pytest

from twellctl.bundle.twell_launch import KernelSet, kernels_for
from twellctl.bundle.twell_nvrtc import what_is_missing
from twellctl.here.own_kernels import own_kernels


@pytest.fixture(scope="session")
def kernels() -> KernelSet:
    """Of GPU 0, where they can be compiled and launched."""
    if said := what_is_missing():
        pytest.skip(said)
    return kernels_for(own_kernels(), 0)
