"""W_down a second time, by rows of K, for steps of the sparse engine that go densely.

Over what fires W_down is read by rows of neurons. Dense products are faster over an nn.Linear's
layout, so it is there in both where that takes little memory, and as long as such steps are taken.
Large models go without: where W_down has 5120 columns and more, the layout makes no difference.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twellctl.bundle.twell_weights import FFN
from twellctl.models.loading import gpu_memory

logger = logging.getLogger(__name__)
_SHARE = 0.05  # of all memory of the GPU, at most
_FREE_SHARE = 0.5  # of what is free


class DownCopies:
    """The FFNs of all layers with `w_down` `[K, N]`, contiguous; made when one is first asked for.

    `ffns` are those by rows of neurons. `downs`: the copies, if the model has them: they stay.
    """

    def __init__(self, ffns: Sequence[FFN], device: torch.device, downs: Sequence[Tensor] = ()):
        self._ffns, self._device, self._stay = ffns, device, bool(downs)
        self._made = [replace(ffn, w_down=down) for ffn, down in zip(ffns, downs, strict=False)]
        self._has_told = False

    def fit(self) -> bool:
        """Whether they are there or there is room now; why there is not is logged, once."""
        if self._made or (why := self._why_not()) is None:
            return True
        if not self._has_told:
            logger.info("dense steps read W_down by rows of neurons: %s", why)
        self._has_told = True
        return False

    def __getitem__(self, layer: int) -> FFN:
        if not self._made:
            self._made = [replace(ffn, w_down=ffn.w_down.t().contiguous()) for ffn in self._ffns]
        return self._made[layer]

    def drop(self) -> None:
        """Free them, until one is asked for again; not those of the model."""
        if not self._stay:
            self._made = []

    def _why_not(self) -> str | None:
        size = sum(ffn.w_down.nbytes for ffn in self._ffns)
        free, total = gpu_memory(self._device)
        if size > _SHARE * total:
            most = f"more than {_SHARE:.0%} of the GPU's {total / 1e9:.1f} GB"
            return f"a second copy of all W_down takes {size / 1e9:.1f} GB, {most}"
        if size > _FREE_SHARE * free:
            most = f"more than {_FREE_SHARE:.0%} of the {free / 1e9:.1f} GB that are free"
            return f"a second copy of all W_down takes {size / 1e9:.1f} GB, {most}"
        return None
