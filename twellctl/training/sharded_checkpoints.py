"""Checkpoints of sharded runs, by PyTorch's distributed checkpointing.

Each process writes the rows that it holds, during the next steps; any number of processes reads
them again, each the rows that it holds then.
"""

import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from twellctl.errors import TwellError, bounded, first_line
from twellctl.here.processes import is_lost_process, is_one_of_several
from twellctl.training.optimizer import Muon

FOLDER = "sharded"  # in a checkpoint


class CheckpointWriter:
    """Writes one checkpoint at a time. All processes make it and call it together."""

    def __init__(self):
        self._group = dist.new_group(backend="gloo")  # the run's own is busy with its steps
        self._polls = dist.new_group(backend="gloo")  # and this one with the writing, by a thread
        self._writing: Future | None = None

    def begin(self, checkpoint: Path, model: nn.Module, optimizer: Muon) -> None:
        """Copy what is to be written, and begin to write it."""
        state, where = training_state(model, optimizer), checkpoint / FOLDER
        self._writing = dcp.async_save(state, checkpoint_id=str(where), process_group=self._group)

    def ended(self, wait: bool) -> bool:
        """Whether what was begun has ended in all processes; `OSError` if it failed in one."""
        if self._writing is None:
            return False
        if not wait:
            done = torch.tensor([float(self._writing.done())])
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._polls)
            if not done.item():
                return False
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (Exception, CheckpointException) as error:
            if is_lost_process(error):
                raise
            raise OSError(
                f"a checkpoint was not written, is there room left? {_why(error)}"
            ) from error
        return True


def training_state(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    """All tensors that training changes, by a name that no sharding changes."""
    names = {p: name for name, p in model.named_parameters()}
    state = {f"weight.{name}": p for p, name in names.items()}
    for p, kept in optimizer.state.items():
        state |= {f"{key}.{names[p]}": value for key, value in kept.items()}
    return state


def is_sharded_checkpoint(checkpoint: Path) -> bool:
    """Whether a sharded run wrote it."""
    return (checkpoint / FOLDER).is_dir()


@torch.no_grad()
def read_training_state(checkpoint: Path, model: nn.Module, optimizer: Muon) -> None:
    """Put what a sharded run wrote into a model and its optimizer, sharded or not.

    `TwellError` for what is broken, or of another model.
    """
    optimizer.allocate()
    state = {name: tensor.detach() for name, tensor in training_state(model, optimizer).items()}
    where, alone = str(checkpoint / FOLDER), not is_one_of_several()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of one process, that it is one
            dcp.load(state, checkpoint_id=where, no_dist=alone)
    except (Exception, CheckpointException) as error:
        if is_lost_process(error):
            raise
        raise TwellError(
            f"{checkpoint} cannot be read ({bounded(_why(error), 300)}): remove it, and --resume "
            "from another, or start again with --overwrite"
        ) from error


def _why(error: BaseException) -> str:
    """The reason of the first process that has one."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else [(error,)]
    return first_line(next(iter(failures))[0])
