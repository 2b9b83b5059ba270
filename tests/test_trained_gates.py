"""Trained thresholds: SiLU at first, relu_t at last, the price's gradient, and what is stored."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from finetune_runs import small, weights
from transformers import AutoModelForCausalLM

from twellctl.carried import REPORT_FILE
from twellctl.checkpoint import open_checkpoint
from twellctl.convert import convert
from twellctl.data import hold_out, read_blocks, read_texts, token_stream, write_tokens
from twellctl.finetune import finetune
from twellctl.model import load_model
from twellctl.progress import Progress
from twellctl.training.trained_gates import SLOPE, TrainedGates

TOKENS = 24


@pytest.fixture
def ids():
    return torch.randint(512, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))


def trained(folder, thresholds=(0.0, 0.0), **how) -> tuple:
    model = load_model(open_checkpoint(folder)).requires_grad_(True)
    gates = TrainedGates(model, list(thresholds), **how)
    return model.train(), gates


def test_soft_at_width_one_is_silu(make_model, relu_llama, ids):
    model, gates = trained(relu_llama)
    gates.width = 1.0
    gates.begin(TOKENS, 1.0)
    silu = load_model(open_checkpoint(relu_llama), activation="silu")
    assert torch.allclose(model(ids).logits, silu(ids).logits, atol=1e-5)


@pytest.mark.parametrize("thresholds", [(0.0, 0.0), (0.25, 0.5)])
@pytest.mark.parametrize("training", [False, True])
def test_hard_is_relu_t_and_counts_what_fires(relu_llama, ids, thresholds, training):
    model, gates = trained(relu_llama, thresholds)
    model.train(training)
    gates.begin(TOKENS, 1.0)
    found = model(ids).logits
    penalty, densities = gates.measured()
    fired = []
    for layer, threshold in zip(model.model.layers, thresholds, strict=True):
        layer.mlp.act_fn = torch.nn.Threshold(threshold, 0.0)
        layer.mlp.act_fn.register_forward_hook(lambda m, a, out: fired.append(out != 0))
    assert torch.equal(found, model(ids).logits)
    expected = [f.double().mean().item() for f in fired]
    assert densities.tolist() == pytest.approx(expected, rel=1e-6)
    assert penalty.item() == pytest.approx(96 * sum(expected) / 2, rel=1e-6)


@pytest.mark.parametrize("width", [None, 0.7])
def test_gradients_are_those_of_the_sigmoid_in_the_place_of_the_step(width):
    gate = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    host = torch.nn.Module()
    host.mlp = torch.nn.Module()
    for name, size in (("gate_proj", (4, 7)), ("up_proj", (4, 7)), ("down_proj", (7, 4))):
        setattr(host.mlp, name, torch.nn.Linear(*size))
    host.mlp.act_fn = torch.nn.ReLU()
    gates = TrainedGates(host, [0.25])
    gates.l1, gates.width = 0.3, width
    gates.begin(5, 0.5)
    up = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = gate.clone().requires_grad_()
    module = host.mlp.act_fn.train()
    (module(x) * up).sum().backward()

    y, t = gate.clone().requires_grad_(), torch.full((7,), 0.25).double().requires_grad_()
    soft = torch.sigmoid((y - t) / (width or SLOPE))
    fires = soft if width else soft + ((gate > 0.25).double() - soft).detach()
    (y * fires * up).sum().add(0.3 * 0.5 * soft.sum() / 5).backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    assert torch.allclose(module.threshold.grad.double(), t.grad, rtol=1e-4, atol=1e-6)


def test_stored_thresholds_are_what_bf16_holds_and_what_was_compared_with(relu_llama, ids):
    model, gates = trained(relu_llama, (0.3, 0.7001))
    gates.begin(TOKENS, 1.0)
    before, limits = model(ids).logits, gates.limits
    assert limits == torch.tensor(limits).bfloat16().tolist()
    assert all(0 <= t - limit < t / 128 for t, limit in zip((0.3, 0.7001), limits, strict=True))
    gates.remove()
    assert torch.equal(before, model(ids).logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"mlp_bias": True}), ("phi3", {}), ("falcon_h1", {"mlp_multipliers": [0.5, 2.0]})],
)
@pytest.mark.parametrize("at_0", [5, 60])
def test_one_threshold_a_layer_does_what_one_a_neuron_did(
    make_model, tmp_path, ids, family, changes, at_0
):
    convert(make_model(family, initializer_range=0.1, **changes), tmp_path / "relu")
    model, gates = trained(tmp_path / "relu")
    g = torch.Generator().manual_seed(0)
    gates.thresholds = [torch.rand(96, generator=g).mul(0.3).tolist() for _ in range(2)]
    gates.gates[0].threshold.data[:at_0] = 0.0  # as in a run too short to move them
    model.eval()
    before, densities = model(ids).logits, [gate.fired.item() for gate in gates.gates]
    state, limits = model.state_dict(), gates.limits
    gates.fold(model, state)
    assert not any("threshold" in name for name in state)
    gates.remove()
    model.load_state_dict(state)
    counted = TrainedGates(model, limits)
    model.eval()
    assert min(limits) > 0.1
    assert (model(ids).logits - before).norm() < 1e-2 * before.norm()
    fired = [gate.fired.item() for gate in counted.gates]
    assert fired == pytest.approx(densities, rel=0.01)


def test_a_price_makes_gates_sparser_and_raises_thresholds(relu_llama, text_file, tmp_path):
    densities = {}
    for l1 in (0.0, 1.0):
        settings = {"l1": l1, "l1_schedule": "constant", "penalty": "count", "max_steps": 30}
        out = tmp_path / str(l1)
        done = finetune(relu_llama, out, small(text_file, **settings), progress=Progress(True))
        densities[l1] = done.density, max(done.thresholds)
    assert densities[1.0][0] < 0.9 * densities[0.0][0]
    assert densities[1.0][1] > densities[0.0][1]


def test_judged_plainly_the_result_is_as_reported(relu_llama, tokenizer, text_file, tmp_path):
    recipe = small(text_file, eval_blocks=2, eval_steps=0, max_steps=None, epochs=1, batch_size=64)
    recipe = dataclasses.replace(recipe, micro_batch_size=64)
    done = finetune(relu_llama, tmp_path / "out", recipe, progress=Progress(True))
    texts = read_texts([str(text_file)], "text")
    write_tokens(token_stream(texts, tokenizer), tmp_path / "tokens.bin")
    stored = json.loads((tmp_path / "out/config.json").read_text())["twell"]["thresholds"]
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert stored == done.thresholds == report["thresholds"]
    assert len(report["density_by_layer"]) == 2
    assert all(name in report for name in ("l1", "density", "cross_entropy"))
    assert not any("threshold" in name for name in weights(tmp_path / "out"))
    model, fired = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), []
    for layer, threshold in zip(model.model.layers, stored, strict=True):
        layer.mlp.act_fn = torch.nn.Threshold(threshold, 0.0)
        layer.mlp.act_fn.register_forward_hook(lambda m, a, out: fired.append(out != 0))
    blocks = read_blocks(tmp_path / "tokens.bin", 32)
    held = blocks[hold_out(len(blocks), 0.01)[1]]
    ids = torch.from_numpy(held[np.arange(2) * len(held) // 2].astype("int64"))
    loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(done.cross_entropy, rel=1e-4)
    assert torch.stack(fired).double().mean().item() == pytest.approx(done.density, rel=1e-4)


def test_without_thresholds_the_result_is_plain_relu(relu_llama, text_file, tmp_path):
    recipe = small(text_file, train_thresholds=False)
    done = finetune(relu_llama, tmp_path / "out", recipe, progress=Progress(True))
    assert done.thresholds == [0.0, 0.0]
    other = finetune(relu_llama, tmp_path / "other", small(text_file), progress=Progress(True))
    assert min(other.thresholds) > 0
    before, after = weights(relu_llama), weights(tmp_path / "out")
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(before[name], after[name])
