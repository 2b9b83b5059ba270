"""What is no model for twellctl: the command line refuses it in one line and writes nothing."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from edits import weights_in
from safetensors.torch import load_file, save_file

from twellctl.errors import TwellError
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model, read_tensors
from twellctl.models.shards import read_header

INDEX = "model.safetensors.index.json"
FFN = "model.layers.0.mlp"


@pytest.fixture(scope="session")
def sharded(make_model) -> Path:
    """A tiny SiLU Llama in several shards; read only."""
    return make_model("llama", shard_size="40KB")


@pytest.fixture
def model(sharded, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


@pytest.fixture
def refused(refusal, tmp_path):
    """`refused(model, *words)`: convert exits 1 with one line that holds all words, and no OUT."""

    def check(model, *words):
        before = sorted(tmp_path.rglob("*"))
        said = refusal("convert", model, tmp_path / "out")
        assert all(word in said for word in words), said
        assert sorted(tmp_path.rglob("*")) == before

    return check


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    content = {key: value for key, value in content.items() if value is not ...}
    path.write_text(json.dumps(content))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file of zeros: {name: (dtype, shape)}."""
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}
    header, end = {}, 0
    for name, (dtype, (rows, columns)) in tensors.items():
        start, end = end, end + rows * columns * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def replace_weights(folder: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    edit(folder / "config.json", num_hidden_layers=1)


def one_ffn(N: int, K: int, dtype: str = "BF16") -> dict[str, tuple[str, list[int]]]:
    parts = {"gate_proj": [N, K], "up_proj": [N, K], "down_proj": [K, N]}
    return {f"{FFN}.{part}.weight": (dtype, shape) for part, shape in parts.items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "tanh"}, ("'tanh'", "silu")),
        ({"hidden_act": "relu"}, ("already ReLU", "twellctl finetune")),
        ({"hidden_act": ..., "hidden_activation": "tanh"}, ("'tanh'", "silu")),
        ({"hidden_act": ..., "activation_function": "gelu"}, ("'gelu'", "take another")),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("gptq", "original")),
        ({"quantization_config": {"load_in_4bit": True}}, ("quantised", "original")),
        ({"compression_config": {"format": "pack-quantized"}}, ("quantised", "original")),
        ({"text_config": {"hidden_act": "silu"}}, ("multimodal (text_config)", "text-only")),
        ({"vision_config": {}}, ("multimodal (vision_config)", "text-only")),
        (
            {"model_type": "nova9", "auto_map": {"AutoModelForCausalLM": "m.N"}},
            ("nova9", "remote code (auto_map)", "take a model"),
        ),
        ({"model_type": ...}, ("no model_type", "give")),
        ({"num_experts": 4}, ("mixture of experts", "dense")),
        ({"moe_num_experts": 4}, ("mixture of experts", "dense")),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            ("is a LlamaForSequenceClassification", "ForCausalLM"),
        ),
        ({"num_hidden_layers": 3}, ("2 gated FFNs in 3 layers", "gate_proj")),
        ({"pad_token_id": "0"}, ("pad_token_id must be the id of a token, or null", "got '0'")),
        ({"bos_token_id": [1, 2]}, ("bos_token_id must be the id of a token, or null", "[1, 2]")),
        ({"eos_token_id": [2, True]}, ("eos_token_id must be the id of a token", "[2, True]")),
    ],
)
def test_config_that_does_not_fit(model, refused, changes, words):
    edit(model / "config.json", **changes)
    refused(model, str(model), *words)


def test_a_revision_of_a_local_folder(model, cli, tmp_path):
    code, out, err = cli("convert", model, tmp_path / "out", "--revision", "v2")
    assert (code, out) == (2, "")
    assert err == [f"error: {model} is a local folder, which has no --revision v2"]
    assert not (tmp_path / "out").exists()


