"""How many of each layer's neurons fired for the last token of each row: hooks, no host read."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_format import fires
from twellctl.bundle.twell_model import activation_name, gated_ffns


class FiredCounts:
    """Hooks on the activations of a model's gated FFNs, which look at forwards in `counted` only.

    Where a layer has several FFNs (experts) none is metered. One that runs over TwELL's kernels
    never shows its activation: the gates of the last tokens are computed a second time.
    `neurons`: how many each layer has, known from the first forward on.
    """

    def __init__(self, model: nn.Module, num_hidden_layers: int):
        ffns = gated_ffns(model)
        if len(ffns) > num_hidden_layers:
            ffns = []
        self.neurons = [1] * len(ffns)
        self._num_rows = 0  # of the forward that is made now; 0: it is not ours
        self._counts: list[Tensor | None] = [None] * len(ffns)
        for i, ffn in enumerate(ffns):
            if getattr(ffn, "twell_sources", ""):
                ffn.register_forward_pre_hook(self._hook_before(i))
            else:
                getattr(ffn, activation_name(ffn)).register_forward_hook(self._hook(i))

    @contextlib.contextmanager
    def counted(self, num_rows: int) -> Iterator[None]:
        """A forward of so many rows is made inside."""
        self._num_rows = num_rows
        try:
            yield
        finally:
            self._num_rows = 0

    def of_last_tokens(self, num_rows: int, device: torch.device) -> Tensor:
        """int32 `[L, num_rows]`, of the forward counted last."""
        if not self._counts:
            return torch.empty((0, num_rows), dtype=torch.int32, device=device)
        return torch.stack(self._counts)

    def _count(self, i: int, fired: Tensor) -> None:
        self._counts[i] = fired.sum(-1, dtype=torch.int32)
        self.neurons[i] = fired.shape[-1]

    def _hook(self, i: int) -> Callable:
        def hook(module: nn.Module, inputs: tuple[Tensor], active: Tensor) -> None:
            if self._num_rows:
                last = active.reshape(self._num_rows, -1, active.shape[-1])[:, -1]
                self._count(i, last != 0)

        return hook

    def _hook_before(self, i: int) -> Callable:
        def hook(ffn: nn.Module, inputs: tuple[Tensor]) -> None:
            if self._num_rows:
                x = inputs[0].reshape(self._num_rows, -1, inputs[0].shape[-1])[:, -1]
                fused = hasattr(ffn, "gate_up_proj")
                gate = ffn.gate_up_proj(x).chunk(2, -1)[0] if fused else ffn.gate_proj(x)
                threshold = getattr(ffn, activation_name(ffn)).threshold
                self._count(i, fires(gate, threshold))

        return hook
