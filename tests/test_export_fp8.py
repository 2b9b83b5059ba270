"""export --quantize fp8: what the folder holds, who reads it as what, and what refuses it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from edits import json_in, weights_in
from other_processes import found_without_twellctl
from safetensors.torch import load_file
from serving_client import post, running
from torch import nn
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_bundle import read_bundle
from twellctl.bundle.twell_e4m3 import DTYPE
from twellctl.convert import convert
from twellctl.doctor import doctor
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.generate import generate
from twellctl.models import shard_writer
from twellctl.models.answerer import open_answerer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model, read_tensors
from twellctl.profile import profile
from twellctl.serve_local import load_served_model

FAMILIES = ["qwen2", "phi3"]  # with biases; without, and gate and up in one
IDS = (torch.arange(34).view(2, 17) * 37) % 512
BODY = "model.layers.1."
CHILD = """
import torch
from transformers import AutoModel, AutoModelForCausalLM

ids = (torch.arange(34).view(2, 17) * 37) % 512
results = {}
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    body = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        results[folder] = {
            "class": type(model).__name__,
            "layers": {n: type(m).__name__ for n, m in model.named_modules()},
            "logits": model(ids).logits,
            "of body": model.lm_head(body(ids).last_hidden_state),
            "tokens": model.generate(ids[:1, :5], max_new_tokens=6, do_sample=False),
        }
    model.save_pretrained(folder + "-saved", max_shard_size="40KB")
