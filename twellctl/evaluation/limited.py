"""Programs that a model wrote, each run in a process that can do little. No torch.

A program computes for some seconds, in some memory. It starts no other process, sends no signal,
opens no socket and writes files in its own folder alone, which goes with it. `within.py` sets these
limits, in the process itself; Linux has what it takes (seccomp; Landlock for what may be read).
"""

import contextlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from twellctl.errors import bounded, printable
from twellctl.evaluation.settings import Progress

SECONDS = 15.0  # of a program, by the clock
MEMORY = 4 << 30  # bytes
FOLDER_BYTES = 64 << 20  # of its folder; of a file a quarter
_LOOKS = 0.05  # seconds between two looks at it
_SAID = 4096  # bytes of what it said last that are read
_AT_ONCE = 16
_WITHIN = Path(__file__).with_name("within.py")


@dataclass(frozen=True)
class Outcome:
    """Whether a program came to its end; if not, `why`: the last line that it wrote to stderr.

    `guards` is "files" if its reading of files was limited, "some" if it was not, and None if no
    program could be run.
    """

    passed: bool
    why: str
    guards: str | None


@dataclass(frozen=True)
class Guards:
    """The limits that this machine can set. `why_not`: why none is run; `files`: reading, too."""

    why_not: str | None
    files: bool = False


def guards() -> Guards:
    """The limits of this machine, tried on a program that does nothing."""
    if not sys.platform.startswith("linux"):
        return Guards(f"a process cannot be limited here (this is {platform.system()}, no Linux)")
    tried = run("")
    return Guards(None if tried.passed else tried.why, tried.guards == "files")


def run_all(
    programs: Sequence[str],
    progress: Progress = lambda done, total: None,
    seconds: float = SECONDS,
) -> list[Outcome]:
    """Run each of `programs`, as many at once as there are cores; outcomes in order."""
    found: list[Outcome] = []
    pool = ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1))
    try:
        for outcome in pool.map(lambda program: run(program, seconds), programs):
            found.append(outcome)
            progress(len(found), len(programs))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def run(program: str, seconds: float = SECONDS) -> Outcome:
    """Run one program in its own folder. Both the folder and the process are gone afterwards."""
    token = secrets.token_hex(8)  # by which a program is known that came to its end
    folder = Path(tempfile.mkdtemp(prefix="twellctl-run-"))
    reading, writing = os.pipe()
    try:
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        process = _started(folder, token, writing, seconds)
        os.close(writing)
        try:
            ended = _watch(process, folder, seconds)
        finally:
            process.kill()
            process.wait()
        guarded, _, rest = os.read(reading, 100).decode(errors="replace").partition("\n")
        passed = not ended and rest == token
        why = "" if passed else ended or _last_line(folder / "said") or "it ended by itself"
        return Outcome(passed, why, guarded or None)
    finally:
        os.close(reading)
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path, token: str, writing: int, seconds: float) -> subprocess.Popen:
    """The process of the program in `folder`, which reads `token` before the program begins."""
    limits = [str(writing), str(round(seconds)), str(FOLDER_BYTES // 4), str(MEMORY)]
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}
    with (folder / "said").open("wb") as said, _pipe_with(token) as stdin:
        return subprocess.Popen(
            [sys.executable, "-I", str(_WITHIN), str(folder), *limits],
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=plain | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[writing],
            start_new_session=True,
        )


@contextlib.contextmanager
def _pipe_with(text: str) -> Iterator[int]:
    """The reading end of a pipe that holds the short `text`; it is closed when the block ends."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)


def _watch(process: subprocess.Popen, folder: Path, seconds: float) -> str | None:
    """Wait for its end. Returns why it must be ended, or None if it ended by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOKS)
            return None
        if _bytes_of(folder) > FOLDER_BYTES:
            return f"it wrote more than {FOLDER_BYTES >> 20} MiB"
    return f"it ran for more than {seconds:g} s"


def _bytes_of(folder: Path) -> int:
    """The size of the files in a folder; each takes a page at least."""
    total = 0
    with contextlib.suppress(OSError):  # one that is gone by now
        for entry in os.scandir(folder):
            total += max(4096, entry.stat(follow_symlinks=False).st_size)
    return total


def _last_line(said: Path) -> str:
    with said.open("rb") as file:
        file.seek(max(0, said.stat().st_size - _SAID))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return bounded(printable(lines[-1]), 200) if lines else ""
