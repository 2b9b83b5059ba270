"""The workspace of an output: a hidden folder next to it that one process at a time works in.

For OUT it is `.OUT.twellctl`. Its file `lock` is locked while the process that works there lives,
and the workspace goes when it is done. So what a process finds in a workspace whose lock it got was
left by one that was killed, and can be removed. Only `old` is more than rubbish: an OUT that was
laid aside goes back to its place if nothing has taken it.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from twellctl.errors import TwellError


@contextlib.contextmanager
def workspace_beside(target: Path) -> Iterator[Path]:
    """The workspace of `target`, locked, and empty but for its lock; it goes when the block ends.

    `TwellError` if another process has it, or it cannot be made.
    """
    workspace = workspace_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(workspace, target)
    except OSError as error:
        raise TwellError(
            f"{target} cannot be written: {error.strerror or error}; choose another"
        ) from error
    except KeyboardInterrupt:  # it may have been made by then
        with contextlib.suppress(OSError, TwellError):
            _leave(workspace, target, _lock(workspace, target))
        raise
    try:
        restore(target)
        _clear(workspace, target)
        yield workspace
    finally:
        try:
            _leave(workspace, target, lock)
        except KeyboardInterrupt:
            _leave(workspace, target, lock)
            raise


def workspace_of(target: Path) -> Path:
    """Where the workspace of `target` is, or would be."""
    return target.with_name(f".{target.name}.twellctl")


def lay_aside(target: Path) -> None:
    """Move `target` into its workspace, until `restore`."""
    target.rename(workspace_of(target) / "old")


def restore(target: Path) -> None:
    """Undo `lay_aside`, unless something stands in the place of `target` by now."""
    old = workspace_of(target) / "old"
    if old.exists() and not os.path.lexists(target):
        old.rename(target)


def remove(path: Path) -> None:
    """Remove a folder or a file, if it is there; Ctrl-C meanwhile is passed on when it is gone."""
    try:
        _remove(path)
    except (KeyboardInterrupt, OSError) as error:
        _remove(path)
        if isinstance(error.__context__, KeyboardInterrupt):  # of which rmtree made an OSError
            raise KeyboardInterrupt from error
        raise


def _leave(workspace: Path, target: Path, lock: int) -> None:
    """Remove the workspace, and then unlock it. Nothing is done where that was done before."""
    with contextlib.suppress(OSError):
        if _is_at(workspace / "lock", lock):
            _clear(workspace, target)
            (workspace / "lock").unlink()
        workspace.rmdir()  # fails if the next one is in it already
    with contextlib.suppress(OSError):
        os.close(lock)


def _clear(workspace: Path, target: Path) -> None:
    """Remove all but the lock, and but an `old` that could not be put back."""
    kept = {"lock"} if os.path.lexists(target) else {"lock", "old"}
    for name in os.listdir(workspace):
        if name not in kept:
            remove(workspace / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(workspace: Path, target: Path) -> int:
    """The open and locked lock file of `workspace`, which is made if it is not there."""
    while True:
        is_new = _make(workspace)
        try:
            lock = os.open(workspace / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # whoever had the workspace is just leaving it
            continue
        try:
            _take(lock, is_new, workspace, target)
            if _is_at(workspace / "lock", lock):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _is_at(path: Path, file: int) -> bool:
    """Whether the open `file` is what lies at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _make(workspace: Path) -> bool:
    """Whether it was made now. One that another user, or a link, has put there is refused."""
    try:
        workspace.mkdir(mode=0o700)
    except FileExistsError:
        if (
            workspace.is_symlink()
            or not workspace.is_dir()
            or workspace.stat().st_uid != os.geteuid()
        ):
            raise TwellError(f"{workspace} is not a folder of yours: remove it") from None
        return False
    return True


def _take(lock: int, is_new: bool, workspace: Path, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TwellError(
            f"{target} is being written by another twellctl: wait until it ends, or choose another"
        ) from None
    except OSError as error:  # a file system without locks: the workspace is whose who made it
        if not is_new:
            raise TwellError(
                f"{workspace} is there: if no other twellctl writes {target}, remove it"
            ) from error
