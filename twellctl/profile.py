"""twellctl profile: how many neurons fire, by layer, and the slots that a packed gate needs.

Windows at even strides through the text are run through the dense model. All counts are exact: they
are kept as histograms, so their size hangs on the model and not on the text.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from twellctl import __version__
from twellctl.bundle.twell_config import storable_threshold
from twellctl.bundle.twell_model import set_thresholds
from twellctl.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.data import read_texts, token_stream
from twellctl.errors import TwellError, UsageError
from twellctl.firing import FiredMeter
from twellctl.model import default_device, load_model, load_tokenizer
from twellctl.profiled import LayerProfile, Profile

SLOTS_STEP = 8
MAX_OVERFLOW = 0.001  # share of rows that the chosen slots may send to the backup
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
    ids = _windows(token_stream(texts, tokenizer), windows, seq_len)

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


class LayerCount:
    """What fired in one layer: by neuron, and histograms of nnz and of the fullest tile, by row."""

    def __init__(self, intermediate_size: int, tile: int, device: torch.device):
        self.tile = tile
        self.by_neuron = torch.zeros(intermediate_size, dtype=torch.int64, device=device)
        self.nnz = torch.zeros(intermediate_size + 1, dtype=torch.int64, device=device)
        self.fullest = torch.zeros(tile + 2, dtype=torch.int64, device=device)

    def add(self, gate: Tensor, active: Tensor) -> None:
        """Count rows `[M, N]`: the gate before and after its activation."""
        fired = active != 0
        self.by_neuron += fired.sum(0)
        self.nnz += fired.sum(-1).bincount(minlength=len(self.nnz))
        tiles = F.pad(fired, (0, -fired.shape[-1] % self.tile)).unflatten(-1, (-1, self.tile))
        fullest = tiles.sum(-1).amax(-1)
        # whatever the slots, a row that is not finite goes to the backup
        fullest = torch.where(gate.isfinite().all(-1), fullest, self.tile + 1)
        self.fullest += fullest.bincount(minlength=len(self.fullest))

    def summary(self, threshold: float) -> LayerProfile:
        """The figures of the layer, with the fewest slots that overflow rarely enough."""
        nnz, num_rows = self.nnz.cpu(), int(self.nnz.sum())
        mean = int((nnz * torch.arange(len(nnz))).sum()) / num_rows
        reached = nnz.cumsum(0).double()
        overflow = (num_rows - self.fullest.cpu().cumsum(0)).double() / num_rows  # by slots
        fit = (overflow[SLOTS_STEP::SLOTS_STEP] <= MAX_OVERFLOW).nonzero().flatten()
        slots = self.tile if not len(fit) else min(self.tile, SLOTS_STEP * (int(fit[0]) + 1))
        return LayerProfile(
            threshold=threshold,
            nnz_mean=mean,
            nnz_p50=int((reached < 0.50 * num_rows).sum()),
            nnz_p99=int((reached < 0.99 * num_rows).sum()),
            nnz_max=int(nnz.nonzero().max()),
            density=mean / len(self.by_neuron),
            dead=int((self.by_neuron == 0).sum()),
            slots=slots,
            overflow=float(overflow[slots]),
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


def _windows(stream: Iterable[np.ndarray], count: int, seq_len: int) -> Tensor:
    """`[count, seq_len]` token ids at even strides through all the text; fewer if it is short."""
    ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *stream]))
    if len(ids) < seq_len:
        raise TwellError(
            f"the text holds {len(ids)} tokens, less than one window of {seq_len}: "
            "give more text, or a smaller --seq-len"
        )
    starts = torch.linspace(0, len(ids) - seq_len, count).long().unique()
    return ids[starts[:, None] + torch.arange(seq_len)].long()
