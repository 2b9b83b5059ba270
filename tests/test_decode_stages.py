"""Where a layer's time goes, by the clocks of a step's blocks."""

import pytest
import torch

from twellctl.bench.decode_stages import stages_of
from twellctl.bundle.twell_spec import STEP_STAGES


def test_stages_follow_one_another():
    """Each from the end of the one before, by the blocks that have part in it."""
    clocks = torch.zeros(2, 3, len(STEP_STAGES), 4, dtype=torch.int64)
    ends = {"x is there": 100, "q, k and v": 150, "heads are there": 450, "their sum": 1000}
    for layer in range(3):
        for name, end in ends.items():
            clocks[:, layer, STEP_STAGES.index(name)] = 1000 * (layer + 1) + end
        clocks[:, layer, STEP_STAGES.index("attention"), 1] = 1000 * (layer + 1) + 400
    clocks[..., STEP_STAGES.index("x is there"), 3] += 20
    found = {stage.name: stage for stage in stages_of(clocks, 100.0)}
    assert list(found) == ["x is there", "q, k and v", "attention", "heads are there", "their sum"]
    assert (found["x is there"].least, found["x is there"].most) == pytest.approx((1.0, 1.2))
    assert found["attention"].mean == pytest.approx(2.5)
    assert found["heads are there"].mean == pytest.approx((3 * 3.0 + 0.5) / 4)
    whole = [stage.mean for stage in found.values() if stage.name != "attention"]
    assert sum(whole) + 2.5 / 4 == pytest.approx(10.0)
