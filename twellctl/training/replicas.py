"""Replicas of a model in several processes: their gradients become the means over all of them.

A large gradient is sent as soon as the backward pass has it, while the pass goes on below it; the
small ones are sent together at the end.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

from twellctl.training.processes import SMALL, average, begin_average


class Replicas:
    """This process's part in averaging the gradients of `model`, which all have alike."""

    def __init__(self, model: nn.Module):
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._sends, self._sent = False, []
        for p in self._trained:
            if p.numel() >= SMALL:
                p.register_post_accumulate_grad_hook(self._send)

    @contextlib.contextmanager
    def sending(self, sends: bool) -> Iterator[None]:
        """`sends`: the backward pass in the block completes the gradients of a step."""
        self._sends = sends
        try:
            yield
            for end in self._sent:
                end()
        finally:
            self._sends = False
            self._sent.clear()

    def average_rest(self, large_sent: bool) -> None:
        """At the end of a step: the small gradients, and the large ones unless they were sent."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        average([g for g in gradients if g.numel() < SMALL or not large_sent])

    def _send(self, parameter: nn.Parameter) -> None:
        if self._sends:
            self._sent.append(begin_average(parameter.grad))
