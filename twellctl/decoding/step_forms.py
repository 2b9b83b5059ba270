"""Which form a decoder's step takes: each is measured on the rows at hand, the fastest is kept.

A step may be run again on the same rows: it writes the same keys and values to the same places.
Each form is a CUDA graph here, as it is in the engine, so that the host's time does not count.
"""

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from twellctl.bundle.twell_route import density_bucket, kept_or_measured, timed_ms

logger = logging.getLogger(__name__)
Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # as of KernelDecoder.forms
_WARM_UPS, _TURNS = 2, 7


class FormChoice:
    """Chooses forms of one decoder's steps, by the rows and the width of their tables.

    `model_key` names the model and the kernels; each of its FFNs has `neurons`. `density` is the
    share of them that fires by a profile, None: it is counted.
    """

    def __init__(self, device: torch.device, model_key: str, neurons: int, density: float | None):
        self._device, self._model_key = device, model_key
        self._neurons, self._density = neurons, density
        self._chosen: dict[tuple[int, int], tuple[str, Form]] = {}

    def __call__(
        self, forms: Callable[[], Mapping[str, Form]], *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A step by the fastest of `forms()`; where nothing can be measured yet by the first.

        `forms` is only called until a choice is made.
        """
        B, W = inputs[-1].shape
        if (B, W) not in self._chosen:
            possible = forms()
            if not can_measure(self._device):
                return next(iter(possible.values()))(*inputs)
            runs = {name: partial(form, *inputs) for name, form in possible.items()}
            name = self._fastest(runs, B, W)
            self._chosen[B, W] = name, possible[name]
        _, form = self._chosen[B, W]
        return form(*inputs)

    def chosen(self, rows: int) -> str | None:
        """The form last chosen for `rows` rows, or the next number above; None: for neither."""
        taken = min((size for size, _ in self._chosen if size >= rows), default=None)
        names = [name for (size, _), (name, _) in self._chosen.items() if size == taken]
        return names[-1] if names else None

    def _fastest(
        self, runs: Mapping[str, Callable[[], tuple[Tensor, Tensor]]], B: int, W: int
    ) -> str:
        """As kept, else as measured; the first of those that are as fast."""

        why = "as measured before"

        def measure() -> dict[str, float]:
            nonlocal why
            times = graph_ms(runs)
            why = "ms: " + ", ".join(f"{name} {time:.3f}" for name, time in times.items())
            return {f"graph {name}": time for name, time in times.items()}

        if len(runs) == 1:
            return next(iter(runs))
        density = self._density
        if density is None:
            _, counts = next(iter(runs.values()))()
            density = counts.float().mean().item() / self._neurons
        key = (
            f"step {torch.cuda.get_device_name(self._device)} {self._model_key} B={B} W={W} "
            f"density={density_bucket(density)} of {', '.join(runs)}"
        )
        name = kept_or_measured(key, list(runs), ("graph",), measure)["graph"]
        said = "steps of %d rows, tables of %d pages: %s is the fastest, %s"
        logger.info(said, B, W, name, why)
        return name


def can_measure(device: torch.device) -> bool:
    """Whether times can be taken now: on a GPU, and not in the midst of a capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def graph_ms(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each as a CUDA graph, replayed by turns: medians.

    What does not fit into memory takes for ever; the error is raised if that goes for all of them.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, error = {}, None
    for name, run in runs.items():
        try:
            graphs[name] = _captured(run, pool, stream)
        except torch.OutOfMemoryError as too_large:
            error = too_large.with_traceback(None)  # which would hold tensors
    if error is not None and not graphs:
        raise error
    turns = [
        {name: timed_ms(graph.replay, ahead=True) for name, graph in graphs.items()}
        for _ in range(_WARM_UPS + _TURNS)
    ]
    found = {name: [turn[name] for turn in turns[_WARM_UPS:]] for name in graphs}
    return {name: round(statistics.median(found.get(name, [math.inf])), 5) for name in runs}


def _captured(
    run: Callable[[], object], pool: object, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    run()  # loads what it needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
        run()
    return graph
