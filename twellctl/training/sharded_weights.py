"""A model over several processes: each holds some rows of every weight (PyTorch's FSDP2).

A decoder layer is a unit: its weights are gathered before its forward and its backward pass, and
let go after each. So are the embeddings, and the final norm together with the head. Where the head
is tied to the embeddings, both belong to the unit of the whole model, gathered for all of a pass.

No process ever holds a whole model: each reads its own rows, and what is written is gathered one
tensor at a time, a file of at most 5 GB at once.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twellctl.errors import TwellError
from twellctl.here.processes import in_all
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.head_loss import whole
from twellctl.models.layers import ffn_layers
from twellctl.models.loading import opened, refuse_not_finite, stored_dtypes, without_values
from twellctl.models.shard_writer import write_shards


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Cut the weights of `model`, which may be on no device, into rows over all processes.

    On a GPU they are gathered in bfloat16, and gradients are summed up in float32.
    """
    on_gpu = device.type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_gpu else None,
        reduce_dtype=torch.float32 if on_gpu else None,
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    how = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
    for unit in _units(model):
        fully_shard(unit, **how)
    fully_shard(model, **how)


def _units(model: PreTrainedModel) -> list[nn.Module | list[nn.Module]]:
    """The parts of `model` that are gathered by themselves."""
    layers = ffn_layers(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embeddings.weight is head.weight:
        return layers
    inside = {id(m) for part in (*layers, embeddings, head) for m in part.modules()}
    outside = [m for m in model.modules() if id(m) not in inside]
    others = [m for m in outside if any(True for _ in m.parameters(recurse=False))]
    return [embeddings, *layers, [*others, head]]


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this process holds; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows(length: int, rank: int, world_size: int) -> slice:
    """Which of `length` rows the process `rank` of `world_size` holds."""
    most = -(-length // world_size)
    return slice(min(rank * most, length), min((rank + 1) * most, length))


def load_sharded(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, activation: str | None = None
) -> PreTrainedModel:
    """As `load_model`, sharded over all processes, and each reads only its own rows."""
    model = in_all(lambda: without_values(checkpoint, dtype, activation))
    buffers = dict(model.named_buffers())
    shard(model, device)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    in_all(lambda: _read(model, checkpoint))
    return model


@torch.no_grad()
def _read(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    with opened(checkpoint) as read:
        for name, weight in [*model.named_parameters(), *_stored_buffers(model)]:
            stored, own = _stored_name(model, name, checkpoint), slice(None)
            if isinstance(weight, DTensor):
                own = rows(len(weight), dist.get_rank(), dist.get_world_size())
            part = read(stored, own)
            refuse_not_finite(checkpoint, [(stored, part)])
            local(weight).copy_(part)


def _stored_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that are stored with the weights."""
    stored = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def _stored_name(model: PreTrainedModel, name: str, checkpoint: Checkpoint) -> str:
    """How the files call a weight: by its name, without the body's prefix, or as the tied head."""
    bare = name.removeprefix(f"{model.base_model_prefix}.")
    is_head = model.get_parameter_or_buffer(name) is model.get_output_embeddings().weight
    for known in (name, bare, *(["lm_head.weight"] if is_head else [])):
        if known in checkpoint.tensors:
            return known
    raise TwellError(
        f"{checkpoint.name} has no {name} under that name, by which its rows would be read: save "
        "it again with transformers (from_pretrained, save_pretrained), or give --shard never"
    )


def write_sharded(
    folder: Path | None,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    edit: Callable[[dict[str, Tensor]], None],
) -> None:
    """Write safetensors files into `folder`, in the dtypes of `checkpoint`, a tied head once.

    All processes call it; the first one writes, and has the `folder`. `edit` may change a weight,
    which is whole then. `OSError`, in the first, where that fails.
    """
    tensors = _gathered(model, checkpoint, edit if folder is not None else None)
    try:
        if folder is not None:
            write_shards(tensors, folder)
    finally:
        for _ in tensors:  # where that failed, too: the others gather with this process
            pass


def _gathered(
    model: PreTrainedModel, checkpoint: Checkpoint, edit: Callable[[dict[str, Tensor]], None] | None
) -> Iterator[tuple[str, Tensor]]:
    """What of a sharded model is stored, whole: not what training has put into it.

    Nothing without `edit`: then this process only takes its part in gathering.
    """
    dtype_of = stored_dtypes(checkpoint)
    weights = [(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor)]
    for name, weight in [*weights, *_stored_buffers(model)]:
        gathered = {name: whole(weight.detach())}
        if edit is None:
            continue
        edit(gathered)
        yield name, gathered[name].to(dtype_of(name)).cpu()
