"""W_down by rows of K besides: only where it takes little, only while it is wanted."""

import logging

import pytest
import torch

from twellctl.bundle.twell_weights import FFN
from twellctl.decoding import down_copies
from twellctl.decoding.down_copies import DownCopies

SIZE = 3 * 2 * 96 * 64  # bytes of W_down of all layers


@pytest.fixture
def memory(monkeypatch) -> dict[str, float]:
    """What there is; just enough."""
    there = {"free": 2 * SIZE, "total": 20 * SIZE}
    monkeypatch.setattr(down_copies, "gpu_memory", lambda device: (there["free"], there["total"]))
    return there


def copies() -> tuple[list[FFN], DownCopies]:
    def weight() -> torch.Tensor:
        return torch.randn(96, 64).bfloat16()

    ffns = [FFN(weight(), weight(), weight(), None, None, None) for _ in range(3)]
    return ffns, DownCopies(ffns, torch.device("cpu"))


def test_they_are_made_when_asked_for_and_again_once_dropped(memory):
    ffns, made = copies()
    assert made.fit()
    kept = [made[i] for i in range(3)]
    for copied, ffn in zip(kept, ffns, strict=True):
        assert copied.w_down.is_contiguous()
        assert torch.equal(copied.w_down, ffn.w_down.t())
        assert (copied.w_gate, copied.w_up) == (ffn.w_gate, ffn.w_up)
    assert made[0] is kept[0]
    memory["free"] = 0
    assert made.fit()  # they are there
    made.drop()
    assert not made.fit()
    memory["free"] = 2 * SIZE
    assert made.fit()
    assert made[0] is not kept[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("total", "takes 0.0 GB, more than 5% of the GPU's 0.0 GB"),
        ("free", "takes 0.0 GB, more than 50% of the 0.0 GB that are free"),
    ],
)
def test_why_there_is_no_room_is_told_once(memory, caplog, name, said):
    memory[name] -= 1
    _, made = copies()
    with caplog.at_level(logging.INFO):
        assert not made.fit()
        assert not made.fit()
    (record,) = caplog.records
    assert (
        record.getMessage()
        == f"dense steps read W_down by rows of neurons: a second copy of all W_down {said}"
    )
