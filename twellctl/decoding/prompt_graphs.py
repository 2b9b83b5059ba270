"""Short prompts, one at a time, as CUDA graphs.

A device is through with some hundred tokens long before the host has started all of their kernels.
So a prompt is filled up to one of few sizes, and the second pass of a size is captured. All passes
of a prompt are filled up alike, captured or not: its bits do not depend on what was read before.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from twellctl.decoding.capture import captured
from twellctl.decoding.pages import pages_for
from twellctl.decoding.prompts import PromptInputs, Prompts

logger = logging.getLogger(__name__)
SIZES = (64, 256, 512)  # tokens
WIDTHS = (16, 64)  # pages


class PromptGraphs:
    """Passes of prompts by `run`. `captures`: whether a graph can hold them."""

    def __init__(
        self,
        run: Callable[[Prompts], tuple[Tensor, Tensor]],
        device: torch.device,
        *,
        captures: bool,
    ):
        self._run, self._device = run, device
        self._captures = captures and device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None
        self._known: dict[tuple[int, int], _Sized] = {}

    def run(
        self, sizes: tuple[int, int], tokens: Tensor, positions: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder.run`, of inputs on the host, which are filled up to `sizes`."""
        if (known := self._known.get(sizes)) is None:
            known = self._known[sizes] = _Sized(PromptInputs(*sizes, self._device))
        is_token = positions[0] >= 0
        known.inputs.load(tokens[0, is_token], positions[0, is_token], tables[0, : sizes[1]])
        if known.graph is not None:
            known.graph.replay()
            logits, fired = known.found
            return logits.clone(), fired.clone()
        found = self._run(known.inputs.prompts)
        if known.was_run and self._captures:
            self._capture(known)
        known.was_run = True
        return found

    def _capture(self, known: "_Sized") -> None:
        def run() -> None:
            known.found = self._run(known.inputs.prompts)

        if torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device):
            return  # where nothing can be captured
        try:
            known.graph = captured(run, self._memory, self._device)
        except Exception as error:
            self._captures = False
            said = " ".join(str(error).split())[:200]
            logger.warning("prompts are read slowly: no CUDA graph could be captured: %s", said)


class _Sized:
    """Of one size: its graph, if there is one, and where that leaves logits and what fired."""

    def __init__(self, inputs: PromptInputs):
        self.inputs, self.was_run = inputs, False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.found: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))


def sizes_of(positions: Tensor, last: int) -> tuple[int, int] | None:
    """Tokens and pages that a prompt is filled up to; None of several prompts, of longer ones, and
    where other tokens than one get logits. `positions` `[B, Q]` on the host."""
    if not len(positions) == last == 1:
        return None
    num, pages = int((positions >= 0).sum()), pages_for(int(positions[0, -1]) + 1)
    size = next((size for size in SIZES if size >= num), None)
    width = next((width for width in WIDTHS if width >= pages), None)
    return None if size is None or width is None else (size, width)
