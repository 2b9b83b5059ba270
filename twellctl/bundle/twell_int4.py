"""Weights of linear layers in four bits, as compressed-tensors packs them: how they are read.

Instead of a weight `[N, K]` a file holds

    weight_packed  int32 [N, K / 8]   codes of -8 to 7: eight in a number, code + 8 in four bits
                                      each, the first in the lowest
    weight_scale   float [N, K / G]   one for each group of G inputs, in the dtype of the model
    weight_shape   int64 [2]          N and K

The weight is code times scale, rounded to the dtype of the scale. A model is computed from such
weights: they are expanded when it is loaded, in the dtype that it is loaded in, so that in float32
nothing is rounded a second time. Who reads codes themselves asks for a model that is still packed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .twell_config import PACKED, PACKED_IN_ONE, PACKED_PARTS, WEIGHT_SCALE

LEAST, MOST = -8, 7  # codes


def pack(codes: Tensor) -> Tensor:
    """int32 `[N, K / 8]` of codes, int8 `[N, K]`."""
    shifts = torch.arange(0, 32, 4, device=codes.device)
    eights = (codes.long() - LEAST).unflatten(-1, (-1, PACKED_IN_ONE)) << shifts
    return eights.sum(-1).to(torch.int32)  # of which the highest bit is the sign


def unpack(packed: Tensor) -> Tensor:
    """int8 `[N, K]` of int32 `[N, K / 8]`."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return ((packed[..., None] >> shifts & 15) + LEAST).to(torch.int8).flatten(-2)


def expand(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight `[N, K]`, in the dtype of `scales` `[N, K / G]`, of codes `[N, K]`."""
    groups = codes.unflatten(-1, (scales.shape[-1], -1)).to(scales.dtype)
    return (groups * scales[..., None]).flatten(-2)


def named(layer: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The tensors of `layer` as they are stored."""
    parts = pack(codes), scales, torch.tensor(codes.shape)
    return {layer + end: part for end, part in zip(PACKED_PARTS, parts, strict=True)}


def expanded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` by name, with a weight in the place of each that is packed."""
    layers = [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]
    packed = {layer + end for layer in layers for end in PACKED_PARTS}
    made = {name: tensor for name, tensor in tensors.items() if name not in packed}
    for layer in layers:
        codes = unpack(tensors[layer + PACKED])
        made[f"{layer}.weight"] = expand(codes, tensors[layer + WEIGHT_SCALE])
    return made


class PackedLinear(nn.Module):
    """What a packed weight is loaded into; a linear layer once it is expanded."""

    def __init__(self, linear: nn.Linear, group_size: int):
        """Without values yet; sizes, dtype, device and the bias are those of `linear`."""
        super().__init__()
        self.out_features, self.in_features = N, K = linear.weight.shape
        device = linear.weight.device

        def part(*size: int, dtype: torch.dtype) -> nn.Parameter:
            empty = torch.empty(size, dtype=dtype, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.weight_packed = part(N, K // PACKED_IN_ONE, dtype=torch.int32)
        self.weight_scale = part(N, K // group_size, dtype=linear.weight.dtype)
        self.weight_shape = part(2, dtype=torch.int64)
        self.bias = linear.bias

    @property
    def expanded(self) -> nn.Linear:
        """The linear layer of these weights, which keeps them beside what they are expanded to."""
        return expanded_layer(self.weight_packed.data, self.weight_scale.data, self.bias)


# ---- what an expanded layer keeps, in no state_dict


def expanded_layer(packed: Tensor, scales: Tensor, bias: Tensor | None) -> nn.Linear:
    """The linear layer of weights that are packed, which keeps them."""
    weight = expand(unpack(packed), scales)
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = bias
    keep_packed(layer, packed, scales)
    return layer


def keep_packed(layer: nn.Linear, packed: Tensor, scales: Tensor) -> None:
    """Keep beside the weight of `layer` what it was expanded from."""
    layer.register_buffer("packed", packed, persistent=False)
    layer.register_buffer("packed_scale", scales, persistent=False)


def kept_group_size(layer: nn.Linear | PackedLinear) -> int | None:
    """How many inputs share a scale in what `layer` keeps; None if it keeps nothing."""
    name = "weight_scale" if isinstance(layer, PackedLinear) else "packed_scale"
    scales = getattr(layer, name, None)
    return None if scales is None else layer.in_features // scales.shape[1]


def kept_codes(layer: nn.Linear | PackedLinear) -> tuple[Tensor, Tensor] | None:
    """int8 codes `[N, K]` and scales `[N, K / G]` that the weight of `layer` is; None if it keeps
    none, or was changed since."""
    if isinstance(layer, PackedLinear):
        return unpack(layer.weight_packed), layer.weight_scale
    packed, scales = getattr(layer, "packed", None), getattr(layer, "packed_scale", None)
    if packed is None or scales is None or scales.dtype != layer.weight.dtype:
        return None
    codes = unpack(packed)
    return (codes, scales) if torch.equal(expand(codes, scales), layer.weight) else None
