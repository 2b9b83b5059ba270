"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

Windows at even strides through the text are run through the dense model. All counts are exact.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from twellctl import __version__
from twellctl.bundle.twell_config import storable_threshold
from twellctl.bundle.twell_model import set_thresholds
from twellctl.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.data import read_texts, spread_windows, token_stream
from twellctl.errors import UsageError
from twellctl.firing import FiredMeter, LayerCount
from twellctl.model import default_device, load_model, load_tokenizer
from twellctl.profiled import Profile

BATCH_TOKENS = 8192


def profile(
    model: str | Path,
    data: list[str],
    *,
    text_column: str = "text",
    windows: int = 128,
    seq_len: int | None = None,
    threshold: float | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure the ReLU `model` on `windows` windows of `seq_len` tokens of the text in `data`.

    `seq_len` None is 1024, or the model's context where that is shorter. `threshold`, rounded to
    what bf16 holds, takes the place of the model's own in all layers. Computes in bf16 on CUDA, in
    float32 on the CPU. `progress(done, total)` is told of windows. Raises `TwellError`.
    """
    checkpoint = open_checkpoint(model)
    checkpoint.require_relu()
    thresholds = _thresholds(checkpoint, threshold)
    seq_len = _checked_length(checkpoint, windows, seq_len)
    tokenizer = load_tokenizer(checkpoint)
    texts = read_texts([str(path) for path in data], text_column, tokenizer)
    ids = spread_windows(token_stream(texts, tokenizer), windows, seq_len)

    device = device or default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_model(checkpoint, dtype=dtype, device=device)
    set_thresholds(loaded, thresholds)
    tile, size = checkpoint.twell["tile"], checkpoint.ffn.intermediate_size
    counts = [LayerCount(size, tile, device) for _ in thresholds]
    with torch.inference_mode(), FiredMeter(loaded, lambda i, *gates: counts[i].add(*gates)):
        batch_size = max(1, BATCH_TOKENS // seq_len)
        for start in range(0, len(ids), batch_size):
            loaded.base_model(ids[start : start + batch_size].to(device), use_cache=False)
            progress(min(start + batch_size, len(ids)), len(ids))
    return Profile(
        model=str(model),
        fingerprint=fingerprint(checkpoint),
        data=tuple(str(path) for path in data),
        windows=len(ids),
        seq_len=seq_len,
        tokens=ids.numel(),
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        versions={
            "twellctl": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        intermediate_size=size,
        tile=tile,
        layers=tuple(c.summary(t) for c, t in zip(counts, thresholds, strict=True)),
    )


def _thresholds(checkpoint: Checkpoint, threshold: float | None) -> list[float]:
    if threshold is None:
        return checkpoint.twell["thresholds"]
    try:
        return [storable_threshold(threshold)] * checkpoint.ffn.num_layers
    except ValueError as error:
        raise UsageError(str(error)) from error


def _checked_length(checkpoint: Checkpoint, windows: int, seq_len: int | None) -> int:
    context = checkpoint.config.get("max_position_embeddings") or 1024
    if windows < 1:
        raise UsageError(f"windows must be >= 1, got {windows}")
    if seq_len is None:
        return min(1024, context)
    if not 1 <= seq_len <= context:
        raise UsageError(f"seq-len must be 1 to {context}, the context of the model, got {seq_len}")
    return seq_len
