"""What `export --quantize fp8` makes of a model's weights: which layers, and how they are stored.

All linear layers become FP8 but the LM head, which like embeddings and norms stays as it is.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bundle.twell_config import WEIGHT_SCALE
from twellctl.bundle.twell_fp8 import round_weight
from twellctl.bundle.twell_fp8_linear import Fp8Linear, put_in_fp8
from twellctl.errors import TwellError
from twellctl.models.checkpoint import Checkpoint

_WEIGHT = ".weight"


def kept_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that stay as they are: the LM head, and what is no plain one."""
    head = model.get_output_embeddings()
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [name for name, linear in linears if linear is head or type(linear) is not nn.Linear]


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
def round_model(model: PreTrainedModel) -> None:
    """Change the linear layers of a model in memory for FP8 ones, as an export has them."""
    kept = kept_layers(model)
    old = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in kept}
    put_in_fp8(model, kept)
    for name, linear in old.items():
        new: Fp8Linear = model.get_submodule(name)
        values, scale = round_weight(linear.weight)
        new.weight.copy_(values)
        new.weight_scale.copy_(scale)
        if linear.bias is not None:
            new.bias.copy_(linear.bias)


@torch.no_grad()
def expand_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change FP8 layers in memory for plain ones with the same weights, rounded to `dtype`."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, Fp8Linear)]
    for name, layer in layers:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = (layer.weight.float() * layer.weight_scale).to(dtype)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.register_parameter("bias", layer.bias)
        model.set_submodule(name, plain)


def in_fp8(
    tensors: Iterable[tuple[str, Tensor]], layers: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, with the weights of `layers` in e4m3 and a scale for each row behind them."""
    for name, tensor in tensors:
        layer = name.removesuffix(_WEIGHT)
        if layer == name or layer not in layers:
            yield name, tensor
            continue
        values, scale = round_weight(tensor)
        yield name, values
        yield layer + WEIGHT_SCALE, scale
