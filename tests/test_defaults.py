"""Configs and tokenizers as they lie on the hub: what is left out, odd or contradicted."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from edits import json_in, weights_in
from finetune_runs import small
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.firing.grouping import grouped_windows
from twellctl.generate import generate
from twellctl.here.resources import bundle_files
from twellctl.models import loading
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.defaults import context_of
from twellctl.models.loading import load_model, load_tokenizer
from twellctl.text.blocks import token_stream
from twellctl.text.tokens import encode_text


@pytest.fixture
def changed(tmp_path):
    """`changed(model, **entries)`: a copy with other entries of config.json, None: without."""

    def change(model, rename=lambda name: name, **entries):
        folder = tmp_path / "changed"
        shutil.copytree(model, folder)
        with json_in(folder / "config.json") as config:
            config |= entries
            for key in [key for key, value in config.items() if value is None]:
                del config[key]
        with weights_in(folder) as weights:
            for name in list(weights):
                weights[rename(name)] = weights.pop(name)
        return folder

    return change


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("said", [True, None])
def test_a_head_of_its_own_stays_its_own_whatever_the_config_says(
    silu_llama, changed, text_file, tmp_path, said
):
    folder = changed(silu_llama, tie_word_embeddings=said)
    chain = [tmp_path / name for name in ("relu", "sparse", "exported")]
    convert(folder, chain[0])
    finetune(chain[0], chain[1], small(text_file, max_steps=1))
    export(chain[1], chain[2])
    for model in chain:
        assert config_of(model)["tie_word_embeddings"] is False
        loaded = AutoModelForCausalLM.from_pretrained(model)
        assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    ours = load_model(open_checkpoint(folder))
    wanted = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(ours.lm_head.weight.cpu(), wanted)


def test_a_head_that_is_stored_twice_stays_tied(make_model, tmp_path):
    folder = make_model("llama", tie_word_embeddings=True)
    with weights_in(folder) as weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    convert(folder, tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "entries",
    [
        {"hidden_act": None},
        {"max_position_embeddings": None},
        {"pad_token_id": 512},
        {"pad_token_id": -1},
        {"pad_token_id": -513},
    ],
    ids=str,
)
def test_what_a_config_leaves_out_is_the_familys(silu_llama, changed, tmp_path, entries):
    wanted = load_model(open_checkpoint(silu_llama))(torch.arange(9)[None]).logits
    folder = changed(silu_llama, **entries)
    assert torch.equal(load_model(open_checkpoint(folder))(torch.arange(9)[None]).logits, wanted)
    convert(folder, tmp_path / "out")
    assert config_of(tmp_path / "out")["hidden_act"] == "relu"
    load_tokenizer(open_checkpoint(folder))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_weights_under_the_name_of_their_wrapper(silu_llama, changed, tmp_path, prefix):
    folder = changed(silu_llama, lambda name: prefix + name)
    with pytest.raises(TwellError, match=rf"named {prefix}model\.embed_.*: take '{prefix}' off"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "o/b"}'}, "adapter of 'o/b': merge"),
        ({"consolidated.00.pth": "", "params.json": "{}"}, r"in the form for transformers \(-hf\)"),
    ],
    ids=["adapter", "meta"],
)
def test_folders_that_are_no_models(tmp_path, files, said):
    (tmp_path / "model").mkdir()
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(content)
    with pytest.raises(TwellError, match=said):
        open_checkpoint(tmp_path / "model")


ORIGINAL = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}}, 256),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 256),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 256),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, 256),
        ({}, 256),
    ],
)
def test_the_context_of_scaled_positions(rope, context):
    assert context_of({"max_position_embeddings": 256} | rope) == context


def test_a_stretched_model_reads_as_far_as_it_reaches(relu_llama, changed):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    folder = changed(relu_llama, rope_parameters=rope)
    made = generate(folder, "x = 1\n" * 100, max_tokens=3, chat=False)
    "".join(made)
    assert made.figures.prompt_tokens > 256


@pytest.fixture
def with_bos(tokenizer):
    """A tokenizer that puts a BOS, which is not the EOS, before a text."""
    stock = tokenizer.backend_tokenizer
    again = type(stock).from_str(stock.to_str())
    made = type(tokenizer)(tokenizer_object=again, eos_token="<|endoftext|>", bos_token="<s>")
    special = [("<s>", made.bos_token_id)]
    post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    made.backend_tokenizer.post_processor = post_processor
    return made


def test_a_text_that_is_read_begins_as_one_that_is_served(with_bos, text_file):
    eos, bos = with_bos.eos_token_id, with_bos.bos_token_id
    plain = with_bos.encode("def f", add_special_tokens=False)
    (tokens,) = token_stream(["def f"], with_bos)
    assert tokens.tolist() == [eos, bos, *plain]
    (tokens,) = token_stream(["<s>def f"], with_bos)  # as a chat template may write it
    assert tokens.tolist() == [eos, bos, *plain]
    assert encode_text(with_bos, "<s>def f") == encode_text(with_bos, "def f") == [bos, *plain]
    windows = grouped_windows([str(text_file)], "text", with_bos, 4, 16)
    assert windows.ids[:, 0].tolist() == [bos] * 4


@pytest.mark.parametrize(
    ("around", "first"),
    [
        ("$A", []),
        ("<s> $A", ["<s>"]),
        ("$A <|endoftext|>", []),
        ("<s> $A <|endoftext|>", ["<s>"]),
    ],
)
@pytest.mark.parametrize("text", ["def f", "", "def f<|endoftext|>"])
def test_no_end_token_is_put_after_a_prompt(with_bos, around, first, text):
    """As `add_eos_token` of a tokenizer would; one that the text itself has stays."""
    special = [(name, with_bos.convert_tokens_to_ids(name)) for name in ("<s>", "<|endoftext|>")]
    plain = with_bos.encode(text, add_special_tokens=False)
    processor = TemplateProcessing(single=around, special_tokens=special)
    with_bos.backend_tokenizer.post_processor = processor
    assert encode_text(with_bos, text) == [*with_bos.convert_tokens_to_ids(first), *plain]


def test_what_reads_a_tokenizer_is_named(relu_llama, changed, monkeypatch):
    folder = changed(relu_llama)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(TwellError, match="pip install sentencepiece protobuf"):
        load_tokenizer(open_checkpoint(folder))


def test_the_door_of_an_export_names_the_oldest_transformers_and_all_files(tmp_path):
    door = bundle_files()["modeling_twell.py"].decode()
    for name in bundle_files():
        if name.endswith(".py") and "/" not in name and name != "modeling_twell.py":
            assert f"from .{name.removesuffix('.py')} import" in door
    (tmp_path / "door.py").write_text(door)
    (tmp_path / "transformers.py").write_text("__version__ = '4.57.6'\n")
    words = [sys.executable, "-c", "import door"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "needs transformers 5.17 or newer, this is 4.57.6: pip install -U" in last
