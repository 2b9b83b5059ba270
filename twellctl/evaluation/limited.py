"""Programs that a model wrote, each run in a process that can do little. No torch.

A program computes for some seconds, however long that takes where others compute, too, and in some
memory. It starts no other process, sends no signal, opens no socket and writes files in its own
folder alone, which goes with it. `within.py` sets these limits, in the process itself; Linux has
what it takes (seccomp; Landlock for what may be read). A judge that is killed takes its programs
along; their folders go when programs are run again.
"""

import contextlib
import fcntl
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from twellctl.errors import bounded, printable
from twellctl.evaluation.settings import Progress

SECONDS = 15.0  # of a processor, for one program
PATIENCE = 4  # times as long by the clock, for programs that wait, and where others compute, too
MEMORY = 4 << 30  # bytes
FOLDER_BYTES = 64 << 20  # of its folder, of a file a quarter; and of stderr
THREADS = 500
_LOOKS = 0.05  # seconds between two looks at it
_PREFIX = "twellctl-run-"  # of folders
_NEVER = threading.Event()
_READ, _KEPT = 1 << 16, 4096  # bytes of what it says: at a time, and the last ones
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
    """Run each of `programs`, as many at once as there are cores; outcomes in order.

    What ends this, such as Ctrl-C, ends the programs that run.
    """
    _sweep()
    found: list[Outcome] = []
    stopped = threading.Event()
    pool = ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1))
    try:
        for outcome in pool.map(lambda program: run(program, seconds, stopped), programs):
            found.append(outcome)
            progress(len(found), len(programs))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
    return found


def run(program: str, seconds: float = SECONDS, stopped: threading.Event = _NEVER) -> Outcome:
    """Run one program in its own folder, until `stopped` at most. Both are gone afterwards."""
    token = secrets.token_hex(8)  # by which a program is known that came to its end
    said = _Said()
    with _own_folder() as folder, _pipe() as (listening, told), _pipe() as (reading, writing):
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        process = _started(folder, token, told, writing, seconds)
        listener = threading.Thread(target=said.read, args=[listening])
        listener.start()
        told.close()
        writing.close()
        try:
            ended = _watch(process, folder, said, seconds, stopped)
        finally:
            process.kill()
            process.wait()
            listener.join()
        guarded, _, rest = reading.read(100).decode(errors="replace").partition("\n")
        passed = not ended and rest == token
        why = "" if passed else ended or said.last_line() or "it ended by itself"
        return Outcome(passed, why, guarded or None)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A new folder, locked while it is in use, so that `_sweep` of others leaves it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another swept it before it was locked
            lock = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: no one sweeps it
                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.is_dir():
                break
            os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    """Remove the folders that were left by judges which were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, gone by now, or another user's
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """The reading and the writing end of a new pipe."""
    reading, writing = os.pipe()
    with FileIO(reading, "r") as out, FileIO(writing, "w") as into:
        yield out, into


def _started(
    folder: Path, token: str, told: FileIO, writing: FileIO, seconds: float
) -> subprocess.Popen:
    """The process of the program in `folder`, which reads `token` before the program begins."""
    given = [os.getpid(), writing.fileno(), round(seconds), FOLDER_BYTES // 4, MEMORY]
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}
    with _pipe() as (stdin, tokens):
        tokens.write(token.encode())
        tokens.close()
        return subprocess.Popen(
            [sys.executable, "-I", str(_WITHIN), str(folder), *map(str, given)],
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=told,
            env=plain | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[writing.fileno()],
            start_new_session=True,
        )


def _watch(
    process: subprocess.Popen,
    folder: Path,
    said: "_Said",
    seconds: float,
    stopped: threading.Event,
) -> str | None:
    """Wait for its end. Returns why it must be ended, or None if it ended by itself."""
    until = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOKS)
            return None
        if _seconds_of(process.pid) > seconds:
            return f"it computed for more than {seconds:g} s"
        if max(_bytes_of(folder), said.size) > FOLDER_BYTES:
            return f"it wrote more than {FOLDER_BYTES >> 20} MiB"
        if _num_threads(process.pid) > THREADS:
            return f"it ran more than {THREADS} threads"
        if stopped.is_set():
            return "its judge was ended"
    return f"it ran for more than {PATIENCE * seconds:g} s"


def _seconds_of(process: int) -> float:
    """What all its threads have computed so far."""
    with contextlib.suppress(OSError):  # it is gone by now
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _bytes_of(folder: Path) -> int:
    """The size of the files in a folder; each takes a page at least."""
    total = 0
    with contextlib.suppress(OSError):  # one that is gone by now
        for entry in os.scandir(folder):
            total += max(4096, entry.stat(follow_symlinks=False).st_size)
    return total


def _num_threads(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/task"))
    except OSError:  # it is gone by now
        return 0


class _Said:
    """What a program writes to stderr, of any length: its `size`, and the last of it."""

    def __init__(self) -> None:
        self.size, self._last = 0, b""

    def read(self, pipe: FileIO) -> None:
        """Read all that comes."""
        while some := pipe.read(_READ):
            self.size += len(some)
            self._last = (self._last + some)[-_KEPT:]

    def last_line(self) -> str:
        lines = self._last.decode(errors="replace").strip().splitlines()
        return bounded(printable(lines[-1]), 200) if lines else ""
