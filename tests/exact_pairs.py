"""A tiny model, and what is like a fit of it: the same but for its FFNs."""

import copy

import torch
from transformers import PreTrainedModel


def like_a_fit(model: PreTrainedModel, noise: float = 0.3) -> PreTrainedModel:
    """A copy that shares all but the FFNs, whose W_down differ by so much of their size."""
    layers = model.model.layers
    ffns = {id(part) for layer in layers for part in layer.mlp.parameters()}
    shared = {id(part): part for part in model.parameters() if id(part) not in ffns}
    copied = copy.deepcopy(model, shared)
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in copied.model.layers:
            weight = layer.mlp.down_proj.weight
            weight += noise * weight.std() * torch.randn_like(weight)
    return copied
