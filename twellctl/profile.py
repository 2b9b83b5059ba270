"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

Windows at even strides through the text are run through the dense model. All counts are exact.
Density and loss by position in the window and by kind of text are counted in the same pass. On
demand each layer's FFN is then timed on what it read.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from twellctl.errors import TwellError, UsageError, bounded, reason
from twellctl.evaluation.reading import Reading
from twellctl.firing.grouping import grouped_windows
from twellctl.firing.profiled import LayerProfile, Profile, Speed
from twellctl.here.own_version import own_version
from twellctl.models.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.models.loading import default_device, load_model, load_tokenizer, quiet_compiler

BATCH_TOKENS = 8192


def profile(
    model: str | Path,
    data: str | Path | list[str | Path],
    *,
    text_column: str = "text",
    windows: int = 128,
    seq_len: int | None = None,
    device: torch.device | None = None,
    speed: bool = False,
    progress: Callable[..., None] = lambda done, total, what: None,
) -> Profile:
    """Measure the ReLU `model` on `windows` windows of `seq_len` tokens of the text in `data`.

    `data` is a file or folder, or several: each a kind of text by its name, or by NAME=FILE.
    `seq_len` None is 1024, or the model's context where that is shorter. Computes in bf16 on CUDA,
    in float32 on the CPU. With `speed` each layer's FFN is timed on a CUDA device; where that
    cannot be done the profile says why. `progress(done, total, what)` is told of windows, then of
    layers. Raises `TwellError`.
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
    reading = Reading(loaded, size, tile, text.num_groups)
    batch_size, done = max(1, BATCH_TOKENS // seq_len), 0
    for ids, groups in zip(text.ids.split(batch_size), text.groups.split(batch_size), strict=True):
        reading.add(ids.to(device), groups.to(device))
        done += len(ids)
        progress(done, len(text.ids), "windows")
    _refuse_not_finite(checkpoint, reading)
    layers = tuple(layer.summary() for layer in reading.layers)
    timed, why_not = _timed(loaded, text.ids, layers, progress) if speed else (None, None)
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
            "twellctl": own_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        intermediate_size=size,
        tile=tile,
        layers=layers,
        by_position=text.by_position(reading.layers, reading.losses),
        by_kind=text.by_kind(reading.layers, reading.losses),
        loss=reading.losses.mean,
        loss_error=reading.losses.error,
        tokens_by_share=reading.tokens_by_share(),
        speed=timed,
        without_speed=why_not,
    )


def _timed(
    model: nn.Module, ids: Tensor, layers: tuple[LayerProfile, ...], progress: Callable[..., None]
) -> tuple[Speed | None, str | None]:
    """How fast each layer's FFN is, or why that is not known: the counts are not lost for it."""
    from twellctl.bench.layers import time_layers

    if model.device.type != "cuda":
        return None, "no NVIDIA GPU here"
    try:
        with quiet_compiler():
            return time_layers(model, ids, layers, progress), None
    except Exception as error:  # whatever drivers and compilers may say
        return None, bounded(reason(error), 300)


def _refuse_not_finite(checkpoint: Checkpoint, reading: Reading) -> None:
    """Gates that are not numbers would be counted as firing or not, which says nothing."""
    for number, layer in enumerate(reading.layers):
        if rows := layer.not_finite:
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
