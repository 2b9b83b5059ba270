"""Other Python processes: one that answers jobs a line each, and one that has no twellctl."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

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
def answering(script: str) -> Iterator[Callable[[list], Any]]:
    """What asks a script of this folder, which reads and writes a line of JSON for each job."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(words: list) -> Any:
        print(json.dumps(words), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    yield ask
    server.stdin.close()
    server.wait()
    server.stdout.close()


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
