"""The Trainer of a run whose weights are sharded over its processes.

In a step it also averages gradients over processes: most as FSDP2 goes through the backward pass,
those of the gates' shifts, which each process has in full, at its end.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from twellctl.errors import TwellError
from twellctl.here.processes import average, in_all
from twellctl.training.sharded_checkpoints import CheckpointWriter, is_sharded_checkpoint
from twellctl.training.trainer import SCHEDULER_FILE, SparseTrainer, full_disk_as_oserror


class ShardedTrainer(SparseTrainer):
    """A `SparseTrainer` whose `model` and teacher `load_sharded` has loaded."""

    is_sharded = True

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._writer = CheckpointWriter()
        self._unfinished: tuple[Path, dict[str, Any]] | None = None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is there."""

    def _average_gradients(self, large_sent: bool) -> None:
        """Of what all processes have; FSDP2 has averaged the others."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        average([g for g in gradients if not isinstance(g, DTensor)])

    def _counts(self, parameter: nn.Parameter) -> bool:
        """What all processes have is counted once."""
        return isinstance(parameter, DTensor) or dist.get_rank() == 0

    def _my_held_out(self):
        """As many blocks in all processes, which gather weights together: some twice, at the end.

        Those do not count.
        """
        world, rank, count = dist.get_world_size(), dist.get_rank(), len(self.eval_dataset)
        for first in range(0, count, world):
            index = min(first + rank, count - 1)
            ids = self.eval_dataset[index]["input_ids"][None].to(self.args.device)
            yield ids, first + rank < count

    def finish_step(self, interrupted: bool) -> bool:
        stop = super().finish_step(interrupted)
        self._complete_checkpoint(wait=False)
        return stop

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().train(*args, **kwargs)
        except TwellError:  # which all processes have raised
            self._complete_checkpoint(wait=True)
            raise
        self._complete_checkpoint(wait=True)
        return result

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begin to write it; `_complete_checkpoint` makes it count."""
        self._complete_checkpoint(wait=True)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        in_all(lambda: self._write_small_state(folder))
        self._unfinished = folder, self.sparsity_state()
        self._writer.begin(folder, self.model, self.muon)

    def _write_small_state(self, folder: Path) -> None:
        if self.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            with full_disk_as_oserror():
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_FILE)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def checkpoint_saved(self) -> None:
        """Not yet: it is being written."""

    def _complete_checkpoint(self, wait: bool) -> None:
        """Once the checkpoint that was begun is written it counts."""
        if self._writer.ended(wait) and self._unfinished is not None:
            folder, state = self._unfinished

            def complete() -> None:
                if self.is_world_process_zero():
                    self.complete(folder, state)

            in_all(complete)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_sharded_checkpoint(Path(checkpoint)):
            raise TwellError(
                f"{checkpoint} is of a run that was not sharded: --resume it with --shard never"
            )
        super()._load_from_checkpoint(checkpoint, model)
