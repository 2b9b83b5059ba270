"""What a conversion begins from: the model, and the layers that an earlier call kept."""

from itertools import count
from pathlib import Path

from twellctl.errors import TwellError, UsageError
from twellctl.files.made_of import Record
from twellctl.fitting.settings import GROUP_SIZES, LEAST_GROUP, WIDE, Fit, rank_of_map
from twellctl.models.checkpoint import Checkpoint, open_checkpoint


def open_source(model: str | Path, revision: str | None, fit: Fit) -> Checkpoint:
    """The checkpoint that is converted, if there is an activation to replace, and text suits it.

    `UsageError` for settings that do not go together, or not with this model.
    """
    _refuse_odd_ones(fit)
    checkpoint = open_checkpoint(model, revision=revision)
    checkpoint.require_unquantised()
    if checkpoint.activation == "relu":
        name = checkpoint.name
        if fit.bits:
            raise TwellError(f"{name} is already ReLU: give the model that it was made from")
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
        if fit.bits:
            group_size_for(checkpoint, fit)
        from twellctl.models.exportable import refuse_unfittable  # brings torch

        refuse_unfittable(checkpoint, fit.keep_activation)
    return checkpoint


def _refuse_odd_ones(fit: Fit) -> None:
    if fit.bits:
        return
    for name, is_given in (
        ("group-size", fit.group_size is not None),
        ("keep-activation", fit.keep_activation),
    ):
        if is_given:
            raise UsageError(f"{name} is for rounded weights: add --bits 4")


def group_size_for(checkpoint: Checkpoint, fit: Fit) -> int:
    """The group size asked for, or the largest usual one that divides all inputs.

    `UsageError` where inputs of a linear layer make no whole groups.
    """
    inputs = _inputs(checkpoint, fit)
    K = checkpoint.ffn.hidden_size
    most = GROUP_SIZES[0] if K >= WIDE else GROUP_SIZES[1]
    usual = [size for size in GROUP_SIZES if size <= most and not any(one % size for one in inputs)]
    size = fit.group_size or (usual[0] if usual else most)
    if size % LEAST_GROUP == 0 and not any(one % size for one in inputs):
        return size
    remedy = f"take {usual[0]}" if usual else "this model cannot be rounded"
    if not usual and fit.map_rank:
        remedy = f"take another --map-rank than {fit.map_rank}"
    raise UsageError(
        f"group-size must be a multiple of {LEAST_GROUP} and divide the inputs of all linear layers"
        f" ({', '.join(map(str, sorted(inputs)))}), got {size}: {remedy}"
    )


def _inputs(checkpoint: Checkpoint, fit: Fit) -> set[int]:
    """How many inputs the linear layers of a block have once it is fitted: down those of a map,
    too."""
    prefix = f"{checkpoint.layer_name(0)}."
    K, N = checkpoint.ffn.hidden_size, checkpoint.ffn.intermediate_size
    others = {
        tensor.shape[1]
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix) and len(tensor.shape) == 2 and ".down_proj." not in name
    }
    return others | {N + rank_of_map(fit, K, N)}


def layer_file(index: int) -> str:
    """Where a run folder keeps a layer (`kept.py`)."""
    return f"layer-{index:03}.safetensors"


def num_kept(record: Record) -> int:
    """How many layers, the first ones, a run keeps; those behind a gap do not count."""
    return next(index for index in count() if not record.has(layer_file(index)))
