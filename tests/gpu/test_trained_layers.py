"""FFNs that use the training kernels once few enough of their neurons fire, on a GPU."""

import functools

import pytest
import torch
from on_gpu import HOPPER
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from twellctl.bundle import twell_ffn
from twellctl.bundle.twell_synthetic import make_rows, make_weights
from twellctl.convert import convert
from twellctl.finetune import finetune
from twellctl.training.recipe import resolve_recipe
from twellctl.training.sparsity import FfnPenalty

pytestmark = HOPPER
K, N, M, DENSITY = 256, 1024, 4096, 0.01


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """A place for each pass over the kernels, which small problems take, too."""
    passes, run = [], twell_ffn._train_ffn_op
    monkeypatch.setattr(twell_ffn, "TRAINED_FROM", 0)
    monkeypatch.setattr(twell_ffn, "_train_ffn_op", lambda *a: passes.append(1) or run(*a))
    return passes


class Body(torch.nn.Module):
    """Two FFNs, both over the same x."""

    def __init__(self, dtype):
        super().__init__()
        config = LlamaConfig(hidden_size=K, intermediate_size=N, hidden_act="relu")
        self.layers = torch.nn.ModuleList(LlamaMLP(config) for _ in range(2))
        made = {"dtype": dtype, "generator": torch.Generator("cuda").manual_seed(0)}
        self.to("cuda", dtype)
        for layer in self.layers:
            weights = make_weights(K, N, DENSITY, bias=False, **made)
            for name, weight in zip(("gate", "up", "down"), weights.split, strict=False):
                getattr(layer, f"{name}_proj").weight.data.copy_(weight)
        self.x = make_rows(M, K, **made)
        self.penalty = FfnPenalty(self)
        self.penalty.begin(M, 0.5)

    def step(self, *, checkpointed: bool, autocast: bool) -> dict[str, torch.Tensor]:
        """Gradients by name; those of both layers depend on x alone."""
        self.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            for layer in self.layers:
                again = functools.partial(checkpoint, layer, use_reentrant=False)
                y = (again if checkpointed else layer)(self.x.detach().requires_grad_())
                y.float().square().mean().backward()
        return {name: p.grad.float() for name, p in self.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sparse_layer_uses_the_kernels_and_gradients_stay(launched, dtype, checkpointed):
    how = {"checkpointed": checkpointed, "autocast": dtype == torch.float32}
    body = Body(dtype)
    dense = body.step(**how)
    assert not launched
    body.penalty.follow([DENSITY, 0.5])
    found = body.step(**how)
    assert len(launched) == 1 + checkpointed
    for name, wanted in dense.items():
        assert (found[name] - wanted).norm() <= 0.02 * wanted.norm(), name
        if "down_proj" in name:  # as W_down does: by rows of neurons, dense and over TwELL
            assert wanted.t().is_contiguous(), name
            assert found[name].t().is_contiguous(), name
    with torch.no_grad():
        body.layers[0](body.x)
    assert len(launched) == 1 + checkpointed


def test_a_compiled_run_uses_the_kernels(make_model, text_file, tmp_path, monkeypatch, launched):
    monkeypatch.setattr(twell_ffn, "TRAINED_BELOW", 1.0)
    settings = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 10}
    convert(make_model("llama", initializer_range=0.05, **settings), tmp_path / "relu")
    flags = {"data": [str(text_file)], "seq_len": 64, "batch_size": 8, "micro_batch_size": 4}
    flags |= {"max_steps": 12, "eval_blocks": 4, "save_steps": 0, "learning_rate": 1e-3}
    flags |= {"penalty": "l1", "l1": 1e-3, "logging_steps": 100}
    done = {}
    for name, route, compiled in (("dense", "dense", False), ("twell", "", True)):
        monkeypatch.setenv("TWELL_ROUTE", route)
        recipe = resolve_recipe(None, flags | {"compile": compiled})
        done[name] = finetune(tmp_path / "relu", tmp_path / name, recipe)
        assert bool(launched) == (name == "twell")
    assert done["twell"].cross_entropy == pytest.approx(done["dense"].cross_entropy, rel=2e-3)
