"""What no honest tool writes: one line that names the offender, exit 1, and nothing written."""

import json
import os
import shutil
from pathlib import Path

import pytest
from edits import json_in, linked
from mutations import in_a_safetensors_file

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.firing.profiled import read_profile
from twellctl.generate import load
from twellctl.models.shards import INDEX, read_header, read_shards
from twellctl.text.reading import read_texts
from twellctl.training.recipe import resolve_recipe

A, B = "a.weight", "b.weight"


def entry(start: object, stop: object, shape: object = (4,), dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({A: entry(0, 16), B: entry(8, 24)}, "offset"),
        ({A: entry(-16, 0)}, "`-16`, expected usize"),
        ({A: entry(0, 16, dtype="F17")}, "`F17`"),
        ({"\ud800": entry(0, 16)}, "hex escape"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "invalid"),
        (b"[" * 100_000, "copy it again"),
    ],
)
def test_headers(tmp_path, header, said):
    path = tmp_path / "model.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(in_a_safetensors_file(text, 40))
    with pytest.raises(TwellError) as refused:
        read_header(path)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


def test_an_index_that_transformers_would_not_load(make_model, tmp_path):
    model = make_model("llama", shard_size="40KB")
    with json_in(model / INDEX) as index:
        del index["metadata"]
    with pytest.raises(TwellError, match=r'no metadata.*add "metadata": \{\} to it'):
        read_shards("model", model)


