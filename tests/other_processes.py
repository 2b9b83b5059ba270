"""Other Python processes: forks of one that has imported all (warm.py)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# code in front of a command whose answers are to take long
SLOW_STEPS = """
from twellctl.decoding.torch_decoder import TorchDecoder

def slow(*inputs, run=TorchDecoder.run, **how):
    time.sleep(0.1)
    return run(*inputs, **how)

TorchDecoder.run = slow
"""


@contextlib.contextmanager
def warm_process(folder: Path) -> Iterator[str]:
    """Runs warm.py; the path in `folder` of the socket at which it answers."""
    path = str(folder / "warm")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, Path(__file__).with_name("warm.py"), str(listener.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    yield path
    process.communicate()


@contextlib.contextmanager
def warm_answers() -> Iterator[Callable[[Sequence], Any]]:
    """`ask(words)`: what a fork of that process answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["TWELL_TEST_WARM"])
        socket.send_fds(connection, [b"."], [2])  # where it tells what fails
        with connection.makefile("rw") as lines:

            def ask(words: Sequence) -> Any:
                print(json.dumps(words), file=lines, flush=True)
                return json.loads(lines.readline())

            yield ask


class Started:
    """`twellctl WORDS` behind some `code`, forked by warm.py: as a `subprocess.Popen` of it.

    With a `terminal`, the path of one, that is all its streams.
    """

    def __init__(
        self,
        warm: Callable,
        folder: Path,
        words: list[str],
        code: str,
        terminal: str | None,
        environment: dict[str, str],
    ):
        self._warm, self.returncode = warm, None
        streams = [terminal] * 3 if terminal else ["/dev/null", *_pipes(folder)]
        self.pid = warm("begin", words, code, environment, streams)
        if not terminal:
            self.stdout, self.stderr = (
                os.fdopen(os.open(path, os.O_RDONLY)) for path in streams[1:]
            )

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        if self.returncode is None:
            self.returncode = self._warm("end", self.pid, seconds)
        assert self.returncode is not None, f"it does not end within {seconds} s"
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """What is left of stdout and stderr, once it has ended."""
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait()
        return out, err

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait()


def _pipes(folder: Path) -> list[str]:
    folder.mkdir()
    paths = [str(folder / name) for name in ("stdout", "stderr")]
    for path in paths:
        os.mkfifo(path)
    return paths


def found_without_twellctl(code: str, folders: Iterable[Path], home: Path) -> dict:
    """What `code` saves to `out` about `folders`, in a process that imports neither twellctl nor
    compressed-tensors; `home` is for its caches."""
    import torch

    out = home / "results.pt"
    names = {"out": str(out), "folders": list(map(str, folders))}
    hidden = ["twellctl", "compressed_tensors"]
    with warm_answers() as ask:
        ask(["run_without", f"import sys\n{code}", hidden, str(home / "modules"), names])
    return torch.load(out)
