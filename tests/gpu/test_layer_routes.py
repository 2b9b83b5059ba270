"""Contests on a GPU: within the steps, whatever they are like, and followed by the kernels."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from twellctl.bundle import twell_ffn
from twellctl.convert import convert
from twellctl.finetune import finetune
from twellctl.firing.synthetic import make_rows, make_weights
from twellctl.here.own_kernels import own_kernels
from twellctl.training import layer_routes
from twellctl.training.layer_routes import DENSE, TWELL, LayerRoutes, Passes
from twellctl.training.progress import Progress
from twellctl.training.recipe import resolve_recipe
from twellctl.training.sparsity import FfnPenalty

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU",
    ),
]
K, N, M, DENSITY = 256, 1024, 4096, 0.01


class Body(torch.nn.Module):
    """Two FFNs, one behind the other."""

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
        """Gradients by name; those of both layers hang on x alone."""
        self.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            for layer in self.layers:
                again = functools.partial(checkpoint, layer, use_reentrant=False)
                y = (again if checkpointed else layer)(self.x.detach().requires_grad_())
                y.float().square().mean().backward()
        return {name: p.grad.float() for name, p in self.named_parameters()}


def settle(body, routes, densities, **how) -> dict[str, torch.Tensor]:
    """Steps until no contest is held; the gradients of the one after."""
    routes.update(densities)
    if routes._loading is not None:
        routes._loading.join()
    for _ in range(20):
        routes.update(densities)
        gradients = body.step(**how)
        torch.cuda.synchronize()
        if not any(layer.contest for layer in routes.layers):
            return gradients
    raise AssertionError("a contest does not end")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_go_over_and_gradients_stay(monkeypatch, dtype, checkpointed):
    how = {"checkpointed": checkpointed, "autocast": dtype == torch.float32}
    body = Body(dtype)
    dense = body.step(**how)
    said = []
    routes = LayerRoutes(body.penalty.ffns, said.append)
    monkeypatch.setattr(layer_routes, "FASTER", 1e9)
    monkeypatch.setattr(layer_routes, "LOST", 1e9)
    launched = []
    run = twell_ffn._train_ffn_op
    monkeypatch.setattr(twell_ffn, "_train_ffn_op", lambda *a: launched.append(1) or run(*a))
    found = settle(body, routes, [DENSITY, 0.5], **how)
    assert [ffn.twell_meter.route for ffn in body.penalty.ffns] == [TWELL, None]
    assert len(said) == 1
    assert said[0].startswith("layer 0 is over TwELL, at 1.00% density: ")
    assert launched
    for name, wanted in dense.items():
        assert (found[name] - wanted).norm() <= 0.02 * wanted.norm(), name
        if "down_proj" in name:  # as W_down does: by rows of neurons, dense and over TwELL
            assert wanted.t().is_contiguous(), name
            assert found[name].t().is_contiguous(), name
    launched.clear()
    body.step(**how)
    assert len(launched) == 1 + checkpointed
    with torch.no_grad():
        body.layers[0](body.x)
    assert len(launched) == 1 + checkpointed


@pytest.mark.parametrize("checkpointed", [False, True])
def test_passes_are_timed_forward_and_backward(checkpointed):
    body, passes = Body(torch.bfloat16), Passes()
    body.penalty.ffns[0].twell_meter.watch = passes.watch
    for _ in range(3):
        body.step(checkpointed=checkpointed, autocast=False)
    with torch.no_grad():
        body.layers[0](body.x)
    times = passes.milliseconds()
    assert len(times) == 3
    assert all(0 < t < 1000 for t in times)


def test_what_the_kernels_do_not_take_is_said():
    body, said = Body(torch.float32), []
    routes = LayerRoutes(body.penalty.ffns, said.append)
    settle(body, routes, [DENSITY, 0.5], checkpointed=False, autocast=False)
    assert said == ["FFNs are trained densely: the kernels take bf16, not float32"]
    assert [ffn.twell_meter.route for ffn in body.penalty.ffns] == [DENSE, None]


def test_a_compiled_run_goes_over_and_says_so(make_model, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_routes, "FASTER", 1e9)
    monkeypatch.setattr(layer_routes, "LOST", 1e9)
    monkeypatch.setattr(layer_routes, "SHARE", 1e9)
    monkeypatch.setattr(layer_routes, "BELOW", 1.0)
    layer_routes._load(
        own_kernels(), torch.cuda.current_device()
    )  # or it lasts longer than the run
    settings = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 10}
    convert(make_model("llama", initializer_range=0.05, **settings), tmp_path / "relu")
    flags = {"data": [str(text_file)], "seq_len": 64, "batch_size": 8, "micro_batch_size": 4}
    flags |= {"max_steps": 12, "eval_blocks": 4, "save_steps": 0, "learning_rate": 1e-3}
    flags |= {"penalty": "l1", "l1": 1e-3, "logging_steps": 100}
    done, said, progress = {}, [], Progress()
    progress.note = said.append
    for name, route, compiled in (("dense", "dense", False), ("twell", "", True)):
        monkeypatch.setenv("TWELL_ROUTE", route)
        recipe = resolve_recipe(None, flags | {"compile": compiled})
        done[name] = finetune(tmp_path / "relu", tmp_path / name, recipe, progress=progress)
    assert sum("is over TwELL" in note for note in said) == 10
    assert done["twell"].cross_entropy == pytest.approx(done["dense"].cross_entropy, rel=2e-3)
