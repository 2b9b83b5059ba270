"""What surrounds the capture of a CUDA graph, without a GPU."""

import gc

import pytest

from twellctl.here.captures import without_collection


@pytest.fixture
def collecting():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_meanwhile(collecting):
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_collection_as_it_was(collecting):
    with pytest.raises(RuntimeError, match="no graph"), without_collection():
        raise RuntimeError("no graph")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off(collecting):
    gc.disable()
    with without_collection():
        pass
    assert not gc.isenabled()
