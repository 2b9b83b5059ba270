"""Prompts, one at a time and in chunks, as CUDA graphs.

A device is through with a thousand tokens before the host has started all of their kernels. So a
chunk is filled up to one of few sizes, and the second pass of a size is captured. All passes are
filled up alike, captured or not: a prompt's bits do not depend on what was read before.

Beyond 512 tokens a large model keeps its device as busy as the host, and what fills up costs time:
sizes lie close there. Of a wider table than is needed more pages are copied, which is little beside
the rest; attention reads no more keys. Behind 8,192 positions attention keeps the device as busy
as the host: nothing is filled up there.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from twellctl.decoding.capture import captured
from twellctl.decoding.pages import pages_for
from twellctl.decoding.prompts import PromptInputs, Prompts
from twellctl.decoding.torch_decoder import PREFILL_CHUNK

logger = logging.getLogger(__name__)
SIZES = (64, 256, *range(512, PREFILL_CHUNK + 1, 128))  # tokens
WIDTHS = (16, 64, 128)  # pages


class Sizes(NamedTuple):
    """Tokens and pages that a prompt is filled up to; `last` of the tokens, 0 or 1, get logits."""

    tokens: int
    pages: int
    last: int


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
        self._known: dict[Sizes, _Sized] = {}

    def run(
        self, sizes: Sizes, tokens: Tensor, positions: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder.run`, of inputs on the host, which are filled up to `sizes`."""
        if (known := self._known.get(sizes)) is None:
            known = self._known[sizes] = _Sized(PromptInputs(*sizes, self._device))
        is_token = positions[0] >= 0
        known.inputs.load(tokens[0, is_token], positions[0, is_token], tables[0, : sizes.pages])
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


def sizes_of(positions: Tensor, last: int) -> Sizes | None:
    """What a prompt is filled up to; None of several prompts, of longer ones, and where several
    tokens get logits. `positions` `[B, Q]` on the host."""
    if len(positions) > 1 or last > 1:
        return None
    num, pages = int((positions >= 0).sum()), pages_for(int(positions[0, -1]) + 1)
    size = next((size for size in SIZES if size >= num), None)
    width = next((width for width in WIDTHS if width >= pages), None)
    return None if size is None or width is None else Sizes(size, width, last)
