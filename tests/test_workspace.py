"""Workspaces: one process at a time, what a killed one left goes, and an old OUT comes back."""

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Callable

import pytest
from compiled import EVERY_CASE

from twellctl.errors import TwellError
from twellctl.files import workspace
from twellctl.files.outputs import staged
from twellctl.files.workspace import exchange, lay_aside, workspace_beside, workspace_of


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out"


def killed_in_its_workspace(target, do):
    """A process that is killed in the workspace of `target`, after `do(workspace)`."""
    child = os.fork()
    if child == 0:
        with workspace_beside(target) as workspace:
            do(workspace)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, None])
def test_a_system_that_cannot_exchange_changes_nothing(tmp_path, monkeypatch, code):
    class Library:
        def __init__(self, name, use_errno):
            if code is not None:
                self.renameat2 = lambda *args: workspace.ctypes.set_errno(code) or -1

    monkeypatch.setattr(workspace.ctypes, "CDLL", Library)
    assert not exchange(tmp_path / "one", tmp_path / "other")


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
    killed_in_its_workspace(target, lambda workspace: lay_aside(target))

    def denied(*args):
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(workspace.Path, "rename", denied)
        with pytest.raises(PermissionError), workspace_beside(target):
            pass
    assert (workspace_of(target) / "old").is_dir()


def test_a_room_that_is_a_link_is_refused(target, tmp_path):
    (tmp_path / "mine" / "new").mkdir(parents=True)
    workspace_of(target).symlink_to(tmp_path / "mine")
    with pytest.raises(TwellError, match="no folder of yours"), workspace_beside(target):
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
