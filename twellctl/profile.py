"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

Windows at even strides through the text are run through the dense model. All counts are exact.
Density by position in the window and by kind of text is counted in the same pass.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from twellctl.evaluation.windows import count_windows, dtype_for, facts, window_length
from twellctl.firing.grouping import grouped_windows
from twellctl.firing.profiled import Profile
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import default_device, fingerprint, load_model, load_tokenizer


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
    in float32 on the CPU. `progress(done, total)` receives windows. Raises `TwellError`.
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
    counts = count_windows(
        checkpoint,
        loaded,
        text,
        lambda ids, groups: loaded.base_model(input_ids=ids, use_cache=False),
        progress,
    )
    layers = tuple(count.summary() for count in counts)
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
        by_position=text.by_position(counts),
        by_kind=text.by_kind(counts),
        text_tokens=text.text_tokens,
    )
