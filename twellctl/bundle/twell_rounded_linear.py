"""Linear layers whose weights are rounded, in the place of a model's nn.Linear; how they load.

transformers asks a quantizer, found by the "quant_method" of config.json, to change the layers of a
model before its weights come. Ours is registered under a name of its own, and needs no
compressed-tensors; config.json keeps that name, by which stock classes and vLLM load the same
folder.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .twell_config import group_size_of, quantization_config, rounded_kind
from .twell_dense import ROUNDINGS, linear
from .twell_int4 import PackedLinear
from .twell_weights import Weight, plain_weight

METHOD = f"rounded by {__name__}"  # each copy of this code makes layers of its own


class RoundedLinear(nn.Linear):
    """An nn.Linear whose weight is rounded to `kind`: `weight` has the values, `[N, K]`, and
    `weight_scale` their scales, float32 `[N, 1]` (twell_weights.py).

    `turned`: the values a second time, `[K, N]`, contiguous, where `turn` made it. It goes when the
    layer moves, and follows values that it loads; no state_dict has it.
    """

    weight: nn.Parameter
    turned: Tensor | None = None

    def __init__(self, kind: str, in_features: int, out_features: int, bias: bool = True, **where):
        """Without values yet; `where`: device, and the dtype of the bias."""
        super().__init__(in_features, out_features, bias, **where)
        self.kind, device = kind, self.weight.device
        values = torch.empty(out_features, in_features, dtype=ROUNDINGS[kind].dtype, device=device)
        scale = torch.empty(out_features, 1, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    @property
    def rounded(self) -> Weight:
        """Its weight and bias."""
        return Weight(self.kind, self.weight, self.weight_scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        refuse_gradients(x)
        return linear(x, self.rounded)

    def turn(self) -> None:
        """Make `turned`."""
        self.turned = self.weight.t().contiguous()

    def _load_from_state_dict(self, *given):
        was_there, self.turned = self.turned is not None, None
        super()._load_from_state_dict(*given)
        if was_there:
            self.turn()

    def _apply(self, fn, recurse=True):
        self.turned = None

        def placed(tensor: Tensor) -> Tensor:
            """Where `fn` puts it; values and scales keep their dtypes, also of to(dtype)."""
            moved = fn(tensor)
            own = tensor is self.weight or tensor is self.weight_scale
            return tensor.to(moved.device) if own and moved.dtype != tensor.dtype else moved

        return super()._apply(placed, recurse)


def weight_of(layer: nn.Linear) -> Weight:
    """The weight and bias of a linear layer, rounded or not."""
    if isinstance(layer, RoundedLinear):
        return layer.rounded
    return plain_weight(layer.weight, layer.bias)


def refuse_gradients(x: Tensor) -> None:
    """`RuntimeError` where a gradient of `x` would be lost without a word."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "quantised layers have no gradients: train the model that this one was exported from"
        )


def put_rounded_layers(model: nn.Module, kind: str, ignore: list[str]) -> None:
    """Replace each plain nn.Linear of `model` by a `RoundedLinear`, but those in `ignore`."""
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n not in ignore]
    for name, layer in linears:
        sizes = layer.in_features, layer.out_features
        where = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        rounded = RoundedLinear(kind, *sizes, layer.bias is not None, **where)
        model.set_submodule(name, rounded)


def put_packed_layers(model: nn.Module, group_size: int, ignore: list[str]) -> None:
    """Replace each plain nn.Linear of `model` by a `PackedLinear`, but those in `ignore`."""
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n not in ignore]
    for name, layer in linears:
        model.set_submodule(name, PackedLinear(layer, group_size))


def expand_packed_layers(model: nn.Module) -> None:
    """Replace each `PackedLinear` of `model` by the nn.Linear of its weights."""
    packed = [(name, m) for name, m in model.named_modules() if isinstance(m, PackedLinear)]
    for name, layer in packed:
        model.set_submodule(name, layer.expanded)


# ---- how they are loaded


class RoundedConfig(QuantizationConfigMixin):
    """The block "quantization_config" of a rounded model, while it is in memory."""

    def __init__(
        self,
        kind: str,
        ignore: list[str],
        group_size: int | None = None,
        packed: bool = False,
        **stored: Any,
    ):
        """`ignore`: names of the linear layers that are not rounded; `kind` tells the rest.
        `packed`: layers in int4 stay as they are stored."""
        self.quant_method, self.kind = METHOD, kind
        self.ignore, self.group_size, self.packed = ignore, group_size, packed

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return quantization_config(self.kind, self.ignore, self.group_size)


def with_own_layers(config: PreTrainedConfig, *, packed: bool = False) -> PreTrainedConfig:
    """`config`; of a rounded model a copy by which transformers loads it with this module.

    `packed`: layers in int4 become `PackedLinear`, which none can run.
    """
    if (kind := rounded_kind(vars(config))) is None:
        return config
    own, stored = copy.copy(config), config.quantization_config
    how = {"quant_method": METHOD, "kind": kind, "group_size": group_size_of(stored)}
    how["packed"] = packed
    own.quantization_config = stored | how
    return own


class RoundedQuantizer(HfQuantizer):
    """Replaces linear layers by `RoundedLinear` ones; what is stored is loaded as it is.

    int4 is expanded once it is there, unless it is to stay packed: the model is then a plain one.
    """

    def _process_model_before_weight_loading(self, model, **how):
        given = self.quantization_config
        if given.kind == "int4":
            put_packed_layers(model, given.group_size, given.ignore)
        else:
            put_rounded_layers(model, given.kind, given.ignore)

    def _process_model_after_weight_loading(self, model, **how):
        if self.quantization_config.kind == "int4":
            if not self.quantization_config.packed:
                expand_packed_layers(model)
            self.remove_quantization_config(model)
        return model.requires_grad_(False)

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = RoundedConfig
AUTO_QUANTIZER_MAPPING[METHOD] = RoundedQuantizer
