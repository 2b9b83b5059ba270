"""Layers that are fitted lie in the run folder: a run that was killed goes on behind them."""

from pathlib import Path

import torch
from safetensors import safe_open

from twellctl.errors import TwellError, reason
from twellctl.fitting.ffn import GatedFfn
from twellctl.here.processes import is_one_of_several
from twellctl.models.shard_writer import save_tensors


class KeptLayers:
    """In `folder`, a file a layer, weights in the `dtype` in which they will be stored."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.folder, self.dtype = folder, dtype

    def get(self, index: int, device: torch.device) -> tuple[GatedFfn, float] | None:
        """(FFN in float32, share that fires) of a layer; None if it is not there."""
        if not self._path(index).is_file():
            return None
        with safe_open(self._path(index), "pt", str(device)) as file:
            fired = float(file.metadata()["fired"])
            weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        return GatedFfn(**weights), fired

    def put(self, index: int, ffn: GatedFfn, fired: float) -> None:
        """Keep a layer, whole or not at all; of several processes the first one does."""
        if not is_one_of_several() or torch.distributed.get_rank() == 0:
            part = self._path(index).with_suffix(".part")
            try:
                save_tensors(self.stored(ffn), part, fired=repr(fired))
                part.rename(self._path(index))
            except OSError as error:
                raise TwellError(
                    f"{self.folder} could not be written: {reason(error)}; the same call "
                    "continues after the layers that it holds"
                ) from error

    def stored(self, ffn: GatedFfn) -> dict[str, torch.Tensor]:
        """The weights as they are stored, by name, on the CPU."""
        given = {name: weight for name, weight in vars(ffn).items() if weight is not None}
        return {n: w.detach().to(self.dtype).contiguous().cpu() for n, w in given.items()}

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:03}.safetensors"