def test_other_architectures(make_model, refused):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    refused(make_model("mixtral", **experts), "mixture of experts", "dense")
    refused(make_model("opt", word_embed_proj_dim=32, ffn_dim=64), "(opt)", "'relu'")
    refused(make_model("gpt_neox"), "(gpt_neox)", "0 gated FFNs in 2 layers", "gate_proj")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("no config.json", "give a model folder")),
        (b"{'hidden_act': 1}", ("config.json is not valid JSON", "copy it again")),
        (b"", ("config.json is not valid JSON",)),
        (b'{"a": "\xff"}', ("config.json is not valid JSON",)),
        (b"[" * 100_000, ("config.json is not valid JSON",)),
        (b"[]", ("config.json holds no JSON object",)),
    ],
    ids=["none", "broken", "empty", "utf8", "deep", "list"],
)
def test_broken_config(model, refused, content, words):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_bytes(content)
    refused(model, str(model), *words)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize(
    ("file", "format"),
    [
        ("pytorch_model.bin", ".bin"),
        ("model.pth", ".pth"),
        ("tf_model.h5", ".h5"),
        ("a.gguf", ".gguf"),
    ],
)
def test_other_weight_formats(model, refused, file, format, with_config):
    for path in model.glob("*.safetensors*"):
        path.unlink()
    (model / file).write_bytes(b"weights")
    if not with_config:
        (model / "config.json").unlink()
    refused(model, str(model), f"holds {format} weights: take the model in safetensors")
    refused(model / file, file, f"holds {format} weights: take the model in safetensors")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "has no weights: give a folder with model.safetensors or"),
        (("model.safetensors.part",), "has no weights: give a folder with model.safetensors or"),
        (("model-00001-of-00001.safetensors",), "but no model.safetensors: rename it"),
        (("model.fp16.safetensors",), "holds model.fp16.safetensors, but no model.safetensors:"),
        (("model-00002-of-00003.safetensors",), f"1 of 3 weight files, and no {INDEX}: fetch the"),
        (
            ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            f"no {INDEX}, which says what lies where: fetch it, too",
        ),
        (("a.safetensors", "b.safetensors"), "holds a.safetensors and so on, but no"),
        (("consolidated.safetensors",), "names are not those of transformers: take model.safe"),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, tuple) else "",
)
def test_weights_that_nothing_names(model, refused, files, words):
    shard = next(iter(model.glob("*.safetensors"))).read_bytes()
    for path in model.glob("*.safetensors*"):
        path.unlink()
    for file in files:
        (model / file).write_bytes(shard)
    refused(model, str(model), words)


@pytest.mark.parametrize(
    ("tie", "words"),
    [
        (..., "lacks 1 of its weights, lm_head.weight first: set"),
        (False, "lacks lm_head.weight, which tie_word_embeddings false asks for: set"),
        (None, "config.json's tie_word_embeddings must be true or false, got None: correct it"),
    ],
)
def test_a_head_that_is_not_there(silu_llama, tmp_path, tie, words):
    """It may be the embeddings, which config.json has to say."""
    model = Path(shutil.copytree(silu_llama, tmp_path / "headless"))
    with weights_in(model) as tensors:
        del tensors["lm_head.weight"]
    edit(model / "config.json", tie_word_embeddings=tie)
    with pytest.raises(TwellError, match=words.replace(".", r"\.")) as refusal:
        load_model(open_checkpoint(model))
    assert '"tie_word_embeddings": true in config.json if' in str(refusal.value) or tie is None
    edit(model / "config.json", tie_word_embeddings=True)
    assert load_model(open_checkpoint(model)).config.tie_word_embeddings


def test_an_adapter(model, refused):
    (model / "adapter_config.json").write_text("{}")
    refused(model, str(model), "adapter", "merge it")


def shard_of(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[1]


def test_missing_shard(model, refused):
    shard = shard_of(model)
    shard.unlink()
    refused(model, INDEX, shard.name, "missing", "fetch it again")


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1, "and more"])
def test_a_shard_that_is_too_short_or_too_long(model, refused, keep):
    shard = shard_of(model)
    whole = shard.read_bytes()
    shard.write_bytes(whole + b"0" if keep == "and more" else whole[:keep])
    refused(model, str(shard), "truncated", "copy it again")


