"""The Trainer of a run whose weights are sharded over its processes.

What it does in a step beside `SparseTrainer`: gradients are summed up over processes as FSDP2 goes
through the backward pass, those of the gates' shifts, of which each process has all, at its end.
One small reduction then tells every process the norm of each gradient.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from twellctl.errors import TwellError
from twellctl.training.priced_gates import PricedGate
from twellctl.training.processes import in_all
from twellctl.training.sharded_checkpoints import CheckpointWriter, is_sharded_checkpoint
from twellctl.training.sharding import local
from twellctl.training.trainer import SCHEDULER_FILE, SparseTrainer, full_disk_told


class ShardedTrainer(SparseTrainer):
    """A `SparseTrainer` whose `model` and teacher `load_sharded` has loaded."""

    is_sharded = True

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # it is sharded already: nothing is to be wrapped around it
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(prepare, evaluation_mode=True)
        self._writer = CheckpointWriter()
        self._unfinished: tuple[Path, dict[str, Any]] | None = None
        self._norm: Tensor | None = None
        self._counted: Tensor | None = None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is there."""

    def _check_gradients(self) -> tuple[list[str], Tensor]:
        """As `SparseTrainer`'s, by their norms, which `_clip_grad_norm` uses too."""
        named = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        _average([g for g in named.values() if not isinstance(g, DTensor)])
        norms = torch._foreach_norm([local(g) for g in named.values()], 2, torch.float32)
        if self._counted is None:  # what all processes have is counted once
            counted = [isinstance(g, DTensor) or dist.get_rank() == 0 for g in named.values()]
            self._counted = torch.tensor(counted, device=norms[0].device)
        squares = torch.stack(norms).square().where(self._counted, 0)
        dist.all_reduce(squares)
        self._norm = squares.sum().sqrt()
        bad = ~squares.isfinite()
        numbers = torch.arange(len(bad), dtype=torch.float32, device=bad.device)
        return list(named), torch.where(bad, numbers, -1.0).amax().view(1)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        factor = (self.args.max_grad_norm / (self._norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
        return self._norm

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
            with full_disk_told():
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_FILE)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def checkpoint_saved(self) -> None:
        """Not yet: it is being written."""

    def _complete_checkpoint(self, wait: bool) -> None:
        """Once the checkpoint that was begun is written it counts."""
        if self._writer.ended(wait):
            folder, state = self._unfinished
            in_all(lambda: self.is_world_process_zero() and self.complete(folder, state))

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_sharded_checkpoint(Path(checkpoint)):
            raise TwellError(
                f"{checkpoint} is of a run that was not sharded: --resume it with --shard never"
            )
        super()._load_from_checkpoint(checkpoint, model)


def share_directions(gates: Sequence[PricedGate]) -> None:
    """Give all processes the directions that the first one has found."""
    for gate in gates:
        dist.broadcast(gate.direction, 0)


def _average(gradients: list[Tensor]) -> None:
    """Over all processes, in one reduction."""
    if gradients:
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        means = torch._utils._unflatten_dense_tensors(flat / dist.get_world_size(), gradients)
        torch._foreach_copy_(gradients, list(means))
