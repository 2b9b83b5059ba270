"""The loss in chunks is the plain one: values and gradients, tied or not, and scaled."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from twellctl.models import head_loss
from twellctl.models.head_loss import HeadLoss
from twellctl.models.layers import ffn_layers
from twellctl.training.layer_states import LayerStates, comparable

WEIGHT = 0.7


def plain(model, teacher, ids, weight):
    """(loss, cross-entropy, KL) from whole logits."""
    logits = model(ids).logits[:, :-1].float().flatten(0, 1)
    wanted = teacher(ids).logits[:, :-1].detach().float().flatten(0, 1)
    cross_entropy = F.cross_entropy(logits, ids[:, 1:].flatten())
    both = (t.log_softmax(-1) for t in (logits, wanted))
    kl = F.kl_div(*both, log_target=True, reduction="batchmean")
    return (1 - weight) * cross_entropy + weight * kl, cross_entropy, kl


@pytest.mark.parametrize("family", ["llama", "phi3", "falcon_h1", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_plain_loss(make_model, monkeypatch, family, tied):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 7 * 512)
    scaled = {
        "falcon_h1": {"lm_head_multiplier": 0.25},
        "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8, "pad_token_id": 0},
    }.get(family, {})
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(
            make_model(family, seed=seed, tie_word_embeddings=tied, **scaled), dtype=torch.float32
        )
        for seed in (0, 1)
    )
    ids = torch.randint(512, (3, 11), generator=torch.Generator().manual_seed(0))
    expected = plain(model, teacher, ids, WEIGHT)
    expected[0].backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    student, taught = HeadLoss(model), HeadLoss(teacher)
    found = student.losses(ids, taught, WEIGHT)
    (2 * found.loss).backward()
    for name, value in zip(("loss", "cross_entropy", "teacher_kl"), expected, strict=True):
        assert getattr(found, name).item() == pytest.approx(value.item(), rel=1e-5), name
    for name, parameter in model.named_parameters():
        error = (parameter.grad / 2 - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, f"{name}: {error}"
    with pytest.raises(RuntimeError, match=r"already taken|second time"):
        found.loss.backward()
    student.remove()
    assert model(ids).logits.shape == (3, 11, 512)


def test_a_frozen_head_and_no_teacher(make_model):
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.float32)
    model.lm_head.requires_grad_(False)
    ids = torch.arange(20).view(2, 10)
    wanted = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    losses = HeadLoss(model).losses(ids)
    losses.loss.backward()
    assert losses.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert losses.teacher_kl == 0
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad.norm() > 0


def test_without_gradients_none_are_computed(make_model):
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.float32)
    ids, head = torch.arange(20).view(2, 10), HeadLoss(model)
    with torch.no_grad(), torch.profiler.profile() as profiler:
        assert not head.losses(ids).loss.requires_grad
    with torch.profiler.profile() as training:
        head.losses(ids)
    count = [
        sum(e.count for e in p.key_averages() if e.key == "aten::mm") for p in (profiler, training)
    ]
    assert count[1] == count[0] + 2


# ---- the distance to the layers of a teacher


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
            layer.register_forward_hook(
                lambda _, __, out, to=which: to.append(out if torch.is_tensor(out) else out[0])
            )
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


def test_comparable(make_model):
    model = load(make_model("llama"))
    assert comparable(model, load(make_model("qwen2")))
    assert not comparable(model, load(make_model("llama", num_hidden_layers=3)))
    assert not comparable(model, load(make_model("llama", hidden_size=64)))
