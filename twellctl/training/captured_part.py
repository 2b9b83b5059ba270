"""Forward and backward of one micro-batch as a CUDA graph, replayed for every other of its size.

A layer of a small model keeps a GPU busy for some ten microseconds; Python takes longer to ask for
it. A graph asks for all layers at once. What is recorded is what the step does anyway, so losses
and gradients are the same. Whatever changes from step to step must lie in tensors: the ids, the
penalty's settings, the weights. Gradients are added up in tensors that stay where they are.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from twellctl.here.captures import without_collection


class CapturedPart:
    """`run(ids)` recorded, for ids `[B, L]` of one shape, one of `num_parts` parts of a step.

    `run` returns tensors and adds gradients to those of `parameters` that have one by now: it has
    run at least once, so that all is compiled and loaded. Recording computes nothing. Raises
    `RuntimeError` where something in `run` cannot be recorded, or the memory does not suffice.
    """

    def __init__(
        self,
        run: Callable[[Tensor], tuple[Tensor, ...]],
        ids: Tensor,
        num_parts: int,
        parameters: Iterable[nn.Parameter],
    ):
        self._ids, self._num_parts = ids.clone(), num_parts
        self._trained = [p for p in parameters if p.grad is not None]
        self._gradients = [p.grad for p in self._trained]
        self._graph = torch.cuda.CUDAGraph()
        how = {"capture_error_mode": "thread_local"}
        with without_collection(), torch.cuda.graph(self._graph, **how):
            self._found = run(self._ids)

    def takes(self, ids: Tensor, num_parts: int) -> bool:
        """Whether it is such a part that was recorded."""
        return ids.shape == self._ids.shape and num_parts == self._num_parts

    def __call__(self, ids: Tensor) -> tuple[Tensor, ...]:
        """What `run(ids)` would return; its gradients are added to the parameters'."""
        if self._trained[0].grad is None:  # a step begins: then our gradients begin at zero
            torch._foreach_zero_(self._gradients)
            for parameter, gradient in zip(self._trained, self._gradients, strict=True):
                parameter.grad = gradient
        self._ids.copy_(ids)
        self._graph.replay()
        return tuple(found.clone() for found in self._found)
