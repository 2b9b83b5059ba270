"""How the weights of down projections lie in a loaded model: by rows of neurons, unseen outside."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from twellctl.bench.twell_side import twell_twin
from twellctl.bundle import twell_model
from twellctl.bundle.twell_model import gated_ffns, lay_weights, twell_class
from twellctl.convert import convert
from twellctl.export import export

IDS = (torch.arange(34).view(2, 17) * 37) % 512
FAMILIES = {"llama": "LlamaForCausalLM", "phi3": "Phi3ForCausalLM"}  # gate and up apart, in one


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def exported(family, make_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layout")
    convert(make_model(family), folder / "relu")
    export(folder / "relu", folder / "out")
    return folder / "out"


@pytest.fixture
def load(family, exported):
    """`load(**settings)` gives the exported model over TwELL."""
    return lambda **more: twell_class(FAMILIES[family]).from_pretrained(exported, **more)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """Weights on the CPU count as such that kernels read."""
    monkeypatch.setattr(twell_model, "_kernels_read", lambda *weight: True)


def layouts(model: nn.Module) -> set[str]:
    """How the down projections of a model lie."""
    weights = [ffn.down_proj.weight for ffn in gated_ffns(model)]
    return {
        "by columns" if w.is_contiguous() else "by neurons" if w.t().is_contiguous() else "oddly"
        for w in weights
    }


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def test_on_the_cpu_weights_stay_as_they_are(load):
    assert layouts(load()) == {"by columns"}
    assert layouts(load(dtype=torch.bfloat16)) == {"by columns"}


def test_a_loaded_model_lies_by_neurons_and_is_the_same(load, family, as_if_on_a_gpu, monkeypatch):
    model = load()
    assert layouts(model) == {"by neurons"}
    pointers = [weight.data_ptr() for weight in model.parameters()]
    lay_weights(model)
    assert [weight.data_ptr() for weight in model.parameters()] == pointers, "laid twice"
    monkeypatch.undo()
    plain = load()
    for (name, ours), (other, theirs) in zip(
        model.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert (name, ours.shape) == (other, theirs.shape)
        assert torch.equal(ours, theirs), name
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-4)
    if family == "phi3":  # whose gate and up are one weight
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(logits(compiled), logits(plain), rtol=0, atol=1e-4)


def test_moving_a_model_lays_it_down(load, monkeypatch):
    model = load()
    in_bf16 = lambda weight, trained: weight.dtype == torch.bfloat16  # noqa: E731
    monkeypatch.setattr(twell_model, "_kernels_read", in_bf16)
    identities = [id(weight) for weight in model.parameters()]
    assert layouts(model.to("cpu")) == {"by columns"}
    assert layouts(model.to(torch.bfloat16)) == {"by neurons"}
    assert layouts(model.float()) == {"by neurons"}
    assert [id(weight) for weight in model.parameters()] == identities
    assert layouts(copy.deepcopy(model)) == {"by neurons"}


def test_saved_files_have_the_layout_of_the_checkpoint(load, exported, as_if_on_a_gpu, tmp_path):
    model = load()
    assert layouts(model) == {"by neurons"}
    model.save_pretrained(tmp_path / "saved")
    folders = tmp_path / "saved", exported
    (ours,), (theirs,) = (list(folder.glob("*.safetensors")) for folder in folders)
    assert ours.read_bytes() == theirs.read_bytes()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert layouts(stock) == {"by columns"}


def test_a_state_dict_is_taken_and_given(load, as_if_on_a_gpu):
    model, wanted = load(), load()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    taken = {name: tensor.contiguous() for name, tensor in wanted.state_dict().items()}
    model.load_state_dict(taken)
    assert layouts(model) == {"by neurons"}
    assert torch.equal(logits(model), logits(wanted))


def test_an_export_without_kernels_stays_by_columns(load, as_if_on_a_gpu, monkeypatch):
    monkeypatch.setattr(twell_model, "kernel_sources", lambda bundle: "")
    assert layouts(load()) == {"by columns"}


def test_layers_that_kernels_do_not_replace_stay_by_columns(load, monkeypatch):
    """One has a hook, which expects to run; one is of a class that may compute something else."""
    model = load()
    monkeypatch.setattr(twell_model, "_kernels_read", lambda *weight: True)
    hooked, of_other_class = (ffn.down_proj for ffn in gated_ffns(model))
    hooked.register_forward_hook(lambda *args: None)

    class Other(nn.Linear):
        pass

    of_other_class.__class__ = Other
    lay_weights(model)
    assert layouts(model) == {"by columns"}


def test_weights_that_are_offloaded_stay_by_columns(load, monkeypatch):
    from accelerate import cpu_offload

    model = load()
    wanted = logits(model)
    cpu_offload(model, torch.device("cpu"))
    monkeypatch.setattr(twell_model, "_kernels_read", lambda *weight: True)
    lay_weights(model)
    assert layouts(model) == {"by columns"}
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
def test_which_weights_kernels_read(trained):
    """Those on a GPU in bf16, in training in float32 too, and none that is sharded."""

    def is_read(dtype, is_cuda=True, **more):
        weight = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, **more)
        return twell_model._kernels_read(weight, trained)

    assert is_read(torch.bfloat16)
    assert is_read(torch.float32) == trained
    assert not is_read(torch.float16)
    assert not is_read(torch.bfloat16, device_mesh=None)
    assert not is_read(torch.bfloat16, is_cuda=False)


def test_a_twin_leaves_the_layout_of_its_model(relu_llama, as_if_on_a_gpu):
    body = AutoModelForCausalLM.from_pretrained(relu_llama).model
    twin = twell_twin(body, {"tile": 256, "slots": (64,) * 2}, "auto")
    assert layouts(body) == {"by columns"}
    assert layouts(twin) == {"by neurons"}
    for (name, ours), theirs in zip(twin.named_parameters(), body.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours is theirs) == ("down_proj" not in name)
