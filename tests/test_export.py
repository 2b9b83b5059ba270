"""export: the folder loads without twellctl and over TwELL, or stock.

What must hold where twellctl is not installed runs in one child process, for all families at once.
"""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from edits import json_in
from other_processes import found_without_twellctl
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from twellctl.bundle.twell_bundle import read_bundle
from twellctl.bundle.twell_model import TwellFFN, gated_ffns, read_as_relu, twell_class
from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.firing.profiled import save_profile
from twellctl.models import shard_writer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.exportable import is_plain_ffn
from twellctl.models.loading import fingerprint, form_factors, load_model
from twellctl.models.silu_form import scaled
from twellctl.profile import profile

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"]
DIFFERENT = ["qwen2", "phi3"]  # with biases; without, and gate and up in one
IDS = (torch.arange(34).view(2, 17) * 37) % 512
CHILD = """
import torch
from transformers import AutoModelForCausalLM

results = {}
for folder in folders:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
        code, calls = sys.modules[type(model.model.layers[0].mlp).__module__], []
        packed_ffn = code.sparse_ffn
        code.sparse_ffn = lambda *a, **k: calls.append(k) or packed_ffn(*a, **k)
        logits = model((torch.arange(34).view(2, 17) * 37) % 512).logits
        logits.float().square().mean().backward()
        code.sparse_ffn = packed_ffn
        ffns = [type(m).__name__ for m in model.modules() if hasattr(m, "twell_slots")]
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
        results[folder, dtype] = {
            "class": type(model).__name__, "ffns": ffns, "calls": calls, "tokens": tokens,
            "logits": logits.detach(), "grads": grads,
        }
assert not any(name.startswith("twellctl") for name in sys.modules)
torch.save(results, out)
"""


def plain_relu(folder: Path) -> nn.Module:
    """The stock class with ReLU, and with the weights of `folder` as they were."""
    return load_model(open_checkpoint(folder), device=torch.device("cpu"))


def set_twell(folder: Path, **changes) -> None:
    with json_in(folder / "config.json") as config:
        config["twell"] |= changes


@pytest.fixture(scope="module")
def relu_models(make_model, tmp_path_factory) -> dict[str, Path]:
    """A converted model of each family."""
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(f"relu-{family}") / "model"
        convert(make_model(family, seed=2, intermediate_size=300), found[family])
    return found


@pytest.fixture(scope="module")
def exports(relu_models, tmp_path_factory) -> dict[str, Path]:
    """An export of each family; few slots, so that rows overflow."""
    found = {}
    for family, model in relu_models.items():
        found[family] = tmp_path_factory.mktemp("exports") / family
        export(model, found[family])
        set_twell(found[family], slots=[100, 128])
    return found


@pytest.fixture(scope="module")
def loaded_without_twellctl(exports, tmp_path_factory) -> dict:
    """What a process that cannot import twellctl computes, by (family, dtype)."""
    folders = {str(exports[key]): key for key in DIFFERENT}
    results = found_without_twellctl(CHILD, folders, tmp_path_factory.mktemp("home"))
    return {(folders[folder], dtype): result for (folder, dtype), result in results.items()}


@torch.no_grad()
@pytest.mark.parametrize("family", DIFFERENT)
def test_a_class_that_knows_silu_alone_computes_the_relu_model(relu_models, exports, family):
    relu = AutoModelForCausalLM.from_pretrained(relu_models[family])
    stock = AutoModelForCausalLM.from_pretrained(exports[family])
    assert stock.config.hidden_act == "silu"
    assert type(stock) is type(relu)
    wanted, found = relu(IDS).logits, stock(IDS).logits
    assert (found - wanted).norm() <= 5e-3 * wanted.norm()
    assert torch.equal(plain_relu(exports[family])(IDS).logits, wanted)
    prints = [fingerprint(open_checkpoint(of[family])) for of in (exports, relu_models)]
    assert prints[0] == prints[1]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_door_gives_the_same_bits(exports, load_trusted, family):
    stock = plain_relu(exports[family])
    causal = load_trusted(exports[family])
    body, found = load_trusted(exports[family], AutoModel, output_loading_info=True)
    assert not found["missing_keys"]
    assert set(found["unexpected_keys"]) <= {"lm_head.weight"}
    assert type(body).__name__ == f"Twell{type(stock.model).__name__}"
    for model in (causal, body):
        assert all(ffn.twell_sources for ffn in gated_ffns(model))
    wanted = stock(IDS).logits
    assert torch.equal(causal(IDS).logits, wanted)
    assert torch.equal(stock.lm_head(body(IDS).last_hidden_state), wanted)


