"""What `export --quantize` makes of a model's weights: which layers, and how they are rounded.

All linear layers are rounded but the LM head, which like embeddings and norms stays as it is. What
is stored is in schemes.py.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from twellctl.bundle.twell_config import WEIGHT_SCALE
from twellctl.bundle.twell_dense import rounded_weight
from twellctl.bundle.twell_rounded_linear import (
    RoundedLinear,
    put_rounded_layers,
    with_own_layers,
)
from twellctl.errors import TwellError
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.layers import ffn_layers
from twellctl.models.schemes import Scheme

_WEIGHT = ".weight"


def config_with_own_layers(
    checkpoint: Checkpoint, config: PretrainedConfig, *, packed: bool = False
) -> PretrainedConfig:
    """`config`; for a quantised checkpoint a copy that loads its layers by the bundle's classes.
    `packed`: codes of 4 bits are not expanded."""
    return config if checkpoint.scheme is None else with_own_layers(config, packed=packed)


def kept_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that stay as they are: the LM head, and all that are not plain."""
    head = model.get_output_embeddings()
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [name for name, linear in linears if linear is head or type(linear) is not nn.Linear]


def linears_outside_of_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that no decoder layer holds, such as the LM head."""
    inside = {id(m) for layer in ffn_layers(model) for m in layer.modules()}
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [name for name, linear in linears if id(linear) not in inside]


def rounded_layers(checkpoint: Checkpoint, model: PreTrainedModel) -> frozenset[str]:
    """The layers to round, as `checkpoint` names them; `model` is its skeleton.

    `TwellError` if it does not name each of them.
    """
    kept, prefix = kept_layers(model), f"{model.base_model_prefix}."
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in kept]
    stored = {name.removesuffix(_WEIGHT) for name in checkpoint.tensors if name.endswith(_WEIGHT)}
    found = []
    for name in linears:
        short = name.removeprefix(prefix)  # of a body that was saved alone
        if name not in stored and short not in stored:
            raise TwellError(
                f"{checkpoint.name} has no weight {name + _WEIGHT}, which is to be rounded: export "
                "it without --quantize"
            )
        found.append(name if name in stored else short)
    return frozenset(found)


@torch.no_grad()
def round_model(model: PreTrainedModel, scheme: Scheme) -> None:
    """Replace the linear layers of a model in memory by rounded ones, as an export has them."""
    kept = kept_layers(model)
    old = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in kept}
    put_rounded_layers(model, scheme.kind, kept)
    for name, linear in old.items():
        new = model.get_submodule(name)
        rounded = rounded_weight(scheme.kind, linear.weight)
        new.weight.copy_(rounded.values)
        new.weight_scale.copy_(rounded.scales)
        if linear.bias is not None:
            new.bias.copy_(linear.bias)


@torch.no_grad()
def expand_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace quantised layers in memory by plain ones of the same weights, rounded to `dtype`."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, RoundedLinear)]
    for name, layer in layers:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = (layer.weight.float() * layer.weight_scale).to(dtype)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.register_parameter("bias", layer.bias)
        model.set_submodule(name, plain)


def round_tensors(
    tensors: Iterable[tuple[str, Tensor]], layers: frozenset[str], scheme: Scheme
) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, with the weights of `layers` rounded, each followed by its scales of rows."""
    for name, tensor in tensors:
        layer = name.removesuffix(_WEIGHT)
        if layer == name or layer not in layers:
            yield name, tensor
            continue
        rounded = rounded_weight(scheme.kind, tensor)
        yield name, rounded.values
        yield layer + WEIGHT_SCALE, rounded.scales