def test_index_that_does_not_fit(model, refused):
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    last = sorted(set(weight_map.values()))[-1]
    tensor = next(name for name, shard in weight_map.items() if shard != last)
    edit(model / INDEX, weight_map=weight_map | {tensor: last})
    refused(model, f"{last} lacks {tensor}", "fetch both again")
    edit(model / INDEX, weight_map=weight_map | {"ghost.weight": last})
    refused(model, f"{last} lacks ghost.weight", "fetch both again")
    edit(model / INDEX, weight_map=weight_map | {tensor: "../model.safetensors"})
    refused(model, INDEX, "../model.safetensors, outside the folder", "copy it again")
    edit(model / INDEX, weight_map=...)
    refused(model, INDEX, "no weight_map", "copy it again")
    (model / INDEX).write_text("{")
    refused(model, INDEX, "not valid JSON", "copy it again")


def test_quantised_tensors_without_a_config_that_says_so(model, refused):
    fp8 = one_ffn(96, 32, "F8_E4M3")
    replace_weights(model, fp8)
    refused(model, "F8_E4M3", "original")
    replace_weights(model, one_ffn(96, 32) | {"model.layers.0.q_proj.weight": ("F8_E4M3", [32, 4])})
    refused(model, "F8_E4M3", "original")
    replace_weights(model, {f"{FFN}.gate_proj.qweight": ("I32", [4, 96])})
    refused(model, "qweight", "original")


def test_ffns_that_do_not_fit(model, refused):
    replace_weights(model, one_ffn(96, 32) | {f"{FFN}.up_proj.weight": ("BF16", [97, 32])})
    refused(model, f"{FFN}.up_proj.weight is [97, 32]", "expected [96, 32]", "take a model")
    replace_weights(model, one_ffn(65537, 1))
    refused(model, "65537 neurons", "at most 65536")
    replace_weights(model, {f"{FFN}.up_proj.weight": ("BF16", [97, 32])})
    refused(model, "0 gated FFNs in 1 layers", "gate_proj")


def test_names_that_lead_nowhere(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("nowhere", "nowhere does not exist", "give a model folder or a hub id")
    old = tmp_path / ".gone.twellctl/old"  # as `--overwrite` leaves it if killed
    old.mkdir(parents=True)
    refused(tmp_path / "gone", "gone was being replaced", f"move {old} back")
    refused("a" * 300, "a" * 300, "File name too long")
    (tmp_path / "notes.txt").write_text("text")
    refused(tmp_path / "notes.txt", "notes.txt", "no config.json", "give a model folder")


def test_what_looks_odd_but_fits(model, success, tmp_path):
    edit(model / "config.json", quantization_config=None, num_experts=0, architectures=None)
    out, err = success("convert", model, tmp_path / "out")
    assert len(err) == 1  # what a swapped model is
    assert "2 gated FFNs, 32 x 96, silu -> relu" in out


def test_heads_of_several_sizes_fit(make_model, success, tmp_path):
    several = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    success("convert", make_model("gemma4_text", **several, **layers), tmp_path / "out")


def test_thresholds_of_an_earlier_version_are_refused(relu_llama, refusal, tmp_path):
    model = Path(shutil.copytree(relu_llama, tmp_path / "model"))
    twell = json.loads((model / "config.json").read_text())["twell"]
    edit(model / "config.json", twell=twell | {"thresholds": [0.0, 0.0]})
    said = refusal("generate", model, "def")
    assert "holds thresholds" in said
    assert "fine-tune again from the SiLU model" in said


def test_a_tensor_that_two_shards_hold_counts_where_the_index_puts_it(model):
    """As transformers reads it: of sharded models some are written so."""
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    tensor, first = next(iter(weight_map.items()))
    last = max(weight_map.values())
    assert first != last
    held = load_file(model / last) | {tensor: load_file(model / first)[tensor]}
    save_file(held, model / last, {"format": "pt"})
    assert open_checkpoint(model).tensors[tensor].shard == first


def test_a_weight_of_one_number_is_read(silu_llama, tmp_path):
    folder = Path(shutil.copytree(silu_llama, tmp_path / "model"))
    with weights_in(folder) as tensors:
        tensors["model.scale"] = torch.tensor(2.0)
    assert dict(read_tensors(open_checkpoint(folder), ["model.scale"])) == {"model.scale": 2.0}


def test_weights_that_cannot_be_opened_are_not_said_to_be_missing(tmp_path):
    (file := tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(TwellError, match="cannot be read: Too many levels of symbolic links"):
        read_header(file)
