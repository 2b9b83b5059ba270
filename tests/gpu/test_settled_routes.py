"""What a serving engine settles beforehand: nothing is loaded or measured after it."""

import pytest
import torch
from ffns import ffn_of
from on_gpu import on_e4m3

from twellctl.bundle import twell_route
from twellctl.bundle.twell_dense import gated_ffn, rounded_weight
from twellctl.bundle.twell_ffn import sparse_ffn, sparse_ffn_of_engine
from twellctl.bundle.twell_model import by_rows_of_neurons
from twellctl.bundle.twell_weights import FFN
from twellctl.here.own_kernels import own_kernels
from twellctl.vllm.routes import Layer, engines_way, settle, token_counts

pytestmark = pytest.mark.gpu
LAYER = Layer(256, 1024, biases=(False, False), tile=256, slots=16, density=0.02)


@torch.no_grad()
def test_nothing_is_measured_once_it_is_settled(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TWELL_ROUTE", raising=False)
    device, counts = torch.device("cuda", 0), token_counts([24, 40], 1000)
    found = settle([LAYER], counts, device, torch.bfloat16, own_kernels())
    assert "as measured" in found.how or "was measured" in found.how

    def measure(*args):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(twell_route, "measure", measure)
    made = {"device": device, "dtype": torch.bfloat16}
    w_gate, w_up = torch.randn(1024, 256, **made), torch.randn(1024, 256, **made)
    ffn = ffn_of(w_gate, w_up, by_rows_of_neurons(torch.randn(256, 1024, **made)))
    how = {"tile": LAYER.tile, "slots": LAYER.slots, "density": LAYER.density}
    for count in (1, 3, 24, 40, 100, 999, 1000):
        x = torch.zeros(count, 256, **made)  # tokens that are not like those of the profile
        y = sparse_ffn(x, ffn, sources=own_kernels(), **how)
        assert y.shape == x.shape


@on_e4m3
@torch.no_grad()
def test_nothing_is_measured_over_fp8_weights_either(monkeypatch, tmp_path):
    """Eager and captured, where the engine has its own dense FFN."""
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TWELL_ROUTE", raising=False)
    device, counts = torch.device("cuda", 0), token_counts([24, 40], 1000)
    made = {"device": device, "dtype": torch.bfloat16}
    sizes = ((1024, 256), (1024, 256), (256, 1024))
    weights = [rounded_weight("e4m3", torch.randn(*size, **made) / 16) for size in sizes]
    ffn = FFN(*weights, weights[-1].values.t().contiguous())

    def dense(x):
        return engines_way(lambda: gated_ffn(x, ffn))

    found = settle([LAYER], counts, device, torch.bfloat16, own_kernels(), dense=dense)
    assert "as measured" in found.how or "was measured" in found.how

    def measure(*args):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(twell_route, "measure", measure)
    how = {"tile": LAYER.tile, "slots": LAYER.slots, "density": LAYER.density}

    def run(x):
        return sparse_ffn_of_engine(dense(x), x, ffn, sources=own_kernels(), **how)

    for count in (1, 3, 24, 40, 100, 999, 1000):
        x = torch.randn(count, 256, **made)  # half of the neurons fire, unlike the profile
        wanted = gated_ffn(x, ffn).float()
        assert (run(x) - wanted).abs().max() < 0.1 * wanted.abs().max()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        graph.replay()
        assert (y - wanted).abs().max() < 0.1 * wanted.abs().max()
