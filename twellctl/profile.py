"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

Windows at even strides through the text are run through the dense model. All counts are exact.
How dense tokens are by position in their window, and by kind of text, is counted beside.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from twellctl import __version__
from twellctl.errors import TwellError, UsageError
from twellctl.firing.counts import FiredMeter, LayerCount
from twellctl.firing.grouping import grouped_windows
from twellctl.firing.profiled import Profile
from twellctl.models.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.models.loading import default_device, load_model, load_tokenizer

BATCH_TOKENS = 8192


def profile(
    model: str | Path,
    data: str | Path | list[str | Path],
    *,
    text_column: str = "text",
    windows: int = 128,
    seq_len: int | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure the ReLU `model` on `windows` windows of `seq_len` tokens of the text in `data`.

    `data` is a file or folder, or several: each a kind of text by its name, or by NAME=FILE.
    `seq_len` None is 1024, or the model's context where that is shorter. Computes in bf16 on CUDA,
    in float32 on the CPU. `progress(done, total)` is told of windows. Raises `TwellError`.
    """
    checkpoint = open_checkpoint(model)
    checkpoint.require_relu()
    seq_len = _checked_length(checkpoint, windows, seq_len)
    tokenizer = load_tokenizer(checkpoint)
    data = [str(path) for path in ([data] if isinstance(data, str | Path) else data)]
    text = grouped_windows(data, text_column, tokenizer, windows, seq_len)

    device = device or default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_model(checkpoint, dtype=dtype, device=device)
    tile, size = checkpoint.twell["tile"], checkpoint.ffn.intermediate_size
    layers = range(checkpoint.ffn.num_layers)
    counts = [LayerCount(size, tile, device, text.num_groups) for _ in layers]
    batch_size, done = max(1, BATCH_TOKENS // seq_len), 0
    for ids, groups in zip(text.ids.split(batch_size), text.groups.split(batch_size), strict=True):
        _count_batch(loaded, ids.to(device), groups.to(device), counts)
        done += len(ids)
        progress(done, len(text.ids))
    _refuse_not_finite(checkpoint, counts)
    return Profile(
        model=str(model),
        fingerprint=fingerprint(checkpoint),
        data=tuple(data),
        windows=len(text.ids),
        seq_len=seq_len,
        tokens=text.ids.numel(),
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        versions={
            "twellctl": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        intermediate_size=size,
        tile=tile,
        layers=tuple(count.summary() for count in counts),
        by_position=text.by_position(counts),
        by_kind=text.by_kind(counts),
    )


@torch.inference_mode()
def _count_batch(model: nn.Module, ids: Tensor, groups: Tensor, counts: list[LayerCount]) -> None:
    """Add what fires while `model` reads `ids` `[B, S]`, whose tokens are of these groups."""
    groups = groups.flatten()
    with FiredMeter(model, lambda layer, *gates: counts[layer].add(*gates, groups)):
        model.base_model(ids, use_cache=False)


def _refuse_not_finite(checkpoint: Checkpoint, counts: list[LayerCount]) -> None:
    """Gates that are not numbers would be counted as firing or not, which says nothing."""
    for number, count in enumerate(counts):
        if rows := count.not_finite:
            raise TwellError(
                f"{checkpoint.name}: gates of layer {number} are NaN or infinite for {rows} tokens:"
                " the model is broken or its dtype too narrow; go back to one that was sound"
            )


def _checked_length(checkpoint: Checkpoint, windows: int, seq_len: int | None) -> int:
    context = checkpoint.config.get("max_position_embeddings") or 1024
    if windows < 1:
        raise UsageError(f"windows must be >= 1, got {windows}")
    if seq_len is None:
        return min(1024, context)
    if not 1 <= seq_len <= context:
        raise UsageError(f"seq-len must be 1 to {context}, the context of the model, got {seq_len}")
    return seq_len
