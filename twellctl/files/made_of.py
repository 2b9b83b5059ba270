"""What a result is made of: it is reused by the content of what was read, not by names and flags.

`made_of` is a table of parts, such as a model, a text and settings: of files a digest, else values.
Where a command continues, all parts must be what they were.

A digest is of all bytes, since any row or layer may have been corrected. sha256 takes one or two
seconds a GB, about as long as reading does, which comes next anyway; a process reads no file twice
for it. Inputs of together more than `WHOLE` are known by their sizes and times of change. What a
run keeps is read whole whatever its size.
"""

import functools
import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError, reason
from twellctl.files.outputs import write_file
from twellctl.files.strict_json import read_json, to_json

RECORD = "run.json"  # of a folder that a run makes
FORMAT = 3  # of a run folder: those of another one are not continued
WHOLE = 16 << 30  # bytes
ANEW = "start again with --overwrite"


def digest_of(paths: Iterable[Path]) -> str:
    """One digest of all files, in this order; `TwellError` for one that cannot be read.

    Of a name only the suffix counts, by which files are read.
    """
    paths = [*paths]
    states = [*map(_status, paths)]
    if sum(size for size, *_ in states) > WHOLE:
        digests = [f"{size} {changed}" for size, changed, *_ in states]
    else:
        digests = contents_of(paths)
    named = (f"{path.suffix} {one}\n" for path, one in zip(paths, digests, strict=True))
    return hashlib.sha256("".join(named).encode()).hexdigest()


def contents_of(paths: Iterable[Path]) -> list[str]:
    """A digest of all bytes of each file; `TwellError` for one that cannot be read."""
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda path: _content(path, _status(path)), paths)]


def _status(path: Path) -> tuple[int, int, int, int]:
    """Size, time of change and what else differs where the content does."""
    try:
        status = path.stat()
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@functools.lru_cache(maxsize=4096)
def _content(path: Path, status: tuple[int, ...]) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {reason(error)}") from error


def as_json(value: Any) -> Any:
    """`value` as it is when it was written as JSON and read again."""
    return json.loads(to_json(value))


def refuse_other(what: Path, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    """`UsageError` that names the parts of which `what` was made `before` and is not `now`."""
    now = as_json(now)
    others = [part for part in before | now if before.get(part) != now.get(part)]
    if others:
        raise UsageError(
            f"{what} was made with other settings or inputs ({', '.join(others)}): {remedy}"
        )


@dataclass
class Record:
    """`RECORD` of a run folder: what the run is made of, and the digests of `files` it keeps."""

    folder: Path
    made_of: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def begin(cls, folder: Path, made_of: dict[str, Any], *names: str) -> "Record":
        """The record of a new run, which keeps these files."""
        record = cls(folder, as_json(made_of), {})
        record.keep(*names)
        return record

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """The record in `folder`; `TwellError` if it is damaged, or there is none."""
        if not (folder / RECORD).exists():
            raise TwellError(
                f"{folder} has no {RECORD}, it is damaged or of another version of twellctl: {ANEW}"
            )
        found = read_json(folder / RECORD, ANEW)
        made_of, files = found.get("made_of"), found.get("files")
        if found.get("format") != FORMAT or not (
            isinstance(made_of, dict) and isinstance(files, dict)
        ):
            raise TwellError(
                f"{folder} was begun by another version of twellctl: continue with that version, "
                f"or {ANEW}"
            )
        return cls(folder, made_of, files)

    def has(self, name: str) -> bool:
        """Whether the run keeps a file of that name, and it is there."""
        return name in self.files and (self.folder / name).is_file()

    def keep(self, *names: str) -> None:
        """Add files of the folder, which are whole now."""
        self.files |= digests_in(self.folder, names)
        content = {"format": FORMAT, "made_of": self.made_of, "files": self.files}
        write_file(self.folder / RECORD, to_json(content, indent=1))

    def leave(self, *names: str) -> None:
        """Keep these files and no others; `TwellError` for one that is not as it was."""
        self.files = {name: self.files.get(name, "") for name in names}
        check_whole(self.folder, self.files, "remove it, and the same command makes it again")
        self.keep()

    def refuse_other(self, made_of: dict[str, Any]) -> None:
        """`UsageError` if the run is made of something else."""
        refuse_other(self.folder, self.made_of, made_of, f"give the same, or {ANEW}")


def digests_in(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The digests of files of `folder`, by their names."""
    names = [*names]
    return dict(zip(names, contents_of(folder / name for name in names), strict=True))


def check_whole(folder: Path, files: dict[str, str], remedy: str) -> None:
    """`TwellError` for the first file of `folder` that has no longer the digest that it had."""
    there = [name for name in files if (folder / name).is_file()]
    found = digests_in(folder, there)
    for name, digest in files.items():
        if found.get(name) != digest:
            raise TwellError(f"{folder / name} is damaged or missing: {remedy}")
