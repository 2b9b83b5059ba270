"""Output folders that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from twellctl.errors import TwellError


def check_output(
    out: Path,
    *,
    overwrite: bool = False,
    inputs: tuple[Path, ...] = (),
    marker: str = "config.json",
) -> None:
    """Refuse, before any work, an `out` that could not be written or would destroy something."""
    target = out.resolve()
    for source in inputs:
        if target == source.resolve() or target in source.resolve().parents:
            raise TwellError(f"{out} is or contains the input {source}: choose another folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise TwellError(f"{out} exists and is not a folder: choose another name")
    if out.exists():
        if not overwrite:
            raise TwellError(f"{out} exists: choose another name, or replace it with --overwrite")
        if any(out.iterdir()) and not (out / marker).exists():
            raise TwellError(
                f"{out} is none of ours (no {marker} in it), --overwrite would destroy it"
            )
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise TwellError(f"{out} cannot be written: {parent} is not a folder you may write to")


@contextlib.contextmanager
def staged(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `out`. If the block ends well it becomes `out`, else it goes.

    An `OSError` inside (a full disk, say) comes out as one line that names `out`.
    """
    check_output(out, overwrite=overwrite)
    target = out.resolve()
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        _remove_empty(new_parents)
        raise TwellError(
            f"{out} cannot be written: {error.strerror or error}; choose another"
        ) from error
    try:
        yield stage
        make_readable(stage)
        _put_in_place(stage, target, overwrite)
    except OSError as error:
        raise TwellError(
            f"{out} could not be written: {_reason(error, stage)}; nothing was left there, "
            "put that right and run it again"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        _remove_empty(new_parents)


def make_readable(folder: Path) -> None:
    """Give files the mode the umask asks for (safetensors writes 0600); links are left alone."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o777 & ~umask)
        elif not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(0o666 & ~umask)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `source` to `target` if others may read it and the disk allows; else copy."""
    umask = os.umask(0)
    os.umask(umask)
    source = source.resolve()
    wanted = 0o444 & ~umask
    if source.stat().st_mode & wanted == wanted:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _put_in_place(stage: Path, target: Path, overwrite: bool) -> None:
    """`stage` becomes `target`; an older `target` goes only when the new one stands."""
    if not (overwrite and target.exists()):
        stage.rename(target)  # fails if another has written it meanwhile
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent)) / target.name
    try:
        target.rename(aside)
        stage.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        _remove_empty([aside.parent])
        raise
    shutil.rmtree(aside.parent, ignore_errors=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _reason(error: OSError, stage: Path) -> str:
    """What went wrong, and with which file if it is one that was read."""
    written = error.filename2 or str(error.filename or stage).startswith(str(stage))
    return f"{error.strerror or error}" + ("" if written else f" ({error.filename})")
