"""Rooms: one process at a time, what a killed one left goes, and an old OUT comes back."""

import errno
import fcntl
import os
import signal

import pytest

from twellctl.errors import TwellError
from twellctl.files import exchange as exchange_module
from twellctl.files import workspace
from twellctl.files.exchange import exchange
from twellctl.files.workspace import lay_aside, room_beside, room_of


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out"


def killed_in_its_room(target, do):
    """A process that is killed in the room of `target`, after `do(room)`."""
    child = os.fork()
    if child == 0:
        with room_beside(target) as room:
            do(room)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_two_folders_change_places(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (one / "a").touch()
    assert exchange(one, other)
    assert (list(one.iterdir()), list(other.iterdir())) == ([], [other / "a"])
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "none")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, None])
def test_a_system_that_cannot_exchange_changes_nothing(tmp_path, monkeypatch, code):
    class Library:
        def __init__(self, name, use_errno):
            if code is not None:
                self.renameat2 = lambda *args: exchange_module.ctypes.set_errno(code) or -1

    monkeypatch.setattr(exchange_module.ctypes, "CDLL", Library)
    assert not exchange(tmp_path / "one", tmp_path / "other")


def test_a_room_is_empty_and_goes(target):
    with room_beside(target) as room:
        assert [path.name for path in room.iterdir()] == ["lock"]
        (room / "new").mkdir()
    assert list(target.parent.iterdir()) == []


def test_one_process_at_a_time(target):
    with (
        room_beside(target),
        pytest.raises(TwellError, match="another twellctl"),
        room_beside(target),
    ):
        pass
    with room_beside(target):
        pass


def test_what_a_killed_process_left_goes(target):
    killed_in_its_room(target, lambda room: (room / "new").mkdir())
    assert (room_of(target) / "new").exists()
    with room_beside(target) as room:
        assert [path.name for path in room.iterdir()] == ["lock"]
    assert list(target.parent.iterdir()) == []


def test_an_old_one_laid_aside_comes_back(target):
    target.mkdir()
    (target / "precious").touch()
    killed_in_its_room(target, lambda room: lay_aside(target))
    (note,) = target.parent.glob("*.txt")
    assert not target.exists()
    assert f"mv '{room_of(target) / 'old'}' '{target}'" in note.read_text()
    with room_beside(target):
        assert (target / "precious").exists()
    assert list(target.parent.iterdir()) == [target]


def test_an_old_one_with_a_successor_goes(target):
    target.mkdir()

    def replaced(room):
        lay_aside(target)
        target.mkdir()
        (target / "new one").touch()

    killed_in_its_room(target, replaced)
    with room_beside(target):
        pass
    assert list(target.parent.rglob("*")) == [target, target / "new one"]


def test_an_old_one_that_cannot_be_put_back_stays(target, monkeypatch):
    target.mkdir()
    killed_in_its_room(target, lambda room: lay_aside(target))

    def denied(*args):
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(workspace.Path, "rename", denied)
        with pytest.raises(PermissionError), room_beside(target):
            pass
    assert (room_of(target) / "old").is_dir()


def test_a_room_that_is_a_link_is_refused(target, tmp_path):
    (tmp_path / "mine" / "new").mkdir(parents=True)
    room_of(target).symlink_to(tmp_path / "mine")
    with pytest.raises(TwellError, match="no folder of yours"), room_beside(target):
        pass
    assert (tmp_path / "mine" / "new").exists()


def test_where_files_cannot_be_locked_a_room_that_is_there_is_not_touched(target, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with room_beside(target) as room:
        (room / "new").mkdir()
        with pytest.raises(TwellError, match="remove it"), room_beside(target):
            pass
        assert (room / "new").exists()
    assert list(target.parent.iterdir()) == []
