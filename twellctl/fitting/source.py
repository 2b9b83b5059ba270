"""What a conversion begins from: the model, and the layers that an earlier call kept."""

from itertools import count
from pathlib import Path

from twellctl.errors import TwellError, UsageError
from twellctl.files.made_of import Record
from twellctl.fitting.settings import Fit
from twellctl.models.checkpoint import Checkpoint, open_checkpoint


def open_source(model: str | Path, revision: str | None, fit: Fit) -> Checkpoint:
    """The checkpoint that is converted, if there is an activation to replace, and text suits it."""
    checkpoint = open_checkpoint(model, revision=revision)
    checkpoint.require_unquantised()
    if checkpoint.activation == "relu":
        name = checkpoint.name
        raise TwellError(f"{name} is already ReLU: continue with 'twellctl finetune {name} OUT'")
    checkpoint.require_gated_source()
    if fit.data:
        checkpoint.require_tokenizer()
        if fit.seq_len > (longest := checkpoint.context or fit.seq_len):
            raise UsageError(
                f"seq-len must be <= {longest}, the model's context, got {fit.seq_len}"
            )
        if fit.map_rank is not None and fit.map_rank > (most := checkpoint.ffn.hidden_size):
            raise UsageError(f"map-rank must be <= {most}, the hidden size, got {fit.map_rank}")
        from twellctl.models.exportable import refuse_unfittable  # brings torch

        refuse_unfittable(checkpoint)
    return checkpoint


def layer_file(index: int) -> str:
    """Where a run folder keeps a layer (`kept.py`)."""
    return f"layer-{index:03}.safetensors"


def num_kept(record: Record) -> int:
    """How many layers, the first ones, a run keeps; those behind a gap do not count."""
    return next(index for index in count() if not record.has(layer_file(index)))
