"""Layers that a walk is done with lie in the run folder: a run that was killed goes on after them.

A file a layer holds tensors by their names in the layer, and figures of it.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from twellctl.errors import TwellError, reason
from twellctl.fitting.method import Change
from twellctl.here.processes import is_one_of_several
from twellctl.models.shard_writer import save_tensors


class KeptLayers:
    """Those in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, index: int) -> Change | None:
        """What became of a layer, on the CPU; None if it is not there."""
        if not self._path(index).is_file():
            return None
        with safe_open(self._path(index), "pt") as file:
            figures = json.loads(file.metadata()["figures"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Change(tensors, figures)

    def put(self, index: int, change: Change) -> None:
        """Keep a layer, whole or not at all; of several processes the first one does."""
        if is_one_of_several() and torch.distributed.get_rank() != 0:
            return
        tensors = {n: t.detach().contiguous().cpu() for n, t in change.tensors.items()}
        part = self._path(index).with_suffix(".part")
        try:
            save_tensors(tensors, part, figures=json.dumps(change.figures))
            part.rename(self._path(index))
        except OSError as error:
            raise TwellError(
                f"{self.folder} could not be written: {reason(error)}; the same call "
                "continues after the layers that it holds"
            ) from error

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:03}.safetensors"
