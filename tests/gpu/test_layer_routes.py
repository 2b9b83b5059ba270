"""Contests on a GPU: apart from the step, whatever it is like, and followed by the kernels."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from twellctl import layer_routes
from twellctl.bundle import twell_ffn
from twellctl.convert import convert
from twellctl.finetune import finetune
from twellctl.layer_routes import DENSE, TWELL, LayerRoutes, NoKernels, contest
from twellctl.progress import Progress
from twellctl.recipe import resolve_recipe
from twellctl.sparsity import FfnPenalty
from twellctl.synthetic import EVEN, make_rows, make_weights

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
        self.x = make_rows(M, K, DENSITY, EVEN, **made)
        self.penalty = FfnPenalty(self, [0.0, 0.0])
        self.penalty.l1 = 0.5
        self.penalty.begin(M, 1.0)

    def step(self, *, checkpointed: bool, autocast: bool) -> dict[str, torch.Tensor]:
        """Gradients by name; those of both layers hang on x alone."""
        self.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            for layer in self.layers:
                again = functools.partial(checkpoint, layer, use_reentrant=False)
                y = (again if checkpointed else layer)(self.x)
                y.float().square().mean().backward()
        return {name: p.grad.float() for name, p in self.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_go_over_and_gradients_stay(monkeypatch, dtype, checkpointed):
    how = {"checkpointed": checkpointed, "autocast": dtype == torch.float32}
    body = Body(dtype)
    dense = body.step(**how)
    said = []
    routes = LayerRoutes(body.penalty.ffns, said.append)
    monkeypatch.setattr(layer_routes, "FASTER", 1e9)
    launched = []
    run = twell_ffn._train_ffn_op
    monkeypatch.setattr(twell_ffn, "_train_ffn_op", lambda *a: launched.append(1) or run(*a))
    state = torch.cuda.get_rng_state()
    routes.update([DENSITY, 0.5], 100.0)
    found = body.step(**how)
    assert [ffn.twell_meter.route for ffn in body.penalty.ffns] == [TWELL, None]
    assert len(said) == 1
    assert said[0].startswith("layer 0 is over TwELL, at 1.00% density: ")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert launched
    for name, wanted in dense.items():
        assert (found[name] - wanted).norm() <= 0.02 * wanted.norm(), name
    launched.clear()
    body.step(**how)
    assert len(launched) == 1 + checkpointed
    with torch.no_grad():
        body.layers[0](body.x)
    assert len(launched) == 1 + checkpointed


def test_contest_leaves_no_gradient():
    body = Body(torch.bfloat16)
    times = contest(body.layers[0], body.x)
    assert set(times) == {DENSE, TWELL}
    assert all(0 < t.gpu < 1000 and 0 < t.host < 1000 for t in times.values())
    assert all(p.grad is None for p in body.parameters())


def test_what_the_kernels_do_not_take_is_said():
    body = Body(torch.float32)
    with pytest.raises(NoKernels, match="the kernels take bf16, not float32"):
        contest(body.layers[0], body.x)


def test_a_compiled_run_goes_over_and_says_so(make_model, text_file, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(layer_routes, "FASTER", 1e9)
    monkeypatch.setattr(layer_routes, "BELOW", 1.0)
    settings = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 10}
    convert(make_model("llama", initializer_range=0.05, **settings), tmp_path / "relu")
    flags = {"data": [str(text_file)], "seq_len": 64, "batch_size": 8, "micro_batch_size": 4}
    flags |= {"max_steps": 12, "eval_blocks": 4, "save_steps": 0, "learning_rate": 1e-3}
    flags |= {"penalty": "l1", "l1": 1e-3, "logging_steps": 100}
    done = {}
    for name, route, compiled in (("dense", "dense", False), ("twell", "", True)):
        monkeypatch.setenv("TWELL_ROUTE", route)
        recipe = resolve_recipe(None, flags | {"compile": compiled})
        done[name] = finetune(tmp_path / "relu", tmp_path / name, recipe, progress=Progress())
    said = capfd.readouterr().err
    assert said.count("is over TwELL") == 10
    assert done["twell"].cross_entropy == pytest.approx(done["dense"].cross_entropy, rel=2e-3)