torch.save(results, out)
"""


@pytest.fixture(scope="module")
def relu_models(make_model, tmp_path_factory) -> dict[str, Path]:
    """A converted model of each family, in bf16."""
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(f"relu-{family}") / "model"
        convert(make_model(family, seed=2, dtype=torch.bfloat16), found[family])
    return found


@pytest.fixture(scope="module")
def exports(relu_models, tmp_path_factory) -> dict[str, Path]:
    """An FP8 export of each family."""
    folder = tmp_path_factory.mktemp("fp8")
    for family, model in relu_models.items():
        done = export(model, folder / family, quantize="fp8")
        assert (done.scheme.name, done.over_twell_in_vllm) == ("fp8", False)
    return {family: folder / family for family in relu_models}


@pytest.fixture(scope="module")
def loaded_alone(exports, tmp_path_factory) -> dict[str, dict]:
    """What a process without twellctl and compressed-tensors computes, by family."""
    folders = {str(folder): family for family, folder in exports.items()}
    results = found_without_twellctl(CHILD, folders, tmp_path_factory.mktemp("home"))
    return {folders[folder]: result for folder, result in results.items()}


@pytest.fixture
def exported(exports, tmp_path) -> Path:
    """One of them, for a test to spoil."""
    return Path(shutil.copytree(exports["qwen2"], tmp_path / "exported"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in found for name, tensor in part.items()}


def change(folder: Path, name: str, value: float) -> None:
    """Another number in the first place of a stored tensor."""
    with weights_in(folder) as tensors:
        flat = tensors[name].flatten().float()
        flat[0] = value
        tensors[name] = flat.view(tensors[name].shape).to(tensors[name].dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_are_rounded_and_all_else_is_as_it_was(relu_models, exports, family):
    was, now = (dict(read_tensors(open_checkpoint(of[family]))) for of in (relu_models, exports))
    assert {name for name in now if not name.endswith(".weight_scale")} == set(was)
    for name, tensor in was.items():
        linear = ".layers." in name and tensor.dim() == 2
        if not linear:
            assert torch.equal(now[name], tensor), name
            continue
        scale = now[name.replace(".weight", ".weight_scale")]
        assert (now[name].dtype, scale.dtype) == (DTYPE, torch.float32)
        assert scale.shape == (len(tensor), 1)
        error = (now[name].double() * scale.double() - tensor.double()).abs()
        assert (error <= 2**-4 * tensor.abs().double() + 2**-9 * scale).all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_code_reads_it_with_nothing_installed(exports, loaded_alone, family):
    alone = loaded_alone[family]
    model = load_model(open_checkpoint(exports[family]))
    assert alone["class"].startswith("Twell")
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if name}
    linears = {name for name, kind in kinds.items() if "Linear" in kind} - {"lm_head"}
    assert {alone["layers"][name] for name in linears} == {"RoundedLinear"}
    assert alone["layers"]["lm_head"] == "Linear"
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, alone["logits"])
        assert torch.equal(alone["of body"], alone["logits"])
        tokens = model.generate(IDS[:1, :5], max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, alone["tokens"])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_again_is_the_same_export(exports, loaded_alone, family):
    saved = Path(f"{exports[family]}-saved")
    was, now = tensors_of(exports[family]), tensors_of(saved)
    assert set(was) == set(now)
    assert all(torch.equal(was[n].view(torch.uint8), now[n].view(torch.uint8)) for n in was)
    configs = [json.loads((f / "config.json").read_text()) for f in (saved, exports[family])]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert open_checkpoint(saved).scheme.name == "fp8"
    manifest = json.loads((saved / "twell_manifest.json").read_text())
    assert set(manifest["weights_sha256"]) == set(open_checkpoint(saved).shards)
    read_bundle(saved)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_reads_it_as_a_dense_fp8_model(exports, load_trusted, family):
    pytest.importorskip("compressed_tensors", reason="the reader of this format")
    stock = AutoModelForCausalLM.from_pretrained(exports[family], dtype=torch.float32)
    ours = load_trusted(exports[family], dtype=torch.float32)
    stock(IDS)  # the first pass expands the weights
    seen = 0
    for (name, layer), theirs in zip(ours.named_modules(), stock.modules(), strict=True):
        if isinstance(layer, nn.Linear):
            weight = layer.weight.float()
            if type(layer).__name__ == "RoundedLinear":
                weight = weight * layer.weight_scale
                seen += 1
            assert torch.equal(theirs.weight.float(), weight), name
            x = torch.randn(1, 9, layer.in_features)
            size = theirs(x).abs().max()  # of gates that is large
            torch.testing.assert_close(layer(x) / size, theirs(x) / size, rtol=1e-4, atol=1e-5)
    assert seen >= 8


def test_a_body_and_a_head_of_one_weight(make_model, tmp_path):
    convert(make_model("llama", tie_word_embeddings=True), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out", quantize="fp8")
    model = load_model(open_checkpoint(tmp_path / "out"))
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("shard_size", ["5GB", "30KB"], ids=["one file", "many"])
def test_weights_are_cut_by_what_they_are_now(make_model, tmp_path, monkeypatch, shard_size):
    convert(make_model("llama", shard_size=shard_size), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "whole", quantize="fp8")
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 40_000)
    export(tmp_path / "relu", tmp_path / "cut", quantize="fp8")
    whole, cut = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "cut")
    assert whole.shards == ("model.safetensors",)
    assert len(cut.shards) > 1
    for shard in cut.shards:
        tensors = load_file(cut.path / shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40_000
    was, now = tensors_of(whole.path), tensors_of(cut.path)
    assert set(was) == set(now)
    assert all(torch.equal(was[n].view(torch.uint8), now[n].view(torch.uint8)) for n in was)
    with torch.no_grad():
        assert torch.equal(load_model(cut)(IDS).logits, load_model(whole)(IDS).logits)


def test_what_reads_models_takes_it(exported, text_file, tmp_path, success, no_answers):
    found = profile(exported, [str(text_file)], windows=2, seq_len=32)
    assert 0.2 < found.layers[0].density < 0.8
    assert "".join(generate(exported, "def f", max_tokens=5))
    diagnosis = doctor(exported)
    assert diagnosis.broken == []
    assert "qwen2, relu as SiLU of sharpness 64, FP8, 2 gated FFNs" in diagnosis.folder[0].what
    words = ("--data", text_file, "--windows", 2, "--seq-len", 32)
    success("eval", exported, "--reference", exported, *words)


def test_a_server_serves_it_and_says_what_it_is(exported):
    served = load_served_model(open_answerer(exported))
    assert served.about["device"].endswith(", bfloat16, linear layers in FP8")
    with running(served) as client:
        asked = {"model": served.name, "prompt": "x = 1", "max_tokens": 4, "temperature": 0}
        status, body = post(client, json.dumps(asked).encode())
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)


def test_a_profile_of_the_model_goes_along(relu_models, text_file, tmp_path):
    found = profile(relu_models["qwen2"], [str(text_file)], windows=2, seq_len=32)
    export(relu_models["qwen2"], tmp_path / "out", profile=found, quantize="fp8")
    twell = open_checkpoint(tmp_path / "out").twell
    assert twell["densities"] == [round(layer.density, 6) for layer in found.layers]
    card = (tmp_path / "out/README.md").read_text()
    assert "The figures below were measured before that rounding" in card
    assert "compressed-tensors" in card
    assert "model-index" not in card  # hubs would take the figures for those of these weights


TAKE = "is quantised already (FP8): take the model that it was exported from, 'model'"


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "IN", "OUT", "--data", "TEXT"),
        ("finetune", "IN", "OUT", "--data", "TEXT", "--dry-run"),
        ("export", "IN", "OUT"),
        ("export", "IN", "OUT", "--quantize", "fp8"),
        ("convert", "IN", "OUT"),
    ],
    ids=" ".join,
)
def test_what_changes_weights_refuses_it(exported, text_file, tmp_path, cli, words):
    given = {"IN": exported, "OUT": tmp_path / "out", "TEXT": text_file}
    code, _, err = cli(*(given.get(word, word) for word in words))
    assert code == 1
    assert err[-1].endswith(TAKE), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("export", "MODEL", "OUT"), ("bench", "decode")], ids=" ".join)
def test_another_name_of_quantising_is_a_wrong_call(relu_models, tmp_path, refusal, words):
    paths = {"MODEL": relu_models["qwen2"], "OUT": tmp_path / "out"}
    said = refusal(*(paths.get(word, word) for word in words), "--quantize", "int4", code=2)
    assert said == "error: quantize must be fp8, got 'int4'"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_no_scale_holds_is_named(relu_models, tmp_path, value):
    broken = Path(shutil.copytree(relu_models["qwen2"], tmp_path / "broken"))
    change(broken, BODY + "mlp.up_proj.weight", value)
    with pytest.raises(TwellError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        export(broken, tmp_path / "out", quantize="fp8")


@pytest.mark.parametrize("part", ["weight", "weight_scale"])
def test_a_changed_weight_or_scale_is_refused_by_the_manifest(exported, load_trusted, part):
    change(exported, f"{BODY}mlp.up_proj.{part}", 2.0)
    with pytest.raises(ValueError, match=r"model\.safetensors was changed: export the model again"):
        load_trusted(exported)
    (broken,) = doctor(exported).broken
    assert broken.endswith("bundled file model.safetensors was changed: export the model again")


def test_a_manifest_that_lost_the_weights_is_none_of_ours(exported):
    with json_in(exported / "twell_manifest.json") as manifest:
        del manifest["weights_sha256"]
    assert "or changed together with the manifest" in doctor(exported).folder[1].what


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight", float("nan")), ("weight_scale", float("nan")), ("weight_scale", float("inf"))],
)
def test_stored_nan_is_named(exported, name, value):
    change(exported, f"{BODY}self_attn.q_proj.{name}", value)
    with pytest.raises(TwellError, match=rf"layers\.1\.self_attn\.q_proj\.{name} holds NaN or inf"):
        load_model(open_checkpoint(exported))


def test_a_missing_scale_is_named(exported):
    with weights_in(exported) as tensors:
        del tensors[f"{BODY}mlp.up_proj.weight_scale"]
    with pytest.raises(TwellError, match=r"lacks 1 of its weights, .*up_proj\.weight_scale first"):
        load_model(open_checkpoint(exported))


def test_a_scheme_of_others_is_refused(exported):
    with json_in(exported / "config.json") as config:
        scheme = config["quantization_config"]["config_groups"]["group_0"]
        scheme["weights"]["strategy"] = "tensor"
    with pytest.raises(TwellError, match=r"is quantised \(compressed-tensors\): take the original"):
        open_checkpoint(exported)


def test_weights_that_config_json_calls_fp8_and_are_not(exported, relu_models):
    shutil.copy(relu_models["qwen2"] / "model.safetensors", exported / "model.safetensors")
    with pytest.raises(TwellError, match=r"of BF16, expected .* of F8_E4M3: export the model"):
        open_checkpoint(exported)
