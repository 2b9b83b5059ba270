"""One pass over windows of text, which `profile` and `eval` share: what fires is counted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.errors import TwellError, UsageError
from twellctl.firing.counts import FiredMeter, LayerCount
from twellctl.firing.grouping import GroupedWindows
from twellctl.models.checkpoint import Checkpoint
from twellctl.version import __version__

BATCH_TOKENS = 8192
Read = Callable[[Tensor, Tensor], object]


@torch.inference_mode()
def count_windows(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    text: GroupedWindows,
    read: Read,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LayerCount]:
    """What fires in each layer of `model`, the one of `checkpoint`, in all windows of `text`.

    `read(ids, groups)`, both int64 `[B, S]` on the model's device, runs the model on some windows,
    once. `progress(done, total)` receives windows. `TwellError` if a gate is not finite.
    """
    tile, size, device = checkpoint.twell["tile"], checkpoint.own_neurons, model.device
    layers = range(checkpoint.ffn.num_layers)
    counts = [LayerCount(size, tile, device, text.num_groups) for _ in layers]

    def look(layer: int, hidden: Tensor) -> None:
        counts[layer].look(hidden)

    batch_size, done = max(1, BATCH_TOKENS // text.ids.shape[1]), 0
    for ids, groups in zip(text.ids.split(batch_size), text.groups.split(batch_size), strict=True):
        ids, groups = ids.to(device), groups.to(device)
        rows = groups.flatten()

        def count(layer: int, gate: Tensor, active: Tensor, rows: Tensor = rows) -> None:
            counts[layer].add(gate, active, rows)

        with FiredMeter(model, count, look):
            read(ids, groups)
        done += len(ids)
        progress(done, len(text.ids))
    _refuse_not_finite(checkpoint, counts)
    return counts


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts that are read at once, of about the same length.

    The longest go first, so that memory runs out at once or never.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, BATCH_TOKENS // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def window_length(checkpoint: Checkpoint, windows: int, seq_len: int | None, least: int = 1) -> int:
    """`seq_len`, or without one 1024 or the model's context if that is shorter; `UsageError`."""
    context = checkpoint.context or 1024
    if windows < 1:
        raise UsageError(f"windows must be >= 1, got {windows}")
    if seq_len is None:
        return min(1024, context)
    if not least <= seq_len <= context:
        raise UsageError(
            f"seq-len must be {least} to {context}, the context of {checkpoint.name}, got {seq_len}"
        )
    return seq_len


def dtype_for(device: torch.device) -> torch.dtype:
    """In what models are measured: bf16 on CUDA, float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """Where and by what `model` is measured: `dtype`, `device`, `versions`."""
    device = model.device
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {
            "twellctl": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _refuse_not_finite(checkpoint: Checkpoint, counts: list[LayerCount]) -> None:
    """Gates that are not numbers would be counted as firing or not, which says nothing."""
    for number, count in enumerate(counts):
        if rows := count.not_finite:
            raise TwellError(
                f"{checkpoint.name}: gates of layer {number} are NaN or infinite for {rows} tokens:"
                " the model is broken or its dtype too narrow; go back to one that was sound"
            )
