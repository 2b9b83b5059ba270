"""Muon: the step of a matrix, who takes it, and what a checkpoint holds."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_model import gated_ffns
from twellctl.training import optimizer
from twellctl.training.optimizer import ADAMW_SIZE, Muon, make_optimizer, orthogonal

EMBEDDINGS = ("embed_tokens", "lm_head")
ARGUMENTS = SimpleNamespace(
    learning_rate=0.01, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0
)


@pytest.mark.parametrize("shape", [(2, 8, 8), (3, 16, 4), (3, 4, 16)])
def test_orthogonal_keeps_directions_and_levels_sizes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(x)
    assert found.shape == x.shape
    assert found.is_contiguous()  # weights take steps that lie otherwise much more slowly
    sizes = torch.linalg.svdvals(found)
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    aligned = u.mT @ found @ v.mT  # diagonal if the directions are those of x
    off = aligned - torch.diag_embed(aligned.diagonal(dim1=-2, dim2=-1))
    assert off.norm() < 0.05 * aligned.norm()


def stepped(model, chunk, monkeypatch):
    monkeypatch.setattr(optimizer, "AT_ONCE", chunk)
    made = make_optimizer(model, (), ARGUMENTS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        made.step()
    return made


def test_matrices_of_layers_take_muons_step_the_rest_adamws(make_model, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    made = stepped(model, 1, monkeypatch)
    for name, p in model.named_parameters():
        muon = p.ndim == 2 and ".layers." in name
        assert ("momentum" in made.state[p]) == muon, name
        change = (p - before[name]).square().mean().sqrt().item()
        if muon:  # three steps of about the size of AdamW's
            most = 3 * 0.01 * ADAMW_SIZE
            assert 0.2 * most < change < 1.6 * most, name
        else:
            assert change < 3.1 * 0.02, name


def test_however_many_go_together_and_lie_the_step_is_the_same(make_model, monkeypatch):
    """One by one or together, by rows or by columns, as which they stay."""
    folder = make_model("llama")
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]
    down = [ffn.down_proj.weight for ffn in gated_ffns(models[1])]
    for weight in down:
        weight.data = weight.data.t().contiguous().t()
    _, made = (stepped(*given, monkeypatch) for given in zip(models, (1, 1 << 26), strict=True))
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6), name
    for weight in down:
        assert weight.t().is_contiguous()
        assert made.state[weight]["momentum"].t().is_contiguous()
    steps = made._begin_steps(down)()
    assert all(step.t().is_contiguous() for step in steps)


def test_state_goes_through_a_checkpoint(make_model, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.float32)
    made = stepped(model, 1 << 26, monkeypatch)
    state = copy.deepcopy(made.state_dict())
    again = make_optimizer(model, (), ARGUMENTS)
    again.load_state_dict(state)
    for p in model.parameters():
        for key, value in made.state[p].items():
            assert torch.equal(again.state[p][key], value)


def test_adamw_and_adapters(make_model):
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"))
    made = make_optimizer(model, (), ARGUMENTS, "adamw")
    assert isinstance(made, Muon)
    assert not any(group["matrices"] for group in made.param_groups)
    assert {group["lr"] for group in made.param_groups} == {0.01}
    count = sum(len(group["params"]) for group in made.param_groups)
    assert count == len(list(model.parameters()))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_tokens_that_are_hardly_there_stay(make_model, kind, tied):
    """Their gradient is a thousandth of the others': AdamW alone moves all rows equally far."""
    path = make_model("llama", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    embeddings = [p for n, p in model.named_parameters() if n.split(".")[-2] in EMBEDDINGS]
    before = [p.detach().clone() for p in embeddings]
    made = make_optimizer(model, (), ARGUMENTS, kind)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for p in embeddings:
            p.grad = torch.randn(p.shape, generator=generator) / p.numel() ** 0.5  # of norm 1
            p.grad[::2] /= 1000
        made.step()
    for p, was in zip(embeddings, before, strict=True):
        moved = (p.detach() - was).square().mean(1).sqrt()
        assert 0 < moved[::2].max() < 0.05 * moved[1::2].min()
    others = [group for group in made.param_groups if not group["matrices"]]
    sizes = {id(p): group["eps"] for group in others for p in group["params"]}
    held = [id(p) for p in embeddings]
    assert all((sizes[number] > 1e-5) == (number in held) for number in sizes)
