"""Outputs that appear whole or not at all, and what must not be lost for them.

A command claims its OUT before it works for it: what cannot be written, or would destroy something,
is refused first. The new OUT is made in the workspace of the old one (`twellctl.files.workspace`),
and takes its place when it is whole.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twellctl.errors import TwellError, encodable
from twellctl.files.strict_json import read_json
from twellctl.files.workspace import (
    lay_aside,
    remove,
    restore,
    workspace_beside,
    workspace_of,
)

NOT_OURS = "was not written by twellctl"
# that commands, Python and the hub's tools put into a model's folder
_FOLDERS = {"twell_kernels", "twell_original", "additional_chat_templates", "runs"}
_FOLDERS |= {"__pycache__", ".cache"}


def not_ours_in_model(folder: Path) -> str | None:
    """What twellctl did not write: the model in `folder`, or another folder in it; None: nothing.

    A config.json of ours has a "twell" block.
    """
    if not has_key(folder / "config.json", "twell"):
        return NOT_OURS
    others = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in _FOLDERS)
    return f"holds {others[0]}, which was not written by twellctl" if others else None


def check_inputs(out: Path, inputs: Iterable[Path]) -> None:
    """Refuse an `out` that is, or holds, something which the same call reads."""
    target = out.resolve()
    for source in inputs:
        for path in (source.resolve(), source.parent.resolve() / source.name):
            if target == path or target in path.parents:
                raise TwellError(f"{out} is or contains the input {source}: choose another folder")


@contextlib.contextmanager
def claimed(
    out: Path,
    *,
    overwrite: bool = False,
    inputs: Iterable[Path] = (),
    run: Path | None = None,
    not_ours: Callable[[Path], str | None] = not_ours_in_model,
) -> Iterator["Claim"]:
    """Keep `out`, and its `run` folder if it has one, for this process while the block runs.

    `TwellError`, before any work, for an `out` that cannot be written or that another process is
    writing; for one that exists without `overwrite`, or about which `not_ours` says something; and
    if one of `inputs` is in either folder.
    """
    claim = Claim(out, out.resolve(), overwrite, tuple(inputs), not_ours)
    claim.check()
    new_parents = [parent for parent in claim.target.parents if not parent.exists()]
    try:
        with workspace_beside(claim.target):
            claim.check()  # again: a run that was killed may have laid the old one aside
            if run is not None:
                check_inputs(run, claim.inputs)
            yield claim
    finally:
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def staged(out: Path, **how) -> Iterator[Path]:
    """Claim `out` (`how` as in `claimed`) and yield an empty folder that becomes `out`."""
    with claimed(out, **how) as claim, claim.staged() as stage:
        yield stage


def write_file(path: Path, content: str | bytes, check: Callable[[], None] = lambda: None) -> None:
    """Write the file `path`, JSON, a page or a plot, whole or not at all, replacing an older one.

    `check`, a `check_file` of it, is asked again: something else may lie there by now.
    """
    if isinstance(content, str):  # two: after one, JSON would have the surrogate again
        content = encodable(content, r"\\").encode()
    target = _real(path)
    try:
        with workspace_beside(target) as workspace:
            new = workspace / "new"
            new.write_bytes(content)
            check()
            new.replace(target)
    except OSError as error:
        raise TwellError(f"{path} could not be written: {error.strerror or error}") from error


def open_again(path: Path, was_there: bool, is_kind: Callable[[Path], bool], size: int = 0) -> int:
    """A descriptor of the file `path`, opened for writing long after its `check_file`.

    It is behind the first `size` bytes, which are all that is left of it. What was not there then
    is not replaced if it is by now; what was must still be of its kind.
    """
    target = _real(path)
    if was_there and target.exists() and is_kind(target):
        file = os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        os.ftruncate(file, size)
        os.lseek(file, size, os.SEEK_SET)
        return file
    try:
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(target, how, 0o666)
    except FileExistsError:
        raise TwellError(
            f"{path} was created by another process meanwhile: choose another name"
        ) from None


def check_file(path: Path, what: str, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Refuse, before any work, a `path` that could not be written, or is something else.

    What is there may be replaced if `is_kind(path)`: another one of that `kind`.
    """
    if path.is_dir():
        raise TwellError(f"{path} is a folder: name {what} to write")
    parent = _real(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise TwellError(f"{path} cannot be written: {parent} is not a folder you may write to")
    if path.exists() and not is_kind(path):
        raise TwellError(f"{path} exists and is no {kind}: choose another name")


def _real(path: Path) -> Path:
    """Where a file lies that is written by way of `path`, which may be a link, and stays one."""
    return path.resolve() if path.is_symlink() else path


def has_key(path: Path, key: str) -> bool:
    """Whether the file `path` holds a JSON object with `key`."""
    try:
        return key in read_json(path)
    except TwellError:
        return False


@dataclass(frozen=True)
class Claim:
    """An `out` that is this process's own; made by `claimed`. `target` is where it really lies."""

    out: Path
    target: Path
    overwrite: bool
    inputs: tuple[Path, ...]
    not_ours: Callable[[Path], str | None]

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield an empty folder. If the block ends well it becomes `out`, else it goes.

        An `OSError` inside (a full disk, say) comes out as one line that names `out`.
        """
        stage = workspace_of(self.target) / "new"
        try:
            stage.mkdir()
            yield stage
            make_readable(stage)
            self._put_in_place(stage)
        except OSError as error:
            raise TwellError(
                f"{self.out} could not be written: {_reason(error, stage)}; nothing was left "
                "there: fix that and run it again"
            ) from error
        finally:
            remove(stage)

    def check(self) -> None:
        """Refuse an `out` that could not be written, or whose replacement would lose something."""
        out, target = self.out, self.target
        check_inputs(out, self.inputs)
        if out.is_symlink() or (out.exists() and not out.is_dir()) or not target.name:
            raise TwellError(f"{out} exists and is not a folder: choose another name")
        if _holds_current_folder(target):
            raise TwellError(f"{out} is or contains the current folder: choose another folder")
        if out.exists():
            if not self.overwrite:
                raise TwellError(
                    f"{out} exists: choose another name, or replace it with --overwrite"
                )
            if any(out.iterdir()) and (said := self.not_ours(out)) is not None:
                raise TwellError(f"{out} {said}, --overwrite would destroy it: choose another name")
        parent = target.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise TwellError(f"{out} cannot be written: {parent} is not a folder you may write to")

    def _put_in_place(self, stage: Path) -> None:
        """`stage` becomes the target; an older one is then in the workspace, and goes with it."""
        self.check()  # again: another may have made one meanwhile
        try:
            if self.target.exists():
                lay_aside(self.target)
            stage.rename(self.target)
        finally:
            restore(self.target)


def _reason(error: OSError, stage: Path) -> str:
    """What went wrong, and with which file if it is one that was read."""
    written = error.filename2 or str(error.filename or stage).startswith(str(stage))
    return f"{error.strerror or error}" + ("" if written else f" ({error.filename})")


def _holds_current_folder(target: Path) -> bool:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed under the shell
        return False
    return target == here or target in here.parents


def make_readable(folder: Path) -> None:
    """Give files the mode that the umask allows (safetensors writes 0600); links are left alone.

    The mode of a new file shows the umask: to read it directly is to set it, for all threads.
    """
    probe = folder / ".mode"
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL, 0o777)
    umask = 0o777 & ~os.fstat(descriptor).st_mode
    os.close(descriptor)
    probe.unlink()
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o777 & ~umask)
        elif not path.is_symlink():
            path.chmod(0o666 & ~umask)
