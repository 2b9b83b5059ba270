"""finetune with settings that make no sense: one line, and no file is left."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from edits import linked, weights_in
from finetune_runs import SMALL, Watching, small
from torch._dynamo.exc import TorchDynamoException

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.finetune import finetune
from twellctl.training import runs
from twellctl.training.recipe import resolve_recipe, run_folder

pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("latin1.txt", b"d\xe9j\xe0", "not valid UTF-8"),
        ("latin1.jsonl", b'\n{"text": "d\xe9j\xe0"}\n', ":2 is not valid UTF-8"),
        ("empty.txt", b"", "holds no text"),
        ("empty.jsonl", b"\n", "holds no text"),
        ("broken.jsonl", b'\n{"text": \n', ":2 is not valid JSON"),
        ("column.jsonl", b'{"body": "fine"}\n', "--text-column"),
        ("broken.parquet", b"PAR1", "not a readable parquet"),
        ("text.docx", b"PK", "none of .jsonl"),
        ("short.txt", b"one two three", "fewer than one batch"),
    ],
)
def test_bad_text_is_refused_in_one_line(relu_llama, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TwellError, match=re.escape(said)) as refused:
        finetune(relu_llama, tmp_path / "out", small(path))
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == [path]


def test_command_line_refusals(cli, silu_llama, relu_llama, text_file, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "bad.yaml").write_text("l1: -2e-5\nlearn-rate: 1\n")
    for arguments, code, said in [
        ((silu_llama, out, "--data", text_file), 1, "twellctl convert"),
        ((relu_llama, out), 2, "--data"),
        ((relu_llama, out, "--resume"), 1, "out.run holds no run to resume: leave --resume out"),
        ((relu_llama, out, "--data", text_file, "--l1", "-1"), 2, "l1 must be >= 0"),
        (
            (relu_llama, out, "--data", text_file, "--recipe", tmp_path / "bad.yaml"),
            1,
            "learn-rate",
        ),
        ((relu_llama, out, "--data", text_file, "--seq-len", "4096"), 2, "seq-len must be <= 256"),
        ((relu_llama, out, "--data", text_file, tmp_path / "no.txt"), 1, "no.txt does not exist"),
        (
            (relu_llama, out, "--data", text_file, "--eval-data", text_file, text_file),
            2,
            "which flag",
        ),
        ((relu_llama, out, "--data", text_file, "--report-to", "nosuch"), 2, "'nosuch'"),
        ((relu_llama, out, "--data", text_file, "--teacher", tmp_path / "none"), 1, "not exist"),
    ]:
        exit_code, stdout, stderr = cli("finetune", *arguments)
        assert (exit_code, stdout) == (code, ""), stderr
        assert len(stderr) == 1, stderr
        assert said in stderr[0]
        assert not out.exists()
        assert not run_folder(out).exists()


def test_an_out_without_a_name_is_refused(refusal, relu_llama, text_file, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "..", "/"):
        said = refusal("finetune", relu_llama, out, "--data", text_file)
        assert said.startswith(f"error: {out} ")
        assert ": choose another " in said
    assert run_folder(Path()) == tmp_path / "here.run"
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_several_files_after_one_flag_and_the_models_own_context(
    success, relu_llama, text_file, tmp_path, monkeypatch
):
    read, read_texts = [], runs.read_texts
    monkeypatch.setattr(runs, "read_texts", lambda p, *more: read.extend(p) or read_texts(p, *more))
    other = tmp_path / "other.txt"
    other.write_text("print('hello')\n" * 400, encoding="utf-8")
    settings = ["--max-steps=1", "--batch-size=2", "--eval-blocks=1", "--l1=1e-3"]
    arguments = [relu_llama, tmp_path / "out", "--data", text_file, other, *settings]
    success("finetune", *arguments)
    assert read == [str(text_file), str(other)]
    assert resolve_recipe(tmp_path / "out" / "recipe.yaml").seq_len == 256


def test_overwrite_spares_a_run_folder_that_is_not_ours(relu_llama, text_file, tmp_path):
    theirs = tmp_path / "out.run" / "diary.txt"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(TwellError, match="not a run of twellctl"):
        finetune(relu_llama, tmp_path / "out", small(text_file), overwrite=True)
    assert theirs.read_text() == "mine"


def test_held_out_text_too_short_is_refused(relu_llama, text_file, tmp_path):
    (tmp_path / "short.txt").write_text("one two three")
    recipe = small(text_file, eval_data=[str(tmp_path / "short.txt")])
    with pytest.raises(TwellError, match=r"--eval-data makes no block of 32"):
        finetune(relu_llama, tmp_path / "out", recipe)
    assert not run_folder(tmp_path / "out").exists()


def test_another_models_tokenizer_is_refused(make_model, text_file, tmp_path):
    convert(make_model("llama", vocab_size=300), tmp_path / "relu")
    with pytest.raises(TwellError, match="but the model has 300 tokens"):
        finetune(tmp_path / "relu", tmp_path / "out", small(text_file))
    assert not run_folder(tmp_path / "out").exists()


def test_no_tokenizer_is_refused(relu_llama, text_file, tmp_path):
    bare = linked(relu_llama, tmp_path / "bare", "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(TwellError, match="no tokenizer"):
        finetune(bare, tmp_path / "out", small(text_file))


def test_a_weight_that_is_not_there_is_not_made_up(relu_llama, text_file, tmp_path):
    shutil.copytree(relu_llama, tmp_path / "relu")
    with weights_in(tmp_path / "relu") as tensors:
        del tensors["model.norm.weight"]
    with pytest.raises(TwellError, match=r"lacks 1 of its weights, model\.norm\.weight"):
        finetune(tmp_path / "relu", tmp_path / "out", small(text_file))
    assert not run_folder(tmp_path / "out").exists()


def test_a_target_out_of_reach_ends_with_a_sentence(success, relu_llama, text_file, tmp_path):
    settings = {**SMALL, "max_steps": 2, "density": 0.01, "data": text_file}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    stdout, stderr = success("finetune", relu_llama, tmp_path / "out", *flags)
    assert (tmp_path / "out" / "config.json").exists()
    assert "the target of 1.00% density was not met in this budget" in " ".join(stderr)
    reached = json.loads((tmp_path / "out" / "twell_finetune.json").read_text())["density"]
    assert f"density {reached:.2%} after 256 tokens" in stdout


def test_gradients_that_are_not_finite_are_named(relu_llama, text_file, tmp_path):
    def spoil(trainer):
        parameter = trainer.model.get_parameter("model.layers.1.mlp.up_proj.weight")
        parameter.register_hook(lambda grad: grad * float("inf"))

    said = "the gradient of model.layers.1.mlp.up_proj.weight was not finite at step 1"
    with pytest.raises(TwellError, match=said):
        finetune(relu_llama, tmp_path / "out", small(text_file), progress=Watching(spoil))


def test_layers_that_cannot_be_compiled(relu_llama, text_file, tmp_path, monkeypatch):
    def refuses(function, **how):
        def compiled(*args, **kwargs):
            raise TorchDynamoException("no C compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", refuses)
    recipe = small(text_file, compile=True)
    with pytest.raises(TwellError, match=r"compiling failed: .*no C compiler.*--no-compile"):
        finetune(relu_llama, tmp_path / "out", recipe)
    assert not run_folder(tmp_path / "out").exists()
