"""Models in 4 bits as they are loaded packed, out of models in memory."""

import torch
from torch import nn
from transformers import PreTrainedModel

from twellctl.bench.random_model import round_to_int4
from twellctl.bundle.twell_int4 import PackedLinear
from twellctl.models.originals import is_of_layers, share_equal


@torch.no_grad()
def packed(model: PreTrainedModel) -> PreTrainedModel:
    """`model` itself, its linear layers rounded to the nearest and packed."""
    round_to_int4(model)
    for name, linear in [(name, m) for name, m in model.named_modules() if hasattr(m, "packed")]:
        layer = PackedLinear(linear, linear.in_features // linear.packed_scale.shape[1])
        layer.weight_packed.copy_(linear.packed)
        layer.weight_scale.copy_(linear.packed_scale)
        layer.weight_shape.copy_(torch.tensor(linear.weight.shape))
        model.set_submodule(name, layer)
    return model.requires_grad_(False)


def packed_draft(model: PreTrainedModel, copied: PreTrainedModel) -> PreTrainedModel:
    """`copied`, of the same weights as `model`, packed; it shares what is equal then."""
    draft = packed(copied)
    assert share_equal(model, draft, is_of_layers) is None
    return draft


def linears(model: nn.Module) -> int:
    """How many weights the linear layers of the decoder layers have."""
    layers = (m for m in model.model.layers.modules() if hasattr(m, "in_features"))
    return sum(layer.in_features * layer.out_features for layer in layers)
