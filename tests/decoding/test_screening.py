"""Limits of screened gates, measured on what a model draws; on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from twellctl.bundle.twell_model import gated_ffns
from twellctl.decoding import screening
from twellctl.decoding.screened import copied
from twellctl.decoding.screening import MOST_MISSED, NEXT_TO_NOTHING, open_screens
from twellctl.models.linear_map import num_mapped

NEURONS, MAPPED = 1000, 40


@pytest.fixture
def model(tiny):
    """Of which the last neurons of each layer share a gate."""
    made = tiny(hidden_size=64, intermediate_size=NEURONS + MAPPED, mlp_bias=True).bfloat16()
    for ffn in gated_ffns(made):
        for part in (ffn.gate_proj.weight.data, ffn.gate_proj.bias.data):
            part[NEURONS:] = part[NEURONS].clone()
    return made


def test_a_screen_misses_next_to_nothing(model):
    screens = open_screens(model)
    assert all(missed <= NEXT_TO_NOTHING for missed in screens.missed)
    for screen, ffn in zip(screens.layers, gated_ffns(model), strict=True):
        assert screen.num_own == NEURONS
        assert screen.limits.shape == (1008,)
        assert torch.equal(screen.limits == -torch.inf, torch.arange(1008) >= NEURONS)
        assert screen.copy.shape == (63, 1, 4608)
        # on other inputs than those that were drawn, but of their size
        z = torch.randn(500, 64).bfloat16()
        gate = F.linear(z, ffn.gate_proj.weight, ffn.gate_proj.bias)[:, :NEURONS]
        about = z.float() @ copied(ffn.gate_proj.weight).T[:, :NEURONS]
        left_out = about <= screen.limits[:NEURONS]
        assert (left_out & (gate > 0)).sum() < 0.003 * (gate > 0).sum()
        assert 0.5 < left_out.sum() / (gate <= 0).sum() < 1
    assert not any(ffn._forward_pre_hooks for ffn in gated_ffns(model))
    assert "screened: " in str(screens)


def test_a_layer_whose_screen_misses_more_reads_its_gate_whole(model, monkeypatch):
    monkeypatch.setattr(screening, "MARGINS", [0.0])
    screens = open_screens(model)
    assert all(screen.is_open for screen in screens.layers)
    assert all(bool((screen.limits == -torch.inf).all()) for screen in screens.layers)
    assert min(screens.missed) > MOST_MISSED
    assert "in 0 of 2 layers" in str(screens)


@pytest.mark.parametrize(("kind", "length"), [(0, 1), (1, 8)])
def test_what_is_missed_of_repeated_tokens_widens_the_margin(model, kind, length):
    ffn, z = gated_ffns(model)[0], torch.randn(32, 64, 64).bfloat16()
    usual, missed, _ = screening._screen_of(ffn, z, NEURONS)
    rows = slice(16 + 8 * kind, 24 + 8 * kind)
    z[rows] = 20 * z[rows, :length].repeat(1, 64 // length, 1)  # errors 20 times as large
    wider, more, _ = screening._screen_of(ffn, z, NEURONS)
    assert missed <= NEXT_TO_NOTHING < more
    assert bool((wider.limits[:NEURONS] < usual.limits[:NEURONS]).all())


def test_screens_are_judged_on_one_and_on_eight_repeated_tokens(model):
    read = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: read.append(inputs[0])
    )
    open_screens(model)
    hook.remove()
    for ids, length in zip(read[-2:], (1, 8), strict=True):
        assert ids.shape == (8, 64)
        assert torch.equal(ids, ids[:, :length].repeat(1, 64 // length))
        assert all(len(row.unique()) > 1 for row in ids) == (length > 1)


def test_a_model_that_is_nowhere_finite_reads_gates_whole(model):
    gated_ffns(model)[0].gate_proj.weight.data.fill_(torch.nan)
    assert all(screen.is_open for screen in open_screens(model).layers)


def test_the_copy_has_the_values_that_it_encodes():
    weight = torch.randn(40, 192).bfloat16()
    weight[3], weight[4, 32:64] = 0, 0
    step = weight.float().view(40, 6, 32).abs().amax(-1, keepdim=True) / 8
    error = (copied(weight) - weight.float()).view(40, 6, 32).abs()
    assert bool((error <= 1.01 * step).all())
    assert float(error.pow(2).mean().sqrt() / step.mean()) < 0.35
    assert bool((copied(weight)[3] == 0).all())
    weight[7, 9], weight[8, 70] = torch.nan, torch.inf  # of which no sum is a number
    assert copied(weight)[7:9].sum(1).isnan().all()


@pytest.mark.parametrize("alike", [0, 1, 15, 16, 64])
def test_neurons_that_share_a_gate_are_found(alike):
    gate, bias = torch.randn(64, 8), torch.zeros(64)
    gate[64 - alike :] = 1
    found = alike if alike >= 16 else 0
    assert num_mapped(gate) == num_mapped(gate, bias, torch.ones(64, 1)) == found
    bias[-3] = 1
    assert num_mapped(gate, bias) == 0
    scale = torch.ones(64, 1)  # of FP8: the same numbers, for rows of which one is twice the other
    scale[-3] = 2
    assert num_mapped(gate, bias * 0, scale) == 0
