"""Other Python processes: one that answers jobs a line each, and one that has no twellctl."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

# code in front of a command whose answers are to take long
SLOW_STEPS = """
from twellctl.decoding.hf_decoder import HFDecoder
HFDecoder.step = lambda *inputs, step=HFDecoder.step: time.sleep(0.1) or step(*inputs)
"""
_WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("twellctl", "compressed_tensors"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Missing())
out, *folders = sys.argv[1:]
"""


@contextlib.contextmanager
def answering(script: str) -> Iterator[Callable[[Sequence], Any]]:
    """What asks a script of this folder, which reads and writes a line of JSON for each job."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(words: Sequence) -> Any:
        print(json.dumps(words), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    yield ask
    server.stdin.close()
    server.wait()
    server.stdout.close()


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
    caches = {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    subprocess.run(
        [sys.executable, "-I", "-c", _WITHOUT + code, home / "results.pt", *map(str, folders)],
        env=os.environ | caches,
        check=True,
        timeout=300,
    )
    return torch.load(home / "results.pt")
