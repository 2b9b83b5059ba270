"""--overwrite removes no input of its own call, and no run takes the checkpoints of another."""

import shutil
import sys
from pathlib import Path

import pytest
from edits import contents
from finetune_runs import InterruptAt, assert_same_weights, small

from twellctl.errors import TwellError
from twellctl.files.made_of import Record
from twellctl.files.workspace import workspace_beside
from twellctl.finetune import Interrupted, finetune
from twellctl.firing.profiled import save_profile
from twellctl.profile import profile
from twellctl.training.progress import Progress
from twellctl.training.recipe import run_folder, save_recipe
from twellctl.training.runs import drop_old_checkpoints, last_checkpoint, mark_complete

pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.fixture(scope="module")
def inputs(relu_llama, text_file, tmp_path_factory) -> Path:
    """A folder that holds an input of every kind."""
    inputs = tmp_path_factory.mktemp("inputs") / "inputs"
    shutil.copytree(relu_llama, inputs)
    shutil.copy(text_file, inputs / "text.jsonl")
    save_recipe(small(text_file), inputs / "recipe.yaml")
    found = profile(inputs, [str(text_file)], windows=1, seq_len=16)
    save_profile(found, inputs / "profile.json")
    return inputs


@pytest.fixture
def out(inputs, text_file, tmp_path) -> Path:
    """An OUT of such a kind, and beside it an OUT.run."""
    out = tmp_path / "out"
    shutil.copytree(inputs, out)
    shutil.copytree(inputs, tmp_path / "out.run")
    (tmp_path / "link.jsonl").symlink_to(out / "text.jsonl")
    (out / "link.jsonl").symlink_to(text_file)
    return out


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "RELU", "OUT", "--data", "OUT/text.jsonl"),
        ("finetune", "RELU", "OUT", "--data", "OUT"),
        ("finetune", "RELU", "OUT", "--data", "link.jsonl"),
        ("finetune", "RELU", "OUT", "--data", "OUT/link.jsonl"),
        ("finetune", "RELU", "OUT", "--data", "."),
        ("finetune", "RELU", "OUT", "--data", "OUT.run/text.jsonl"),
        ("finetune", "RELU", "OUT", "--data", "TEXT", "--eval-data", "OUT/text.jsonl"),
        ("finetune", "RELU", "OUT", "--data", "TEXT", "--teacher", "OUT"),
        ("finetune", "RELU", "OUT", "--data", "TEXT", "--recipe", "OUT/recipe.yaml"),
        ("finetune", "OUT", "OUT", "--data", "TEXT"),
        ("finetune", "OUT.run", "OUT", "--data", "TEXT"),
        ("export", "RELU", "OUT", "--profile", "OUT/profile.json"),
        ("export", "OUT", "OUT"),
        ("convert", "OUT", "OUT"),
        ("draft", "RELU", "OUT", "--data", "OUT/text.jsonl"),
        ("draft", "OUT", "OUT", "--data", "TEXT"),
    ],
    ids=" ".join,
)
def test_an_input_in_out_is_kept(refusal, out, relu_llama, text_file, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    paths = {"RELU": relu_llama, "TEXT": text_file}
    words = [paths.get(word, word.replace("OUT", "out")) for word in words]
    before = contents(tmp_path)
    assert "is or contains the input" in refusal(*words, "--overwrite")
    assert contents(tmp_path) == before


def test_a_second_run_is_refused_while_the_first_lives(relu_llama, text_file, tmp_path):
    out, refused = tmp_path / "out", []

    class Second(Progress):
        def first_line(self, *args):
            for how in ({"resume": True}, {"overwrite": True}, {}):
                with pytest.raises(TwellError, match="being written by another twellctl") as error:
                    finetune(relu_llama, out, small(text_file), **how)
                refused.append(str(error.value))

    first = finetune(relu_llama, out, small(text_file, max_steps=2), progress=Second())
    assert len(refused) == 3
    assert first.num_steps == 2
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_goes_only_when_the_new_one_is_whole(relu_llama, text_file, tmp_path):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_text("one two three")
    with pytest.raises(Interrupted):
        finetune(relu_llama, out, small(text_file), progress=InterruptAt(2))
    before = contents(tmp_path)
    with pytest.raises(TwellError, match="fewer than one batch"):
        finetune(relu_llama, out, small(short), overwrite=True)
    assert contents(tmp_path) == before


def test_a_failed_overwrite_keeps_the_old_out(relu_llama, text_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    finetune(relu_llama, out, small(text_file, max_steps=1))
    shutil.copytree(out, tmp_path / "was")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["twellctl.finetune"], "write_card", lambda *args: 1 / 0)
        recipe = small(text_file, max_steps=2)
        with pytest.raises(ZeroDivisionError):
            finetune(relu_llama, out, recipe, overwrite=True)
    assert_same_weights(out, tmp_path / "was")
    assert last_checkpoint(run_folder(out)).name == "checkpoint-2"  # --resume writes it again


def test_which_checkpoints_stay(tmp_path):
    Record.begin(tmp_path, {})
    for step in (3, 6, 9, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        mark_complete(tmp_path / f"checkpoint-{step}", {})
    (tmp_path / "checkpoint-15").mkdir()  # not complete
    drop_old_checkpoints(tmp_path)
    found = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert found == [9, 12, 15]
    assert last_checkpoint(tmp_path).name == "checkpoint-12"


def test_a_checkpoint_that_is_half_gone_does_not_count(tmp_path, monkeypatch):
    Record.begin(tmp_path, {})
    for step in (3, 6, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        mark_complete(tmp_path / f"checkpoint-{step}", {})
    monkeypatch.setattr("twellctl.training.runs.shutil.rmtree", lambda *args, **kwargs: None)
    drop_old_checkpoints(tmp_path)
    assert not (tmp_path / "checkpoint-3/twell_state.json").exists()


def test_a_profile_replaces_only_a_profile(cli, relu_llama, text_file, tmp_path):
    text = Path(shutil.copy(text_file, tmp_path / "text.jsonl"))
    words = ["profile", relu_llama, "--data", text, "--windows=1", "--seq-len=16", "--json"]
    code, _, err = cli(*words, text)
    assert (code, len(err)) == (1, 1)
    assert f"{text} exists and is no profile" in err[0]
    assert text.read_bytes() == text_file.read_bytes()
    for _ in range(2):
        assert cli(*words, tmp_path / "profile.json")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "text.jsonl"]
    with workspace_beside(tmp_path / "profile.json"):
        code, _, err = cli(*words, tmp_path / "profile.json")
    assert code == 1
    assert "another twellctl" in err[-1]
