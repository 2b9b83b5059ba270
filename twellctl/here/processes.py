"""What the processes of a run do together, so that all of them go on or all of them end."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from twellctl.errors import TwellError


def in_the_first(world: PartialState, prepare: Callable[[], Any]) -> Any:
    """Call `prepare` in the first process while the others wait; what it raises, all raise.

    What it returns only the first process gets.
    """
    return in_all(lambda: prepare() if world.is_main_process else None)


def in_all(run: Callable[[], Any]) -> Any:
    """Call `run` in all processes; what one of them raises, all raise: that of the first such.

    `run` may not wait for other processes. What it returns is its own.
    """
    if not is_one_of_several():
        return run()
    made, failure = None, None
    try:
        made = run()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        failure = error
    failures = [error for error in from_all(failure) if error is not None]
    if failures:
        raise failures[0]
    return made


def from_all(value: Any) -> list[Any]:
    """The `value` of each process."""
    if not is_one_of_several():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same(what: dict[str, Any], remedy: str) -> None:
    """`TwellError`, in all processes, if one has other values than the first has."""
    first, *others = from_all(what)
    for rank, theirs in enumerate(others, 1):
        different = [key for key in theirs | first if theirs.get(key) != first.get(key)]
        if different:
            raise TwellError(f"process {rank} has another {different[0]} than the first: {remedy}")


def sum_over_processes(*tensors: Tensor) -> None:
    """Make each of `tensors` its sum over all processes."""
    if is_one_of_several():
        for tensor in tensors:
            dist.all_reduce(tensor)


def same_in_all(tensor: Tensor) -> Tensor:
    """`tensor` as the first process has it, to the last bit, by rows."""
    tensor = tensor.contiguous()  # GPUs send nothing else
    if is_one_of_several():
        dist.broadcast(tensor, 0)
    return tensor


def average(tensors: Sequence[Tensor]) -> None:
    """Make each of the `tensors` its mean over all processes, all small ones sent as one."""
    if tensors and is_one_of_several():
        together = torch._utils._flatten_dense_tensors(tensors)
        begin_average(together)()
        means = torch._utils._unflatten_dense_tensors(together, tensors)
        torch._foreach_copy_(list(tensors), list(means))


def begin_average(tensor: Tensor, owner: int | None = None) -> Callable[[], None]:
    """Begin to make `tensor` its mean over all processes; what is returned ends it.

    With an `owner`, that process alone gets the mean, and what the others have is of no use any
    more.
    """
    dense = dense_of(tensor)
    how = dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM  # gloo has no mean
    if owner is None:
        sent = dist.all_reduce(dense, how, async_op=True)
    else:
        sent = dist.reduce(dense, owner, how, async_op=True)

    def end() -> None:
        sent.wait()
        if not tensor.is_cuda:
            dense.div_(dist.get_world_size())

    return end


def dense_of(matrix: Tensor) -> Tensor:
    """`matrix`, or its transpose where it lies by columns: processes send what is contiguous."""
    return matrix if matrix.is_contiguous() else matrix.mT


def is_lost_process(error: BaseException) -> bool:
    """Whether it says that another process does not answer any more."""
    said = str(error)
    closed = "Connection closed by peer" in said or "Connection reset by peer" in said
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and closed)


def is_first_to_report() -> bool:
    """Whether no other process has said yet why the run ends; the launcher knows."""
    try:
        return dist.distributed_c10d._get_default_store().add("twellctl_reported", 1) == 1
    except (RuntimeError, ValueError):  # the launcher is gone, or there was none
        return True


@contextlib.contextmanager
def reported_once() -> Iterator[None]:
    """If the block fails, this process reports it: those that wait for it say nothing more."""
    try:
        yield
    except Exception:
        is_first_to_report()
        raise


def num_processes() -> int:
    """How many processes a launcher has started for this run; 1 without one."""
    return dist.get_world_size() if is_one_of_several() else 1


def is_one_of_several() -> bool:
    """Whether a launcher has started other processes of this run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
