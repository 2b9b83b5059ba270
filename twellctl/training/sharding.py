"""A model over several processes: each holds some rows of every weight (PyTorch's FSDP2).

A decoder layer is a unit: its weights are gathered before its forward and its backward pass, and
let go after each. So are the embeddings, and the final norm together with the head. Where the head
is tied to the embeddings, both belong to the unit of the whole model, gathered for all of a pass.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twellctl.training.layer_states import ffn_layers


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
