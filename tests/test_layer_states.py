"""The distance to the teacher's layers: its gradient is plain autograd's, checkpointed or not."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from twellctl.training.layer_states import LayerStates, comparable, ffn_layers


def _append(which, module, args, output):
    which.append(output if torch.is_tensor(output) else output[0])


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient(make_model, family, checkpointing):
    model, teacher = (load(make_model(family, seed=seed)) for seed in (0, 1))
    ids = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(0))
    outputs = ([], [])
    for which, m in zip(outputs, (teacher, model), strict=True):
        for layer in ffn_layers(m):
            layer.register_forward_hook(partial(_append, which))
    with torch.no_grad():
        teacher(ids)
    loss = model(ids).logits.square().mean()
    distance = sum(
        ((x - y).square().sum(-1) / y.square().sum(-1)).mean()
        for y, x in zip(*outputs, strict=True)
    )
    (0.5 * loss + 0.5 * 0.7 * distance).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model, teacher = (load(make_model(family, seed=seed)) for seed in (0, 1))
    states = LayerStates(model, teacher, 0.7)
    states.scale = 0.5
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad():
        teacher(ids)
    (0.5 * model(ids, use_cache=False).logits.square().mean()).backward()
    for name, gradient in expected.items():
        error = (model.get_parameter(name).grad - gradient).norm() / gradient.norm()
        assert error < 1e-4, name
    states.remove()


def test_comparable(make_model):
    model = load(make_model("llama"))
    assert comparable(model, load(make_model("qwen2")))
    assert not comparable(model, load(make_model("llama", num_hidden_layers=3)))
    assert not comparable(model, load(make_model("llama", hidden_size=64)))
