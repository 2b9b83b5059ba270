"""What the training of a draft head begins from: the model, and windows of text."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twellctl.errors import TwellError, UsageError
from twellctl.heads.settings import HeadTraining, windows_held_out
from twellctl.models.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from torch import Tensor


def open_source(model: str | Path, revision: str | None, training: HeadTraining) -> Checkpoint:
    """The checkpoint of a model for which there can be a draft head; no weight is read.

    `UsageError` for settings that do not go with it.
    """
    checkpoint = open_checkpoint(model, revision=revision)
    checkpoint.require_unquantised()
    if not checkpoint.is_silu:
        raise TwellError(
            f"no draft head can be trained for {checkpoint.name}, whose activation is "
            f"{checkpoint.activation}: give a model with SiLU gates, such as the original of a fit"
        )
    checkpoint.require_tokenizer()
    if training.seq_len > (longest := checkpoint.context or training.seq_len):
        raise UsageError(
            f"seq-len must be <= {longest}, the model's context, got {training.seq_len}"
        )
    _refuse_unlike(checkpoint)
    return checkpoint


def _refuse_unlike(checkpoint: Checkpoint) -> None:
    from twellctl.decoding.torch_decoder import why_not
    from twellctl.heads.last_layer import why_no_head
    from twellctl.models.loading import skeleton

    model = skeleton(checkpoint)
    if said := why_not(model) or why_no_head(model):
        raise TwellError(
            f"no draft head can be trained for {checkpoint.name} ({said}): give a model that is "
            "built like Llama, Mistral or Qwen"
        )


def read_windows(checkpoint: Checkpoint, training: HeadTraining) -> tuple["Tensor", "Tensor"]:
    """(to train on, held out) int64 `[W, S]` and `[H, S]`; `TwellError` for too little text."""
    import torch

    from twellctl.models.loading import load_tokenizer
    from twellctl.text.windows import windows_in

    parts = windows_in(
        training.data,
        training.text_column,
        load_tokenizer(checkpoint),
        checkpoint.config.get("vocab_size"),
        training.seq_len,
        training.tokens,
        partial(windows_held_out, training),
    )
    windows, held_out = (torch.from_numpy(part).long() for part in parts)
    if not (len(windows) and len(held_out)):
        raise TwellError(
            f"the text makes {len(windows)} windows of {training.seq_len} tokens to train on, and "
            f"{len(held_out)} to hold out: give more text, or lower --seq-len"
        )
    return windows, held_out
