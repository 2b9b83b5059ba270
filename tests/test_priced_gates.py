"""Priced gates: ReLU with the gradients of a soft one, the shifts, and what is stored."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from finetune_runs import small, weights
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_model import gate_and_up, gated_ffns
from twellctl.convert import convert
from twellctl.finetune import finetune
from twellctl.models.checkpoint import REPORT_FILE, open_checkpoint
from twellctl.models.loading import load_model
from twellctl.text.blocks import hold_out, read_blocks, token_stream, write_tokens
from twellctl.text.reading import read_texts
from twellctl.training.priced_gates import RIDGE, SLOPE, PricedGates

pytestmark = pytest.mark.usefixtures("no_answers")

TOKENS = 24


@pytest.fixture
def ids():
    return torch.randint(512, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))


def priced(folder, **how) -> tuple:
    model = load_model(open_checkpoint(folder)).requires_grad_(True)
    gates = PricedGates(model, **how)
    return model.train(), gates


def draw_shifts(gates: PricedGates) -> None:
    g = torch.Generator().manual_seed(0)
    for gate in gates.gates:
        gate.shift.data.copy_(torch.randn(gate.shift.shape, generator=g))
        gate.direction.copy_(torch.randn(gate.direction.shape, generator=g) / 4)


@pytest.mark.parametrize("training", [False, True])
def test_it_is_relu_and_counts_what_fires(relu_llama, ids, training):
    model, gates = priced(relu_llama)
    model.train(training)
    gates.begin(TOKENS)
    found = model(ids).logits
    densities = gates.densities()
    gates.remove()
    fired = []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda m, a, out: fired.append(out != 0))
    assert torch.equal(found, model(ids).logits)
    expected = [f.double().mean().item() for f in fired]
    assert densities.tolist() == pytest.approx(expected, rel=1e-6)


def test_gradients_are_those_of_the_soft_relu():
    gate = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    host = torch.nn.Module()
    host.mlp = torch.nn.Module()
    for name, size in (("gate_proj", (4, 7)), ("up_proj", (4, 7)), ("down_proj", (7, 4))):
        setattr(host.mlp, name, torch.nn.Linear(*size))
    host.mlp.act_fn = torch.nn.ReLU()
    gates = PricedGates(host)
    gates.begin(5, 0.3 * 0.5)
    up = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = gate.clone().requires_grad_()
    (host.mlp.act_fn.train()(x) * up).sum().backward()

    y = gate.clone().requires_grad_()
    soft = torch.sigmoid(y / SLOPE)
    (y * soft * up).sum().add(0.3 * 0.5 * soft.sum() / 5).backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def test_the_neurons_of_a_map_share_what_they_feel(relu_llama, ids):
    """Their gate gets the mean, and what the FFN reads gets what it would without that."""
    found = []
    for map_neurons in (0, 16):
        model, own = load_model(open_checkpoint(relu_llama)), 80
        mlp = model.model.layers[1].mlp
        mlp.gate_proj.weight.data[own:] = mlp.gate_proj.weight.data[-1]
        gates = PricedGates(model.requires_grad_(True).train(), map_neurons)
        gates.begin(TOKENS)
        x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (mlp(x) * torch.linspace(-1, 1, 32)).sum().backward()
        found.append((x.grad, mlp.gate_proj.weight.grad))
    (x, apart), (same_x, shared) = found
    torch.testing.assert_close(same_x, x)
    torch.testing.assert_close(shared[:own], apart[:own])
    assert (apart[own:] - apart[own]).abs().max() > 0.01 * apart.abs().max()
    torch.testing.assert_close(shared[own:], apart[own:].mean(0).expand(16, -1))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_rows_of_a_map_that_differ_by_rounding_become_one(make_model, family):
    biases = {"mlp_bias": True} if family == "llama" else {}
    folder = make_model(family, hidden_act="relu", **biases)
    model = load_model(open_checkpoint(folder))
    product = gate_and_up(gated_ffns(model)[1])[0]
    parts = {name: p.data for name, p in product.named_parameters()}
    for part in parts.values():
        part[80:96] = part[80].clone()
    gates = PricedGates(model, 16)
    before = {name: part.clone() for name, part in parts.items()}
    for part in parts.values():
        part[81:96] += 1e-7
    gates.fold(model, state := model.state_dict())
    (path,) = (name for name, module in model.named_modules() if module is product)
    for name, part in before.items():
        assert not torch.equal(parts[name], part)
        assert torch.equal(state[f"{path}.{name}"], part)


def test_a_shift_feels_what_its_neuron_costs(relu_llama, ids):
    model, gates = priced(relu_llama)
    draw_shifts(gates)
    gates.begin(TOKENS, 1e6)
    model(ids).logits.sum().backward()
    for gate in gates.gates:
        felt = gate.shift.grad != 0
        assert felt.float().mean() > 0.5
        assert felt.shape == (96,)


def test_the_direction_is_that_of_least_squares(make_model, tmp_path, ids):
    convert(make_model("llama", initializer_range=0.3), tmp_path / "relu")
    model, gates = priced(tmp_path / "relu")
    seen = []
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    gates.find_directions(model, iter([ids]))
    hook.remove()
    x = seen[0].flatten(0, 1).double()
    ridge = RIDGE * x.square().mean() * len(x)
    rows = torch.cat([x, ridge.sqrt() * torch.eye(x.shape[1]).double()])
    ones = torch.cat([torch.ones(len(x)), torch.zeros(x.shape[1])]).double()
    expected = torch.linalg.lstsq(rows, ones[:, None]).solution[:, 0]
    assert torch.allclose(gates.gates[1].direction.double(), expected, atol=1e-4)
    assert not model.model.layers[1].mlp._forward_pre_hooks


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"mlp_bias": True}), ("phi3", {}), ("falcon_h1", {"mlp_multipliers": [0.5, 2.0]})],
)
def test_folded_shifts_do_what_they_did(make_model, tmp_path, ids, family, changes):
    convert(make_model(family, initializer_range=0.1, **changes), tmp_path / "relu")
    model, gates = priced(tmp_path / "relu")
    model.eval()
    unshifted = model(ids).logits
    draw_shifts(gates)
    before = model(ids).logits
    state = model.state_dict()
    gates.fold(model, state)
    gates.remove()
    model.load_state_dict(state)  # strict: nothing of the gates is left in it
    assert (before - unshifted).norm() > 1e-2 * before.norm()
    assert torch.allclose(model(ids).logits, before, atol=1e-4 * before.abs().max().item())


def test_the_state_of_a_checkpoint_is_exact(relu_llama):
    _, gates = priced(relu_llama)
    draw_shifts(gates)
    _, others = priced(relu_llama)
    others.state = json.loads(json.dumps(gates.state))
    for gate, other in zip(gates.gates, others.gates, strict=True):
        assert torch.equal(gate.shift, other.shift)
        assert torch.equal(gate.direction, other.direction)


def test_judged_plainly_the_result_is_as_reported(relu_llama, tokenizer, text_file, tmp_path):
    recipe = small(text_file, eval_blocks=2, eval_steps=0, max_steps=None, epochs=1, batch_size=64)
    recipe = dataclasses.replace(recipe, micro_batch_size=64)
    done = finetune(relu_llama, tmp_path / "out", recipe)
    texts = read_texts([str(text_file)], "text")
    write_tokens(token_stream(texts, tokenizer), tmp_path / "tokens.bin")
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert len(report["density_by_layer"]) == 2
    assert all(name in report for name in ("l1", "density", "cross_entropy"))
    assert weights(tmp_path / "out").keys() == weights(relu_llama).keys()
    model, fired = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda m, a, out: fired.append(out != 0))
    blocks = read_blocks(tmp_path / "tokens.bin", 32)
    held = blocks[hold_out(len(blocks), 0.01)[1]]
    ids = torch.from_numpy(held[np.arange(2) * len(held) // 2].astype("int64"))
    loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(done.cross_entropy, rel=1e-4)
    assert torch.stack(fired).double().mean().item() == pytest.approx(done.density, rel=1e-4)
