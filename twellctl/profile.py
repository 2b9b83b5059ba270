"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

The dense model reads evenly spaced windows of the text. All counts are exact. The same pass counts
the density by position in the window and by kind of text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from twellctl.errors import UsageError
from twellctl.evaluation.settings import Paths, Reading
from twellctl.evaluation.windows import count_windows, dtype_for, facts, window_length
from twellctl.firing.counts import LayerCount
from twellctl.firing.grouping import GroupedWindows, grouped_windows
from twellctl.firing.profiled import Profile
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import default_device, fingerprint, load_model, load_tokenizer
from twellctl.settings import chosen


def profile(
    model: str | Path,
    data: Paths = (),
    *,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> Profile:
    """Measure the ReLU `model` on `windows` windows of `seq_len` tokens of the text in `data`.

    `data` is a file or folder, or several. Each is one kind of text, called like the file or, with
    NAME=FILE, NAME. `settings` are the fields of `Reading`; `seq_len` None means 1024, or the
    model's context if that is shorter. Computes in bf16 on CUDA and in float32 on the CPU.
    `progress(done, total)` receives windows. Raises `TwellError`.
    """
    how = chosen(Reading, settings | {"data": data})
    if not how.data:
        raise UsageError("no text to read: give --data FILE")
    checkpoint = open_checkpoint(model)
    checkpoint.require_relu()
    seq_len = window_length(checkpoint, how.seq_len)
    tokenizer = load_tokenizer(checkpoint)
    sizes = how.windows, seq_len, checkpoint.config.get("vocab_size")
    text = grouped_windows(how.data, how.text_column, tokenizer, *sizes)

    device = device or default_device()
    loaded = load_model(checkpoint, dtype=dtype_for(device), device=device)

    def read(ids: torch.Tensor, groups: torch.Tensor) -> None:
        loaded.base_model(input_ids=ids, use_cache=False)

    counts = count_windows(checkpoint, loaded, text, read, progress)
    return _profile(str(model), checkpoint, how.data, text, counts, facts(loaded))


def _profile(
    model: str,
    checkpoint: Checkpoint,
    data: Sequence[str],
    text: GroupedWindows,
    counts: Sequence[LayerCount],
    measured_by: dict[str, Any],
) -> Profile:
    """What the `counts` of all windows come to."""
    return Profile(
        model=model,
        fingerprint=fingerprint(checkpoint),
        data=tuple(data),
        windows=len(text.ids),
        seq_len=text.ids.shape[1],
        tokens=text.ids.numel(),
        **measured_by,
        intermediate_size=checkpoint.own_neurons,
        tile=checkpoint.twell["tile"],
        layers=tuple(count.summary() for count in counts),
        by_position=text.by_position(counts),
        by_kind=text.by_kind(counts),
        text_tokens=text.text_tokens,
    )