@torch.no_grad()
def test_tied_weights_load_through_every_door(make_model, load_trusted, tmp_path):
    convert(make_model("llama", tie_word_embeddings=True), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "relu")(IDS).logits
    assert torch.equal(load_trusted(tmp_path / "out")(IDS).logits, wanted)
    body = load_trusted(tmp_path / "out", AutoModel)
    hidden = body(IDS).last_hidden_state
    assert torch.equal(hidden @ body.get_input_embeddings().weight.T, wanted)


def test_a_body_that_was_saved_alone_loads_again(exported, load_trusted, tmp_path):
    body = load_trusted(exported, AutoModel)
    body.save_pretrained(tmp_path / "body")
    config = json.loads((tmp_path / "body/config.json").read_text())
    assert config["architectures"] == ["LlamaModel"]
    assert config["auto_map"] == {"AutoModel": "modeling_twell.TwellLlamaModel"}
    again = load_trusted(tmp_path / "body", AutoModel)
    assert torch.equal(again(IDS).last_hidden_state, body(IDS).last_hidden_state)


def test_built_from_a_config_it_has_the_stock_modules(exports, load_trusted):
    """As engines with layers of their own build it: they read the source of its modules."""
    for family, folder in exports.items():
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            body = AutoModel.from_config(config, trust_remote_code=True)
            stock = AutoModel.from_config(config, trust_remote_code=False)
        assert type(body).__name__ == f"Twell{type(stock).__name__}", family
        assert list(map(type, body.modules()))[1:] == list(map(type, stock.modules()))[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", DIFFERENT)
def test_over_twell_without_twellctl(relu_models, exports, loaded_without_twellctl, family, dtype):
    found = loaded_without_twellctl[family, dtype]
    model = AutoModelForCausalLM.from_pretrained(relu_models[family], dtype=dtype)
    assert found["class"] == f"Twell{type(model).__name__}"
    assert found["ffns"] == [f"Twell{type(ffn).__name__}" for ffn in gated_ffns(model)]
    assert [call["slots"] for call in found["calls"]] == [100, 128]

    wanted = model(IDS).logits
    exact = dtype == torch.float32
    torch.testing.assert_close(found["logits"], wanted, rtol=0, atol=1e-4 if exact else 0.5)
    wanted.float().square().mean().backward()
    by = form_factors(open_checkpoint(exports[family]))
    for name, parameter in model.named_parameters():
        wanted_norm = parameter.grad.float().norm()
        grad = scaled(found["grads"][name], by[name]) if name in by else found["grads"][name]
        error = (grad.float() - parameter.grad.float()).norm()
        assert error <= (1e-5 if exact else 0.1) * wanted_norm, name
    if exact:
        tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
        assert torch.equal(found["tokens"], tokens)


def test_config_and_side_files(exported, relu_llama):
    config = json.loads((exported / "config.json").read_text())
    was = json.loads((relu_llama / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["auto_map"] == {
        "AutoModel": "modeling_twell.TwellLlamaModel",
        "AutoModelForCausalLM": "modeling_twell.TwellLlamaForCausalLM",
    }
    form = {"activation": "relu", "sharpness": [64] * 2, "down_share": [8] * 2}
    said = {"hidden_act": "silu", "twell": was["twell"] | form, "rope_theta": 10000.0}
    assert was["rope_parameters"]["rope_theta"] == 10000.0
    assert "rope_theta" not in was
    assert config == was | said | {key: config[key] for key in ("architectures", "auto_map")}
    manifest = json.loads((exported / "twell_manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert {"modeling_twell.py", "twell_kernels/README.md"} < set(manifest["sha256"])
    assert len(AutoTokenizer.from_pretrained(exported)) == 512
    names = {path.name for path in exported.iterdir()}
    assert {path.name for path in relu_llama.iterdir()} <= names
    assert "__init__.py" not in names


def test_profile_sets_slots_and_densities(relu_llama, text_file, tmp_path):
    found = profile(relu_llama, [str(text_file)], windows=4, seq_len=64)
    save_profile(found, str(tmp_path / "profile.json"))
    done = export(relu_llama, tmp_path / "a", profile=tmp_path / "profile.json")
    assert (done.class_name, done.profiled) == ("TwellLlamaForCausalLM", True)
    twell = json.loads((tmp_path / "a/config.json").read_text())["twell"]
    assert twell["slots"] == [layer.slots for layer in found.layers] == list(done.slots)
    assert twell["densities"] == [round(layer.density, 6) for layer in found.layers]
    again = export(tmp_path / "a", tmp_path / "b")  # an export exports, and keeps what it had
    assert again.slots == done.slots
    assert read_bundle(tmp_path / "a") == read_bundle(tmp_path / "b")


def test_refusals_leave_nothing(relu_llama, silu_llama, make_model, text_file, tmp_path):
    convert(make_model("llama", seed=9), tmp_path / "other")
    of_other = profile(tmp_path / "other", [str(text_file)], windows=1, seq_len=16)
    save_profile(of_other, tmp_path / "profile.json")
    out = tmp_path / "out"
    with pytest.raises(TwellError, match=r"profile.json is for another model \(.*other\)"):
        export(relu_llama, out, profile=tmp_path / "profile.json")
    with pytest.raises(TwellError, match="cannot be read"):
        export(relu_llama, out, profile=tmp_path / "none.json")
    with pytest.raises(TwellError, match="is a SiLU model: make it ReLU with 'twellctl convert"):
        export(silu_llama, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "profile.json"]
    out.mkdir()
    with pytest.raises(TwellError, match="exists"):
        export(relu_llama, out)
    assert export(relu_llama, out, overwrite=True).out == out


@pytest.mark.parametrize("most", [40_000, 10**9])
def test_weights_are_cut_anew(relu_llama, tmp_path, monkeypatch, most):
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", most)
    export(relu_llama, tmp_path / "out")
    was, now = open_checkpoint(relu_llama), open_checkpoint(tmp_path / "out")
    assert fingerprint(now) == fingerprint(was)
    if most == 10**9:
        assert now.shards == ("model.safetensors",)
        return
    assert now.shards[0] == f"model-00001-of-{len(now.shards):05}.safetensors"
    for shard in now.shards:
        tensors = load_file(tmp_path / "out" / shard)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= most or len(tensors) == 1
        assert (tmp_path / "out" / shard).stat().st_mode & 0o044
    wanted = AutoModelForCausalLM.from_pretrained(relu_llama)(IDS).logits
    assert torch.equal(plain_relu(tmp_path / "out")(IDS).logits, wanted)


def test_save_pretrained_writes_a_whole_bundle_again(exported, load_trusted, tmp_path):
    set_twell(exported, slots=[9, 10])
    model = load_trusted(exported)
    model.save_pretrained(tmp_path / "saved")
    assert read_bundle(tmp_path / "saved") == read_bundle(exported)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    for path in (tmp_path / "saved").rglob("*"):
        assert path.stat().st_mode & 0o044, path
    again = load_trusted(tmp_path / "saved")
    assert type(again).__name__ == "TwellLlamaForCausalLM"
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.save_pretrained(tmp_path / "again", max_shard_size="40KB")
    assert open_checkpoint(tmp_path / "again").twell["slots"] == [9, 10]
    assert torch.equal(load_trusted(tmp_path / "again")(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)


def test_a_stock_model_loaded_afterwards_is_stock(exported, load_trusted, relu_llama):
    assert type(load_trusted(exported)).__name__ == "TwellLlamaForCausalLM"
    for folder in (exported, relu_llama):
        assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("targets", [["q_proj"], ["gate_proj", "down_proj"]])
def test_lora_is_not_passed_by(exported, load_trusted, targets):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(exported)
    read_as_relu(base, base.config.twell)
    models = []
    for model in (load_trusted(exported), base):
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        models.append(get_peft_model(model, lora))
    plain = load_trusted(exported)(IDS).logits
    adapted, wanted = (model(IDS).logits for model in models)
    assert not torch.allclose(adapted, plain, atol=1e-2)
    torch.testing.assert_close(adapted, wanted, rtol=0, atol=1e-4)
    adapted.square().mean().backward()
    grads = [p.grad for n, p in models[0].named_parameters() if "lora_" in n]
    assert grads
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
    merged = models[0].merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, wanted, rtol=0, atol=1e-4)


def test_hooks_on_parts_of_the_ffn_are_called(exported, load_trusted):
    model, seen = load_trusted(exported), []
    ffn = gated_ffns(model)[0]
    wanted = model(IDS).logits
    for name in ("gate_proj", "up_proj", "act_fn", "down_proj"):
        hook = getattr(ffn, name).register_forward_hook(lambda *a, name=name: seen.append(name))
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=1e-4)
        hook.remove()
    assert seen == ["gate_proj", "up_proj", "act_fn", "down_proj"]


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(exported, load_trusted, device_map):
    model = load_trusted(exported, device_map=device_map)
    wanted = plain_relu(exported)(IDS).logits
    torch.testing.assert_close(model(IDS.to(model.device)).logits.cpu(), wanted, rtol=0, atol=1e-4)


def test_weights_offloaded_to_disk(exported, load_trusted, tmp_path):
    layers = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(2)}
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    where = layers | dict.fromkeys(parts, "cpu")
    model = load_trusted(exported, device_map=where, offload_folder=tmp_path / "off")
    wanted = plain_relu(exported)(IDS).logits
    torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5_text"])
def test_a_hidden_act_of_other_layers_is_refused(make_model, tmp_path, family):
    """State space layers and linear attention have it, too: as SiLU they would be others."""
    convert(make_model(family), tmp_path / "relu")
    with pytest.raises(TwellError, match=r"ForCausalLM\) uses hidden_act outside of its FFNs"):
        export(tmp_path / "relu", tmp_path / "out")


def test_gradient_checkpointing(exported, load_trusted):
    grads = []
    for wanted in (False, True):
        model = load_trusted(exported).train()
        if wanted:
            model.gradient_checkpointing_enable()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*grads)


def test_a_model_without_architectures(relu_llama, tmp_path):
    export(relu_llama, tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    for named in (None, ["TwellLlamaForCausalLM"]):
        (tmp_path / "a/config.json").write_text(json.dumps(config | {"architectures": named}))
        done = export(tmp_path / "a", tmp_path / "b", overwrite=True)
        assert done.class_name == "TwellLlamaForCausalLM"


def test_an_ffn_that_computes_more_is_not_exportable():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6)
            self.down_proj, self.act_fn, self.scale = nn.Linear(6, 4), nn.SiLU(), scale

        def forward(self, x):
            gate = self.act_fn(self.scale * self.gate_proj(x))
            return self.down_proj(gate * self.up_proj(x))

    assert is_plain_ffn(Scaled(1))
    assert not is_plain_ffn(Scaled(2))


def test_a_family_whose_ffn_computes_more_is_refused(make_model, tmp_path):
    convert(make_model("falcon_h1", mlp_multipliers=[2.0, 1.0]), tmp_path / "relu")
    with pytest.raises(TwellError, match="compute more than down"):
        export(tmp_path / "relu", tmp_path / "out")


def test_a_loaded_export_is_pickled(started, relu_llama, tmp_path):
    export(relu_llama, tmp_path / "export")
    model = twell_class("LlamaForCausalLM").from_pretrained(tmp_path / "export")
    with torch.no_grad():
        logits = model(IDS).logits
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for again in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            ffn = again.model.layers[0].mlp
            assert type(again) is type(model)
            assert type(ffn) is type(model.model.layers[0].mlp)
            assert isinstance(ffn, TwellFFN)
            assert torch.equal(again(IDS).logits, logits)
    torch.save(logits, tmp_path / "logits.pt")
    elsewhere = (
        "import torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "logits = model((torch.arange(34).view(2, 17) * 37) % 512).logits\n"
        f"assert torch.equal(logits, torch.load({str(tmp_path / 'logits.pt')!r}))\n"
    )
    process = started("--version", code=elsewhere)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
