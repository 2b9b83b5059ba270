"""Output folders that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from twellctl.errors import TwellError


def check_output(out: Path, *, overwrite: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse, before any work is done, an `out` that could not be written or would destroy something."""
    target = out.resolve()
    for source in inputs:
        if target == source.resolve() or target in source.resolve().parents:
            raise TwellError(f"{out} is or contains the input {source}: choose another folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise TwellError(f"{out} exists and is not a folder: choose another name")
    if out.exists():
        if not overwrite:
            raise TwellError(f"{out} exists: choose another name, or replace it with --overwrite")
        if any(out.iterdir()) and not (out / "config.json").is_file():
            raise TwellError(f"{out} is no model folder (no config.json), --overwrite would destroy it")
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise TwellError(f"{out} cannot be written: {parent} is not a folder you may write to")


@contextlib.contextmanager
def staged(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `out`. When the block ends well it becomes `out`; else it is removed.

    An `OSError` inside (a full disk, say) comes out as one line that names `out`.
    """
    check_output(out, overwrite=overwrite)
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise TwellError(f"{out} cannot be written: {error.strerror or error}") from error
    try:
        try:
            yield stage
            make_readable(stage)
            _put_in_place(stage, target)
        except OSError as error:
            what = error.strerror or error
            raise TwellError(f"{out} could not be written: {what}; nothing was left there") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def make_readable(folder: Path) -> None:
    """Give files the mode the user's umask asks for (safetensors writes 0600); links are left alone."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o777 & ~umask)
        elif not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(0o666 & ~umask)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `source` to `target` where others may read it too and the disk allows; else copy."""
    umask = os.umask(0)
    os.umask(umask)
    source = source.resolve()
    wanted = 0o444 & ~umask
    if source.stat().st_mode & wanted == wanted:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _put_in_place(stage: Path, target: Path) -> None:
    if not target.exists():
        stage.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / target.name)
    try:
        stage.rename(target)
    except OSError:
        (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
