"""What a run takes at least, and whether each process can hold all of it."""

import math
from dataclasses import dataclass

import psutil
import torch

from twellctl.evaluation.windows import dtype_for
from twellctl.here.processes import from_all, is_one_of_several
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import default_device
from twellctl.models.shards import TensorInfo
from twellctl.training.recipe import Recipe
from twellctl.training.teacher import choose_teacher

FFN_WEIGHTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
REPLICA_SHARE = 0.5  # of the memory, at most; activations need the rest


@dataclass(frozen=True)
class Held:
    """A weight of a student: its shape, whether it is a matrix of a layer, and who steps it."""

    shape: tuple[int, ...]
    in_layer: bool
    is_trained: bool
    by_muon: bool

    @property
    def number(self) -> int:
        return math.prod(self.shape)

    @property
    def copies(self) -> int:
        """How often it is held: itself, a gradient, an optimizer's state."""
        return (3 if self.by_muon else 4) if self.is_trained else 1


def total_bytes() -> int:
    """What the GPU has, or this process and what the system could still give it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().available + psutil.Process().memory_info().rss


def least_bytes(checkpoint: Checkpoint, recipe: Recipe) -> int:
    """What weights, gradients, optimizer and teacher take, however small the batch is."""
    size = getattr(torch, recipe.param_dtype).itemsize
    total = size * sum(weight.number * weight.copies for weight in held(checkpoint, recipe))
    teacher = choose_teacher(checkpoint, recipe)
    taught_by = _weights(teacher.checkpoint) if teacher else []
    of_teacher = dtype_for(default_device()).itemsize
    return total + of_teacher * sum(math.prod(tensor.shape) for tensor in taught_by)


def is_to_be_sharded(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Whether this run shards its models over its processes; the same in all of them."""
    return is_one_of_several() and from_all(shards_on_several(checkpoint, recipe))[0]


def shards_on_several(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Whether several processes of this machine's memory would shard, as `--shard` says.

    By default they do where a replica for each would leave too little of it for activations.
    """
    if recipe.lora_rank or recipe.shard == "never":
        return False
    room = REPLICA_SHARE * total_bytes()
    return recipe.shard == "always" or least_bytes(checkpoint, recipe) > room


def held(checkpoint: Checkpoint, recipe: Recipe) -> list[Held]:
    """All weights of a student, a tied head's once. Those that LoRA adds are left out."""
    found = []
    for tensor in _weights(checkpoint):
        in_layer = len(tensor.shape) == 2 and ".layers." in tensor.name
        in_ffn = tensor.name.rpartition(".")[0].rpartition(".")[2] in FFN_WEIGHTS
        is_trained = not recipe.lora_rank or (in_ffn and not recipe.lora_ffn)
        by_muon = is_trained and in_layer and recipe.optimizer == "muon"
        found.append(Held(tuple(tensor.shape), in_layer, is_trained, by_muon))
    return found


def _weights(checkpoint: Checkpoint) -> list[TensorInfo]:
    """The tensors of a checkpoint, a tied head's once."""
    tied = checkpoint.config.get("tie_word_embeddings")
    named = checkpoint.tensors.items()
    return [tensor for name, tensor in named if not (tied and name == "lm_head.weight")]
