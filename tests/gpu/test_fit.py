"""convert --data on a GPU: bits, memory, and what stock transformers computes there."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twellctl.convert import convert
from twellctl.fitting.ffn import FfnText, GatedFfn
from twellctl.fitting.grid import Grid
from twellctl.fitting.layer import HowToFit, fit_layer
from twellctl.fitting.steps import Steps

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
HOW = {"tokens": 8192, "seq_len": 64, "eval_windows": 16, "density": 1.0}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("steps", [0, 30])
def test_two_runs_and_one_that_was_killed_give_the_same_bits(
    make_model, text_file, tmp_path, steps
):
    source = make_model("llama", initializer_range=0.1, **SIZES)
    how = HOW | {"data": [str(text_file)], "steps": steps, "step_tokens": 512}

    def killed(done, *_):
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        convert(source, tmp_path / "killed", progress=killed, **how)
    found = []
    for name in ("killed", "again"):
        convert(source, tmp_path / name, **how)
        found.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_stock_transformers_is_as_near_as_was_measured(make_model, text_file, tmp_path):
    source = make_model("llama", initializer_range=0.1, **SIZES)
    how = HOW | {"data": [str(text_file)], "steps": 30, "step_tokens": 512}
    done = convert(source, tmp_path / "out", **how)
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (64, 64), device="cuda")
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()
        for path in (tmp_path / "out", source)
    ]
    with torch.no_grad():
        ours, theirs = (model(ids).logits.log_softmax(-1) for model in models)
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    assert 0 < kl < 3 * done.fitted.held_out.kl + 1e-3  # other tokens, in bf16 there


@pytest.mark.parametrize("grid", [None, Grid(32, torch.bfloat16)], ids=["whole", "rounded"])
def test_a_layer_is_fitted_as_on_the_cpu(grid):
    torch.manual_seed(0)
    ffn = GatedFfn(
        torch.randn(512, 128) / 11, torch.randn(512, 128) / 11, torch.randn(128, 512) / 22
    )
    z = torch.randn(20000, 128) + 1.5
    hidden = torch.nn.functional.silu(ffn.gates(z)) * ffn.ups(z)
    wanted, weights = hidden @ ffn.down.T, torch.rand(len(z)) + 0.5
    errors = []
    for device, dtype in (
        ("cpu", torch.float32),
        ("cuda", torch.float32),
        ("cuda", torch.bfloat16),
    ):
        there = wanted.to(device)
        text = FfnText(z.to(device, dtype), weights.to(device), lambda t, there=there: there[t])
        own = GatedFfn(*(w.to(device) for w in (ffn.gate, ffn.up, ffn.down)))
        how = HowToFit(32, 1e-3, torch.float32, Steps(100, 2048, 0.003, 0), grid)
        made, _ = fit_layer(own, text, 0.02, how)
        away = (made(text.z).float() - there).square().sum(1) * text.weights
        errors.append(float(away.sum() / (there.square().sum(1) * text.weights).sum()))
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    assert errors[2] == pytest.approx(errors[0], rel=0.2)
