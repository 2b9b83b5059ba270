"""FFNs that compute more than an export could are refused."""

import pytest
from torch import nn

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.models.exportable import is_plain_ffn


def test_an_ffn_that_computes_more_is_not_exportable():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6)
            self.down_proj, self.act_fn, self.scale = nn.Linear(6, 4), nn.SiLU(), scale

        def forward(self, x):
            gate = self.act_fn(self.scale * self.gate_proj(x))
            return self.down_proj(gate * self.up_proj(x))

    assert is_plain_ffn(Scaled(1))
    assert not is_plain_ffn(Scaled(2))


def test_a_family_whose_ffn_computes_more_is_refused(make_model, tmp_path):
    convert(make_model("falcon_h1", mlp_multipliers=[2.0, 1.0]), tmp_path / "relu")
    with pytest.raises(TwellError, match="compute more than down"):
        export(tmp_path / "relu", tmp_path / "out")
