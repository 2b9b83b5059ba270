"""The FFN of each layer, timed: on the CPU, where it is slow but the same."""

import dataclasses

import pytest
import torch

from twellctl.bench import layers as timed_layers
from twellctl.bench.layers import time_layers
from twellctl.errors import TwellError
from twellctl.firing.counts import count_layers
from twellctl.firing.profiled import LayerSpeed, Speed
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.profile import _timed, profile


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timed_layers, "ROUNDS", 1)
    monkeypatch.setattr("twellctl.bench.timing.SAMPLE_SECONDS", 0.001)


@pytest.fixture(scope="module")
def measured(relu_llama, text_file):
    return profile(relu_llama, str(text_file), windows=4, seq_len=16)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_each_layer_is_timed_on_what_it_reads(quick, make_model, family, monkeypatch):
    folder = make_model(family, hidden_act="relu")
    model = load_model(open_checkpoint(folder), dtype=torch.float32).eval()
    ids = torch.randint(512, (3, 16))
    found, _ = count_layers(model.base_model, ids, 64)
    seen, told = [], []
    judge = timed_layers.reference
    monkeypatch.setattr(
        timed_layers, "reference", lambda x, weights: seen.append(x) or judge(x, weights)
    )
    speed = time_layers(model, ids, found, lambda *how: told.append(how))
    assert (speed.device, speed.tokens, len(speed.layers)) == ("CPU", 48, 2)
    for layer in speed.layers:
        assert layer.dense.startswith("dense eager")
        assert layer.dense_ms > 0 < layer.twell_ms
    assert told == [(1, 2, "layers timed"), (2, 2, "layers timed")]
    inputs = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda m, given: inputs.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        model(ids)
    for x, expected in zip(seen, inputs, strict=True):
        assert torch.equal(x, expected)


def test_a_wrong_result_is_no_speed(quick, relu_llama, measured, monkeypatch):
    model = load_model(open_checkpoint(relu_llama), dtype=torch.float32).eval()
    monkeypatch.setattr(
        timed_layers, "ffn_over_twell", lambda *how: lambda x, w: torch.zeros_like(x)
    )
    with pytest.raises(TwellError, match="relative error of"):
        time_layers(model, torch.randint(512, (2, 16)), measured.layers)
    assert not model.model.layers[0].mlp._forward_pre_hooks


def test_without_a_gpu_the_profile_says_why(relu_llama, text_file):
    found = profile(
        relu_llama,
        str(text_file),
        windows=2,
        seq_len=16,
        time_layers=time_layers,
        device=torch.device("cpu"),
    )
    assert (found.speed, found.without_speed) == (None, "no NVIDIA GPU here")


def test_a_timing_that_fails_costs_no_counts(measured):
    class OnGpu:
        device = torch.device("cuda")

    def fail(*how):
        raise RuntimeError("the driver\nis gone")

    assert _timed(fail, OnGpu(), None, measured.layers, print) == (None, "the driver is gone")


def test_correlation(measured):
    fired = [10.0, 20.0, 40.0]
    layers = tuple(dataclasses.replace(measured.layers[0], nnz_mean=nnz) for nnz in fired)

    def of(*speedups: float):
        timed = tuple(LayerSpeed("dense eager", up, 1.0) for up in speedups)
        found = dataclasses.replace(measured, layers=layers, speed=Speed("GPU", 1, timed))
        return found.speed_correlation

    assert of(3.0, 2.0, 0.0) == pytest.approx(-1)
    assert of(1.0, 2.0, 4.0) == pytest.approx(1)
    assert of(2.0, 2.0, 2.0) is None
    assert measured.speed_correlation is None
