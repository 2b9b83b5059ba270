"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

Windows at even strides through the text are run through the dense model. All counts are exact.
Density and loss by position in the window and by kind of text are counted in the same pass. On
demand each layer's FFN is then timed on what it read.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from twellctl.errors import bounded, reason
from twellctl.evaluation.losses import TokenLosses
from twellctl.evaluation.windows import count_windows, dtype_for, facts, window_length
from twellctl.firing.grouping import grouped_windows
from twellctl.firing.profiled import LayerProfile, Profile, Speed
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import (
    default_device,
    fingerprint,
    load_model,
    load_tokenizer,
    quiet_compiler,
)


def profile(
    model: str | Path,
    data: str | Path | list[str | Path],
    *,
    text_column: str = "text",
    windows: int = 128,
    seq_len: int | None = None,
    device: torch.device | None = None,
    time_layers: Callable[..., Speed] | None = None,
    progress: Callable[..., None] = lambda done, total, what: None,
) -> Profile:
    """Measure the ReLU `model` on `windows` windows of `seq_len` tokens of the text in `data`.

    `data` is a file or folder, or several: each a kind of text by its name, or by NAME=FILE.
    `seq_len` None is 1024, or the model's context where that is shorter. Computes in bf16 on CUDA,
    in float32 on the CPU. `time_layers` (twellctl/bench/layers.py) times each layer's FFN on a CUDA
    device; where that cannot be done the profile says why. `progress(done, total, what)` receives
    windows, then layers. Raises `TwellError`.
    """
    checkpoint = open_checkpoint(model)
    checkpoint.require_relu()
    seq_len = window_length(checkpoint, windows, seq_len)
    tokenizer = load_tokenizer(checkpoint)
    data = [str(path) for path in ([data] if isinstance(data, str | Path) else data)]
    vocabulary = checkpoint.config.get("vocab_size")
    text = grouped_windows(data, text_column, tokenizer, windows, seq_len, vocabulary)

    device = device or default_device()
    loaded = load_model(checkpoint, dtype=dtype_for(device), device=device)
    reading = TokenLosses(loaded, text.num_groups)
    try:
        counts = count_windows(
            checkpoint,
            loaded,
            text,
            reading.read,
            lambda done, total: progress(done, total, "windows"),
        )
    finally:
        reading.close()
    layers = tuple(count.summary() for count in counts)
    timed = why_not = None
    if time_layers and checkpoint.is_fp8:
        why_not = "layers are timed in bf16 only"
    elif time_layers:
        timed, why_not = _timed(time_layers, loaded, text.ids, layers, progress)
    return Profile(
        model=str(model),
        fingerprint=fingerprint(checkpoint),
        data=tuple(data),
        windows=len(text.ids),
        seq_len=seq_len,
        tokens=text.ids.numel(),
        **facts(loaded),
        intermediate_size=checkpoint.own_neurons,
        tile=checkpoint.twell["tile"],
        layers=layers,
        by_position=text.by_position(counts, reading.losses),
        by_kind=text.by_kind(counts, reading.losses),
        loss=reading.losses.mean,
        loss_error=reading.losses.error(text.overlap),
        text_tokens=text.text_tokens,
        speed=timed,
        without_speed=why_not,
    )


def _timed(
    time_layers: Callable[..., Speed],
    model: nn.Module,
    ids: Tensor,
    layers: tuple[LayerProfile, ...],
    progress: Callable[..., None],
) -> tuple[Speed | None, str | None]:
    """How fast each layer's FFN is, or why that is not known: the counts are not lost for it."""
    if model.device.type != "cuda":
        return None, "no NVIDIA GPU here"
    try:
        with quiet_compiler():
            return time_layers(model, ids, layers, progress), None
    except Exception as error:  # whatever drivers and compilers may say
        return None, bounded(reason(error), 300)
