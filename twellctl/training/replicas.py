"""Replicas of a model in several processes: their gradients become the means over all of them.

A large gradient is sent while the backward pass that completes it goes on below it; the small ones
are sent together at the end. Large ones go in one order, from the last parameter to the first: the
passes of two processes may complete them in different orders, but what they send must be alike.
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from twellctl.training.processes import SMALL, average, begin_average


class Replicas:
    """This process's part in averaging the gradients of `model`, which all have alike."""

    def __init__(self, model: nn.Module):
        trained = [p for p in model.parameters() if p.requires_grad]
        self._small = [p for p in trained if p.numel() < SMALL]
        self._large = [p for p in reversed(trained) if p.numel() >= SMALL]
        self._sends, self._complete = False, set()
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
        rest = [*([] if large_sent else self._large), *self._small]
        average([p.grad for p in rest if p.grad is not None])

    def _note(self, parameter: nn.Parameter) -> None:
        if self._sends:
            self._complete.add(parameter)
            self._send(self._complete.__contains__)

    def _send(self, is_complete: Callable[[nn.Parameter], bool]) -> None:
        """The next of the large ones, up to the first that is not complete."""
        for parameter in self._large[len(self._sent) :]:
            if not is_complete(parameter):
                return
            has_one = parameter.grad is not None
            self._sent.append(begin_average(parameter.grad) if has_one else lambda: None)
