"""How many bytes of weights a step of one token reads: what decides its speed for one sequence.

Counted are the linear layers of the blocks. Attention and gates are read whole; up and down only of
neurons that fire; of a map one gate, and its up and down. Embeddings, the LM head, norms and biases
are not counted, and neither are caches. No torch.
"""

import math
import re
from collections.abc import Iterator

from twellctl.models.carried import json_object
from twellctl.models.checkpoint import FIT_FILE, REPORT_FILE, Checkpoint
from twellctl.models.shards import TensorInfo

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4}
_PART = re.compile(r".+\.(gate_proj|up_proj|gate_up_proj|down_proj)\.weight")


def bytes_read(checkpoint: Checkpoint, density: float | None = None) -> int | None:
    """Bytes of one token, if `density` of the model's own neurons fire.

    Without it, the density that its folder tells; None if a ReLU model's tells none.
    """
    if checkpoint.activation != "relu":
        density = 1.0
    elif density is None and (density := known_density(checkpoint)) is None:
        return None
    return round(_with_map(checkpoint, density))


def share_read(checkpoint: Checkpoint, density: float) -> float:
    """Bytes of one token of a ReLU model, beside those of all its own neurons in the same bits and
    without a map."""
    own = checkpoint.own_neurons
    return _with_map(checkpoint, density) / _counted(checkpoint, own, own)


def _with_map(checkpoint: Checkpoint, density: float) -> float:
    own, mapped = checkpoint.own_neurons, checkpoint.map_neurons
    return _counted(checkpoint, own + min(1, mapped), density * own + mapped)


def _counted(checkpoint: Checkpoint, num_gates: int, num_fired: float) -> float:
    """Bytes if of each FFN so many gates are read, and so many neurons of up and down."""
    N = checkpoint.ffn.intermediate_size
    gates, fired = num_gates / N, num_fired / N
    shares = {"gate_proj": gates, "up_proj": fired, "down_proj": fired}
    shares["gate_up_proj"] = (gates + fired) / 2
    total = 0.0
    for tensor in _matrices(checkpoint):
        part = _PART.fullmatch(tensor.name)
        total += _size(tensor) * (shares[part[1]] if part else 1.0)
    return total


def known_density(checkpoint: Checkpoint) -> float | None:
    """The share of its own neurons that fire, as a profile, fine-tuning or the fit measured it."""
    if densities := checkpoint.twell.get("densities"):
        return sum(densities) / len(densities)
    report = json_object(checkpoint.path / REPORT_FILE) or {}
    if isinstance(found := report.get("density"), float):
        return found
    layers = (json_object(checkpoint.path / FIT_FILE) or {}).get("layers")
    fires = [one.get("fires") for one in layers or [] if isinstance(one, dict)]
    numbers = [share for share in fires if isinstance(share, float)]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(fires) else None


def _matrices(checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    """The weights of linear layers in the blocks."""
    count = checkpoint.ffn.num_layers
    prefixes = tuple(f"{checkpoint.layer_name(index)}." for index in range(count))
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(prefixes) and len(tensor.shape) == 2 and name.endswith(".weight"):
            yield tensor


def _size(tensor: TensorInfo) -> int:
    """Bytes; of a packed weight those of codes and scales."""
    parts = tensor.parts[:2] or (tensor,)
    return sum(_BYTES[part.dtype] * math.prod(part.shape) for part in parts)