def spoilt(model: Path, folder: Path, changes: dict) -> Path:
    """A copy of `model` by links, with another config.json."""
    linked(model, folder, "config.json")
    config = json.loads((model / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SIZES = [
    ({"vocab_size": 100}, "lm_head.weight is [512, 32], by config.json it has 100 rows"),
    ({"intermediate_size": 48}, "intermediate_size is 48, but its FFNs have 96"),
    ({"hidden_size": 16}, "hidden_size is 16, but its FFNs have 32"),
    ({"hidden_size": 10**12}, "hidden_size must be a whole number"),
    ({"num_key_value_heads": 4}, "k_proj.weight is [16, 32], by config.json it has 32 rows"),
    ({"num_key_value_heads": 4, "head_dim": None}, "k_proj.weight is [16, 32], by config.json"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number from 1, got 0"),
    ({"max_position_embeddings": "256"}, "max_position_embeddings must be a whole number"),
    ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
    ({"sliding_window": 1.5}, "sliding_window must be a whole number"),
    ({"architectures": {"a": 1}}, "architectures must be a list, got {'a': 1}"),
    ({"_attn_implementation": "owner/kernel:fn"}, "names attention code of the hub"),
    ({"rms_norm_eps": int("9" * 400)}, "is not valid JSON (it holds a number of too many digits)"),
    ({"rms_norm_eps": float("nan")}, "is not valid JSON (it holds a number that is not finite)"),
]


@pytest.mark.parametrize(("changes", "said"), SIZES)
def test_configs_that_their_weights_contradict(silu_llama, relu_llama, tmp_path, changes, said):
    for model, command in ((silu_llama, convert), (relu_llama, export)):
        folder = spoilt(model, tmp_path / command.__name__, changes)
        with pytest.raises(TwellError) as refused:
            command(folder, tmp_path / "out")
        assert said in str(refused.value)
        assert not (tmp_path / "out").exists()


def test_a_head_that_is_not_there(make_model, tmp_path):
    tied = make_model("llama", tie_word_embeddings=True)
    folder = spoilt(tied, tmp_path / "model", {"tie_word_embeddings": False})
    with pytest.raises(TwellError, match=r"lacks lm_head\.weight, which tie_word_embeddings false"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 5},
        {"dtype": 5},
        {"rope_parameters": {"rope_type": "x"}},
        {"rms_norm_eps": "a"},
        {"auto_map": 5},
        {"attn_implementation": "x"},
    ],
    ids=str,
)
def test_configs_that_transformers_cannot_build(relu_llama, tmp_path, changes):
    folder = spoilt(relu_llama, tmp_path / "model", changes)
    said = "transformers makes no model of its config.json and weights"
    for make in (lambda: export(folder, tmp_path / "out"), lambda: load(folder)):
        with pytest.raises(TwellError, match=said) as refused:
            make()
        assert str(refused.value).isprintable()
    assert not (tmp_path / "out").exists()


def test_a_family_that_transformers_does_not_have(relu_llama, tmp_path):
    folder = spoilt(relu_llama, tmp_path / "model", {"model_type": "nova9"})
    with pytest.raises(TwellError, match="pip install -U transformers"):
        export(folder, tmp_path / "out")


def test_shapes_that_only_transformers_knows(make_model, tmp_path):
    convert(make_model("qwen3"), tmp_path / "relu")
    folder = spoilt(tmp_path / "relu", tmp_path / "model", {"num_attention_heads": 8})
    said = r"o_proj\.weight is \[32, 32\], by config.json it is \[32"
    with pytest.raises(TwellError, match=said):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("l1: !!float x\n", "is not valid YAML"),
        ("l1: !!python/name:os.system\n", "is not valid YAML"),
        ("max-steps: 2001-01-01\n", "max-steps must be a number, got datetime.date(2001, 1, 1)"),
        ("max-steps: 2001-99-99\n", "is not valid YAML"),
        ("l1: " + "[" * 5000, "is not valid YAML"),
        ("max-steps: " + "9" * 5000, "is not valid YAML"),
        (f"max-steps: 0x{'f' * 5000}\n", "is not valid YAML: Exceeds the limit"),
        (f"? 0x{'f' * 5000}\n: 1\n", "is not valid YAML: Exceeds the limit"),
        ("l1: &x [*x, *x, *x]\n", "l1 must be a number, got [["),
        (f"l1: [{'x, ' * 5000}]\n", "l1 must be a number, got ['x', 'x'"),
        ("? " + "k" * 5000 + "\n: 1\n", "unknown key kkkk"),
        ("l1: 1\n---\nl1: 2\n", "is not valid YAML"),
        ("data: 'a\\\n", "is not valid YAML"),
    ],
)
def test_recipes(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(TwellError) as refused:
        resolve_recipe(tmp_path / "mine.yaml")
    assert f"{tmp_path / 'mine.yaml'}" in str(refused.value)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "bad \\ud800 tail"}', "lone surrogate \\ud800"),
        (b"[" * 200_000, "nested more than 64 deep"),
        (b'{"text": ' * 70 + b"1" + b"}" * 70, "nested more than 64 deep"),
        (b'{"text": "a", "text": "b"}', "'text' is given more than once"),
        (b'{"n": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"messages": [[{"role": "user", "content": "hi"}]]}', "messages must be objects"),
    ],
    ids=["surrogate", "deep", "less deep", "twice", "digits", "batch"],
)
def test_rows(relu_llama, tmp_path, refusal, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine", "score": NaN}\n' + line + b"\n")
    assert list(read_texts([str(path)], "text")) == ["fine"]
    path.write_bytes(line + b"\n")
    refused = refusal("profile", relu_llama, "--data", path, "--seq-len", "8")
    assert f"{path}:1" in refused
    assert said in refused
    assert len(refused) < 1000


def test_a_file_of_many_other_columns_is_refused_with_the_first_of_them(relu_llama, tmp_path, cli):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{" + b",".join(b'"%0999d": 1' % i for i in range(500)) + b"}")
    _, _, err = cli("profile", relu_llama, "--data", path)
    assert f"{path}:1 has no text in 'text', only 000" in err[0]
    assert len(err[0]) < 1000


def test_a_pipe_is_no_text(relu_llama, tmp_path, refusal):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    assert f"{pipe} is not a regular file" in refusal("profile", relu_llama, "--data", pipe)
    os.rename(pipe, tmp_path / "pipe.json")
    with pytest.raises(TwellError, match="not a regular file"):
        read_profile(tmp_path / "pipe.json")


def test_line_breaks_in_names_are_escaped(silu_llama, tmp_path, cli, refusal):
    out = tmp_path / "two\nlines"
    code, said, _ = cli("convert", silu_llama, out)
    assert (code, len(said.splitlines())) == (0, 2)
    assert said.startswith(f"{tmp_path}/two\\nlines: ")
    assert f"{tmp_path}/two\\nlines exists" in refusal("convert", silu_llama, out)


def test_a_config_may_ask_for_tuples(relu_llama, text_file, tmp_path, cli):
    """`return_dict`: what runs here reads fields by name."""
    said = {}
    for name, changes in (("as it is", {}), ("tuples", {"return_dict": False})):
        model = spoilt(relu_llama.resolve(), tmp_path / name, changes)
        words = ("--data", text_file, "--windows", 2, "--seq-len", 16)
        code, said[name], err = cli("eval", model, *words)
        assert code == 0, err
        assert cli("generate", model, "a", "--max-tokens", 2)[0] == 0
    figures = [out.partition("cross-entropy")[2] for out in said.values()]
    assert figures[0] == figures[1] != ""


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("tokenizer_config.json", {"model_max_length": "x"}, "its tokenizer could not be loaded"),
        ("generation_config.json", {"eos_token_id": {}}, "eos_token_id must be a token or a list"),
    ],
)
def test_side_files_of_the_wrong_kind_are_refused_in_one_line(
    relu_llama, tmp_path, cli, file, changes, sentence
):
    model = tmp_path / "model"
    shutil.copytree(relu_llama, model)
    with json_in(model / file) as content:
        content |= changes
    code, _, err = cli("generate", model, "a", "--max-tokens", 2)
    assert (code, sentence in err[-1]) == (1, True), err
