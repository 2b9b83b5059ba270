"""Layers that a walk is done with lie in the run folder: a run that was killed goes on after them.

A file a layer holds tensors by their names in the layer, and figures of it. The run's record has
its digest: what is not there, or is no longer what was put there, was not kept.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from twellctl.errors import TwellError, reason
from twellctl.files.made_of import Record
from twellctl.fitting.method import Change
from twellctl.fitting.source import layer_file, num_kept
from twellctl.here.processes import is_one_of_several
from twellctl.models.shard_writer import save_tensors


class KeptLayers:
    """Those in `folder`, the first `count`. That they are whole `Record.leave` has seen."""

    def __init__(self, folder: Path):
        self.folder, self._record = folder, Record.read(folder)

    @property
    def count(self) -> int:
        return num_kept(self._record)

    def get(self, index: int) -> Change | None:
        """What became of a layer, on the CPU; None if it is not there."""
        if index >= self.count:
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
            self._record.keep(layer_file(index))
        except OSError as error:
            raise TwellError(
                f"{self.folder} could not be written: {reason(error)}; the same call "
                "continues after the layers that it holds"
            ) from error

    def _path(self, index: int) -> Path:
        return self.folder / layer_file(index)
