"""FP8 linear layers, as modules in the place of a model's nn.Linear; how transformers loads them.

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

from .twell_config import is_fp8, quantization_config
from .twell_fp8 import E4M3, Fp8Weight, fp8_linear

METHOD = f"fp8 of {__name__}"  # each copy of this code makes layers of its own


class Fp8Linear(nn.Linear):
    """An nn.Linear whose `weight` is e4m3 `[N, K]`, with `weight_scale` float32 `[N, 1]`.

    `turned`: the weight a second time, `[K, N]`, contiguous, where `turn` made it. It goes when the
    layer moves, and follows values that it loads; no state_dict has it.
    """

    turned: Tensor | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **where):
        """Without values yet; `where`: device, and the dtype of the bias."""
        super().__init__(in_features, out_features, bias, **where)
        device = self.weight.device
        values = torch.empty(out_features, in_features, dtype=E4M3, device=device)
        scale = torch.empty(out_features, 1, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    @property
    def fp8_weight(self) -> Fp8Weight:
        """What `fp8_linear` takes."""
        return Fp8Weight(self.weight, self.weight_scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        refuse_gradients(x)
        return fp8_linear(x, self.fp8_weight)

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
            """Where `fn` puts it; of to(dtype) too, e4m3 and its scales keep their dtypes."""
            moved = fn(tensor)
            own = tensor is self.weight or tensor is self.weight_scale
            return tensor.to(moved.device) if own and moved.dtype != tensor.dtype else moved

        return super()._apply(placed, recurse)


def refuse_gradients(x: Tensor) -> None:
    """`RuntimeError` where a gradient of `x` would be lost without a word."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "FP8 layers have no gradients: train the model that this one was exported from"
        )


def put_in_fp8(model: nn.Module, ignore: list[str]) -> None:
    """Change each plain nn.Linear of `model` whose name is not in `ignore` for an `Fp8Linear`."""
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n not in ignore]
    for name, linear in linears:
        K, N, weight = linear.in_features, linear.out_features, linear.weight
        where = {"device": weight.device, "dtype": weight.dtype}
        model.set_submodule(name, Fp8Linear(K, N, linear.bias is not None, **where))


# ---- how they are loaded


class Fp8Config(QuantizationConfigMixin):
    """The block "quantization_config" of an FP8 export, while a model of it is in memory."""

    def __init__(self, ignore: list[str], **stored: Any):
        """`ignore`: names of the linear layers that are not FP8; all else is as ever."""
        self.quant_method, self.ignore = METHOD, ignore

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return quantization_config(self.ignore)


def with_own_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config` itself; of an FP8 export a copy that makes transformers load it by this module."""
    if not is_fp8(vars(config)):
        return config
    own = copy.copy(config)
    own.quantization_config = config.quantization_config | {"quant_method": METHOD}
    return own


class Fp8Quantizer(HfQuantizer):
    """Changes linear layers for `Fp8Linear` ones; what is stored is loaded as it is."""

    def _process_model_before_weight_loading(self, model, **how):
        put_in_fp8(model, self.quantization_config.ignore)

    def _process_model_after_weight_loading(self, model, **how):
        return model.requires_grad_(False)

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Fp8Config
AUTO_QUANTIZER_MAPPING[METHOD] = Fp8Quantizer
