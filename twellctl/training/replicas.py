"""Replicas of a model in several processes: their gradients become the means over all of them.

Where one process alone steps a matrix (`optimizer`), it alone gets the mean: half of the bytes.

A large gradient is sent while the backward pass that completes it goes on below it; the small ones
are sent together at the end. Large ones go in one order, from the last parameter to the first: the
passes of two processes may complete them in different orders, but what they send must be alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from twellctl.here.processes import average, begin_average

SMALL = 1 << 20  # elements: gradients of fewer are sent together


class Replicas:
    """This process's part in averaging the gradients of `model`, which all have alike.

    `owners`: the processes that step some of its parameters for all.
    """

    def __init__(self, model: nn.Module, owners: Mapping[Tensor, int]):
        trained = [p for p in model.parameters() if p.requires_grad]
        self._small = [p for p in trained if p.numel() < SMALL]
        self._large = [p for p in reversed(trained) if p.numel() >= SMALL]
        self._owners = {p: owners[p] for p in self._large if p in owners}
        self._sends = False
        self._complete: set[nn.Parameter] = set()
        self._sent: list[Callable[[], None]] = []  # of the first of the large ones
        for p in self._large:
            p.register_post_accumulate_grad_hook(self._note)

    @contextlib.contextmanager
    def sending(self, sends: bool) -> Iterator[None]:
        """`sends`: the backward pass in the block completes the gradients of a step."""
        self._sends = sends
        try:
            yield
            if sends:
                self._send(lambda parameter: True)
            for end in self._sent:
                end()
        finally:
            self._sends = False
            self._complete.clear()
            self._sent.clear()

    def average_rest(self, large_sent: bool) -> None:
        """At the end of a step: the small gradients, and the large ones unless they were sent."""
        for end in [] if large_sent else [self._begin(p) for p in self._large]:
            end()
        average([p.grad for p in self._small if p.grad is not None])

    def has_mean(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of `parameter` is the mean in this process, once all is averaged."""
        return self._owners.get(parameter, dist.get_rank()) == dist.get_rank()

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether, of all processes, it is this one that counts that gradient."""
        return self._owners.get(parameter, 0) == dist.get_rank()

    def _note(self, parameter: nn.Parameter) -> None:
        if self._sends:
            self._complete.add(parameter)
            self._send(self._complete.__contains__)

    def _send(self, is_complete: Callable[[nn.Parameter], bool]) -> None:
        """The next of the large ones, up to the first that is not complete."""
        for parameter in self._large[len(self._sent) :]:
            if not is_complete(parameter):
                return
            self._sent.append(self._begin(parameter))

    def _begin(self, parameter: nn.Parameter) -> Callable[[], None]:
        if parameter.grad is None:
            return lambda: None
        return begin_average(parameter.grad, self._owners.get(parameter))
