"""Random models of known density: every family, deep ones, their memory, and what is refused."""

import json

import pytest
import torch
import torch.nn.functional as F
from shapes import FAMILIES, write_config

from twellctl.bench import random_model as module
from twellctl.bench.random_model import BUILT_IN, Shape, make_model, open_shape
from twellctl.bundle.twell_model import gated_ffns
from twellctl.bundle.twell_synthetic import make_rows, make_weights
from twellctl.errors import TwellError
from twellctl.firing.counts import count_layers, fired_meter


@pytest.fixture(autouse=True)
def _less(monkeypatch):
    monkeypatch.setattr(module, "SET_TOKENS", 2048)


def drawn(shape: Shape, density: float, dtype: torch.dtype = torch.float32):
    return make_model(shape, density, dtype=dtype, generator=torch.Generator().manual_seed(0))


def random_ids(shape: Shape, *size: int) -> torch.Tensor:
    return torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(1))


def unions(body, ids) -> list[float]:
    """By layer: the share of neurons that fire for some of 128 consecutive tokens."""
    found = {}

    def count(layer, gate, active):
        found[layer] = (active != 0).unflatten(0, (-1, 128)).any(1).float().mean().item()

    with fired_meter(body, count):
        body(input_ids=ids, use_cache=False)
    return list(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_fires_as_asked_and_for_each_token_anew(family, tmp_path):
    density = 0.02
    shape = open_shape(write_config(tmp_path, family), None, context=512)
    model = drawn(shape, density)
    assert type(model).__name__.lower() == f"{family}forcausallm"
    assert model.config.hidden_act == "relu"
    with torch.no_grad():
        measured = count_layers(model.model, random_ids(shape, 4, 512), 256)
        together = unions(model.model, random_ids(shape, 4, 512))
    assert [layer.density for layer in measured] == pytest.approx([density] * 3, rel=0.05)
    assert min(together) > 0.95 * (1 - (1 - density) ** 128)


def test_depth_makes_neither_density_nor_likeness(tmp_path):
    sizes = {"num_hidden_layers": 24, "hidden_size": 64, "intermediate_size": 128}
    shape = open_shape(write_config(tmp_path, **sizes), None, context=512)
    model = drawn(shape, 0.05)
    with torch.no_grad():
        measured = count_layers(model.model, random_ids(shape, 2, 512), 256)
        together = unions(model.model, random_ids(shape, 2, 512))
    assert [layer.density for layer in measured] == pytest.approx([0.05] * 24, rel=0.05)
    assert together[-1] > 0.97 * (1 - (1 - 0.05) ** 128)


def test_how_a_converted_model_runs_over_twell_is_not_taken_over(tmp_path):
    config = write_config(tmp_path, twell={"slots": [64] * 3})
    assert "twell" not in open_shape(config, 1, context=64).config


def test_all_neurons_may_fire(tmp_path):
    shape = open_shape(write_config(tmp_path), 1, context=64)
    model = drawn(shape, 1.0)
    with torch.no_grad():
        (layer,) = count_layers(model.model, random_ids(shape, 4, 64), 256)
    assert layer.density == 1


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_the_likeliest_token_depends_on_what_came_before(family, tmp_path):
    shape = open_shape(write_config(tmp_path, family), None, context=512)
    model = drawn(shape, 0.05)
    ids = random_ids(shape, 8, 16, 48)
    last = ids[:, 0, -1].clone()  # of 16 texts each
    ids[..., -1] = last[:, None]
    with torch.no_grad():
        chosen = model(input_ids=ids.flatten(0, 1)).logits[:, -1].argmax(-1).view(8, 16)
    assert sum(len(found.unique()) for found in chosen) > 3 * 8
    # a head tied to the embeddings would choose the last token again
    assert (chosen == last[:, None]).float().mean() < 0.1


def test_what_is_written_is_kept_but_for_relu_layers_and_context(tmp_path):
    file = write_config(tmp_path, "qwen3", rope_theta=5e5)
    shape = open_shape(file, 2, context=256)
    assert (shape.name, shape.layers, shape.context, shape.vocabulary) == (file, 2, 256, 2048)
    assert shape.config["head_dim"] == 32
    assert shape.config["layer_types"] == ["full_attention"] * 2
    assert shape.config["rope_parameters"]["rope_theta"] == 5e5
    assert not shape.config["tie_word_embeddings"]
    assert shape.described == {"heads": 4, "kv_heads": 2, "vocabulary": 2048}
    model = drawn(shape, 0.05)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert weights == 2 * shape.layer_weights + shape.other_weights
    assert open_shape(str(tmp_path), None, context=256).layers == 3
    assert json.loads((tmp_path / "config.json").read_text())["hidden_act"] == "silu"


def test_without_a_config_it_is_a_llama_of_1_5_billion():
    shape = open_shape(None, None, context=2048)
    weights = shape.layers * shape.layer_weights + shape.other_weights
    assert weights == pytest.approx(1.64e9, rel=0.01)
    assert (shape.name, shape.context) == ("random Llama", 2048)
    assert BUILT_IN["max_position_embeddings"] > shape.context


def test_biases_are_drawn_and_gates_know_of_theirs(tmp_path):
    file = write_config(tmp_path, attention_bias=True, mlp_bias=True)
    shape = open_shape(file, None, context=512)
    model = drawn(shape, 0.05)
    for ffn in gated_ffns(model):
        assert ffn.gate_proj.bias.std() == pytest.approx(0.05, rel=0.2)
        assert ffn.down_proj.bias[0] == 0
    with torch.no_grad():
        measured = count_layers(model.model, random_ids(shape, 4, 512), 256)
    assert [layer.density for layer in measured] == pytest.approx([0.05] * 3, rel=0.05)


def test_what_does_not_fit_is_refused_with_the_layers_that_do(monkeypatch):
    monkeypatch.setattr(module, "WORKSPACE", 1000)
    config = {"num_hidden_layers": 10, "hidden_size": 10, "intermediate_size": 30}
    shape = Shape("big", config, layer_weights=1000, other_weights=500)
    needed = 1000 + 1000 + 10 * 2 * (1000 + 300)  # with W_down in two layouts
    shape.require_memory(needed)
    with pytest.raises(TwellError, match=r"big with 10 layers needs .* give --layers 9 or fewer"):
        shape.require_memory(needed - 1)
    with pytest.raises(TwellError, match="give --layers 7 or fewer"):
        shape.require_memory(needed - 1, quantize="fp8")
    with pytest.raises(TwellError, match="take a smaller model"):
        shape.require_memory(2500)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "falcon_h1"}, r"\(falcon_h1\) has model\..*, which bench cannot draw"),
        ({"model_type": "nonesuch"}, "transformers makes no model of it"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"is quantised \(fp8\)"),
        ({"hidden_act": None}, "is not a gated SiLU model"),
    ],
)
def test_configs_that_make_no_model_are_refused(changes, said, tmp_path):
    with pytest.raises(TwellError, match=said) as caught:
        open_shape(write_config(tmp_path, **changes), None, context=64)
    assert len(str(caught.value).splitlines()) == 1


def test_bad_paths_are_refused(tmp_path):
    with pytest.raises(TwellError, match="does not exist: give a config"):
        open_shape(str(tmp_path), None, context=64)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("density", [0.005, 0.05, 0.3, 1])
def test_an_even_density_is_the_one_asked_for(density, bias):
    numbers = {"dtype": torch.float32, "generator": torch.Generator().manual_seed(1)}
    w_gate, _, _, b_gate, _, _ = make_weights(512, 1024, density, bias=bias, **numbers).split
    fired = F.linear(make_rows(512, 512, **numbers), w_gate, b_gate) > 0
    assert float(fired.float().mean()) == pytest.approx(density, rel=0.06)
