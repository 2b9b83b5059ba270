"""An output folder appears whole or not at all, and nothing that was there is lost."""

import errno
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from compiled import EVERY_CASE
from edits import contents

from twellctl.cli.command import result_writer
from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.files import outputs, workspace
from twellctl.files.outputs import staged
from twellctl.files.strict_json import read_json
from twellctl.files.workspace import lay_aside, workspace_beside, workspace_of

convert_module = sys.modules["twellctl.convert"]


@pytest.fixture
def model(silu_llama, tmp_path) -> Path:
    return Path(shutil.copytree(silu_llama, tmp_path / "models" / "model"))


@pytest.fixture
def refused(refusal, tmp_path):
    """`refused(words, *command)`: exit 1, one line with all words, and no file changed anywhere."""

    def check(words, *command):
        before = contents(tmp_path)
        said = refusal("convert", *command)
        assert all(word in said for word in words), said
        assert contents(tmp_path) == before

    return check


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def denied(*_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def fails_once(target, fail):
    """A `Path.rename` that calls `fail` the first time that something shall become `target`."""
    rename, left = Path.rename, [target]

    def renamed(self, to):
        if to in left:
            left.remove(to)
            fail()
        return rename(self, to)

    return renamed


def test_out_exists(model, refused, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    refused((f"{out} exists", "--overwrite"), model, out)
    (out / "notes.txt").write_text("mine")
    refused(("was not written by twellctl", "would destroy it"), model, out, "--overwrite")
    for name in (".git", "checkpoint-3"):  # in a model of ours
        mine = tmp_path / f"with{name}"
        convert(model, mine)
        (mine / name).mkdir()
        words = (f"holds {name}, which was not written by twellctl", "destroy it")
        refused(words, model, mine, "--overwrite")
        shutil.rmtree(mine)
    (out / "config.json").write_text('{"name": "of some other program"}')
    refused(("was not written by twellctl", "would destroy it"), model, out, "--overwrite")
    (tmp_path / "file").write_text("mine")
    refused(("is not a folder", "choose another name"), model, tmp_path / "file", "--overwrite")
    refused(("is not a folder you may write to",), model, tmp_path / "file" / "out")


def test_out_is_the_model_or_holds_it(model, refused, tmp_path, monkeypatch):
    words = ("is or contains the input", "choose another folder")
    for more in ((), ("--overwrite",)):
        refused(words, model, model, *more)
        refused(words, model, model.parent, *more)
        refused(words, model, model / "..", *more)
        refused(words, model, model / "." / "", *more)
    link = tmp_path / "link"
    link.symlink_to(model)
    refused(words, model, link, "--overwrite")
    refused(words, link, model, "--overwrite")
    monkeypatch.chdir(model)
    refused(words, ".", ".", "--overwrite")


def test_out_is_the_current_folder_or_holds_it(model, refused, tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    words = ("is or contains the current folder", "choose another folder")
    for out in (".", "..", tmp_path / "here", tmp_path / "here" / "below"):
        refused(words, model, out, "--overwrite")


def test_a_current_folder_that_is_gone(model, cli, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert cli("convert", model, tmp_path / "out")[0] == 0


def test_names_that_are_not_utf8(model, cli, tmp_path):
    out = tmp_path / "r\udce9"
    assert cli("convert", model, out)[0] == 0
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "# r\\udce9\n" in card
    outputs.write_file(tmp_path / "file.json", '{"data": "caf\udce9"}')
    assert read_json(tmp_path / "file.json") == {"data": "caf\\udce9"}


def test_unwritable_parent(model, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)
    refused((f"{tmp_path} is not a folder you may write to",), model, tmp_path / "out")


def test_folder_that_cannot_be_made(model, refused, tmp_path, monkeypatch):
    out = tmp_path / "new" / "deep" / "out"
    monkeypatch.setattr(workspace, "_make", denied)
    refused((f"{out} cannot be written", "Permission denied", "choose another"), model, out)


@pytest.mark.parametrize("out", ["out", "new/deep/out"])
@pytest.mark.parametrize("where", ["shutil.copyfile", "Path.write_text"])
def test_full_disk(model, refused, tmp_path, monkeypatch, where, out):
    if where == "shutil.copyfile":
        monkeypatch.setattr(shutil, "copyfile", no_space)
    else:
        monkeypatch.setattr(Path, "write_text", no_space)
    words = (f"{out} could not be written", "No space left on device", "nothing was left")
    refused(words, model, tmp_path / out)


def test_failure_keeps_the_old_out(model, refused, cli, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert cli("convert", model, out)[0] == 0
    words = ("could not be written", "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "write_config", no_space)
        refused(words, model, out, "--overwrite")
    with monkeypatch.context() as patch:  # the new folder cannot take the old one's place
        patch.setattr(Path, "rename", fails_once(out, no_space))
        refused(words, model, out, "--overwrite")


@pytest.mark.parametrize(
    ("stop", "code", "lines"),
    [(KeyboardInterrupt(), 130, ["error: interrupted"]), (SystemExit(143), 143, [])],
)
def test_a_stopped_run_leaves_nothing(model, cli, tmp_path, monkeypatch, stop, code, lines):
    out = tmp_path / "new" / "out"

    def stopped(*_):
        raise stop

    before = contents(tmp_path)
    monkeypatch.setattr(convert_module, "write_config", stopped)
    assert cli("convert", model, out) == (code, "", lines)
    assert contents(tmp_path) == before


def test_stopped_between_the_renames(model, cli, tmp_path, monkeypatch):
    def stop():
        raise SystemExit(143)

    out = tmp_path / "out"
    assert cli("convert", model, out)[0] == 0
    before = contents(tmp_path)
    monkeypatch.setattr(Path, "rename", fails_once(out, stop))
    assert cli("convert", model, out, "--overwrite")[0] == 143
    assert contents(tmp_path) == before


def test_overwrite_replaces_all(model, cli, tmp_path):
    out = tmp_path / "out"
    assert cli("convert", model, out)[0] == 0
    first = contents(out)
    (out / "left.txt").write_text("from an earlier run")
    assert cli("convert", model, out, "--overwrite")[0] == 0
    assert contents(out) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "out"]


def test_another_run_that_wrote_out_first_wins(model, refusal, tmp_path, monkeypatch):
    out = tmp_path / "out"
    copy_side_files = convert_module.copy_side_files

    def meanwhile(checkpoint, stage):
        copy_side_files(checkpoint, stage)
        out.mkdir()
        (out / "theirs").write_text("theirs")

    monkeypatch.setattr(convert_module, "copy_side_files", meanwhile)
    assert f"{out} exists" in refusal("convert", model, out)
    assert contents(out) == {out / "theirs": b"theirs"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "out"]


def test_modes(model, tmp_path, cli, monkeypatch):
    """By the umask, which is not set to be read: other threads may make files meanwhile."""
    set_umask = os.umask
    weights = model / "model.safetensors"
    for mode in (0o644, 0o600):
        weights.chmod(mode)
        (model / "tokenizer.json").chmod(mode)
        out = tmp_path / f"{mode:o}"
        umask = set_umask(0o022)
        monkeypatch.delattr(os, "umask")
        try:
            assert cli("convert", model, out)[0] == 0
        finally:
            set_umask(umask)
            monkeypatch.undo()
        assert not os.path.samefile(weights, out / "model.safetensors")
        assert out.stat().st_mode & 0o777 == 0o755
        assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}


def test_a_written_file_stays_a_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    outputs.write_file(tmp_path / "link.json", "[1]")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "[1]"


def test_what_was_measured_is_shown_though_its_file_cannot_be_written(
    cli, relu_llama, text_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(Path, "write_bytes", no_space)
    made = tmp_path / "made.json"
    words = ("--data", text_file, "--windows", 2, "--seq-len", 16, "--json", made)
    code, out, err = cli("eval", relu_llama, *words)
    assert code == 1
    assert "cross-entropy" in out
    assert err[-1] == f"error: {made} could not be written: No space left on device"
    code, out, _ = cli("profile", relu_llama, *words)
    assert (code, "density" in out, "next:" in out) == (1, True, False)  # what FILE would be for
    assert not made.exists()


FOUND = SimpleNamespace(to_json=lambda: {})


def test_the_file_is_written_though_nobody_reads_the_screen(tmp_path):
    def left(found) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        result_writer(tmp_path / "made.json", "ours", "evaluation")(FOUND, left)
    assert (tmp_path / "made.json").read_text() == "{}\n"


def test_a_link_to_itself_is_refused_before_any_work(refusal, relu_llama, text_file, tmp_path):
    (tmp_path / "made.json").symlink_to("made.json")
    said = refusal("profile", relu_llama, "--data", text_file, "--json", tmp_path / "made.json")
    assert said.endswith("made.json leads to itself: Too many levels of symbolic links")


def test_what_appears_at_a_file_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "found.json"
    tell = result_writer(path, "ours", "evaluation")
    path.write_text("precious")
    with pytest.raises(TwellError, match="is no evaluation"):
        tell(FOUND, lambda found: None)
    path.write_text('{"ours": 1}')
    tell(FOUND, lambda found: None)
    assert path.read_text() == "{}\n"


# ---- workspaces: one process at a time, what a killed one left goes, and an old OUT comes back


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out"


def test_a_room_is_empty_and_goes(target):
    with workspace_beside(target) as workspace:
        assert [path.name for path in workspace.iterdir()] == ["lock"]
        (workspace / "new").mkdir()
    assert list(target.parent.iterdir()) == []


def test_one_process_at_a_time(target):
    with (
        workspace_beside(target),
        pytest.raises(TwellError, match="another twellctl"),
        workspace_beside(target),
    ):
        pass
    with workspace_beside(target):
        pass


def test_an_old_one_that_cannot_be_put_back_stays(target, monkeypatch):
    target.mkdir()
    if not (child := os.fork()):
        with workspace_beside(target):
            lay_aside(target)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with monkeypatch.context() as patch:
        patch.setattr(workspace.Path, "rename", denied)
        with pytest.raises(PermissionError), workspace_beside(target):
            pass
    assert (workspace_of(target) / "old").is_dir()


def test_a_room_that_is_a_link_is_refused(target, tmp_path):
    (tmp_path / "mine" / "new").mkdir(parents=True)
    workspace_of(target).symlink_to(tmp_path / "mine")
    with pytest.raises(TwellError, match="not a folder of yours"), workspace_beside(target):
        pass
    assert (tmp_path / "mine" / "new").exists()


def test_where_files_cannot_be_locked_a_room_that_is_there_is_not_touched(target, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with workspace_beside(target) as workspace:
        (workspace / "new").mkdir()
        with pytest.raises(TwellError, match="remove it"), workspace_beside(target):
            pass
        assert (workspace / "new").exists()
    assert list(target.parent.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_call_leaves_nothing(target):
    """At each call, and at each return from C: there Python looks whether a signal has come."""

    def write():
        with staged(target, overwrite=True, not_ours=lambda path: None) as stage:
            (stage / "a").touch()

    calls = 0
    while interrupted(calls, write):
        calls += 1 if EVERY_CASE else 3
        assert os.listdir(target.parent) in ([], ["out"]), calls
    assert calls > 100
    assert os.listdir(target) == ["a"]


def interrupted(calls: int, run: Callable[[], None]) -> bool:
    """Whether KeyboardInterrupt was raised in `run` after `calls`, if only in a finalizer."""
    left = calls

    def count(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(count)
        run()
    except (KeyboardInterrupt, OSError, TwellError):  # which it becomes in rmtree
        assert left < 0
    finally:
        sys.setprofile(None)
    return left < 0
