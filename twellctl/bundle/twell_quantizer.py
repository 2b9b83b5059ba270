"""How transformers loads an FP8 export into `Fp8Linear` layers, without compressed-tensors.

transformers asks a quantizer, found by the "quant_method" of config.json, to change the layers of a
model before its weights come. Ours is registered under a name of its own; config.json keeps the
name of compressed-tensors, by which stock classes and vLLM load the same folder.
"""

import copy
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .twell_fp8_config import is_fp8, quantization_config
from .twell_fp8_linear import put_in_fp8

METHOD = f"fp8 of {__name__}"  # each copy of this code makes layers of its own


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
