"""A model of a bench in bf16, and in FP8 too where that is what is benched.

All forms of a bench compute the same function then: the bf16 model holds what the FP8 weights are.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from twellctl.bench.twell_side import shared_copy
from twellctl.bundle.twell_fp8_linear import Fp8Linear
from twellctl.models.quantised import expand_model, round_model

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Precisions:
    """One model; `fp8` None: what is benched is bf16."""

    bf16: PreTrainedModel
    fp8: PreTrainedModel | None

    @property
    def benched(self) -> PreTrainedModel:
        """The one that runs over TwELL."""
        return self.bf16 if self.fp8 is None else self.fp8

    @property
    def called(self) -> str:
        """What the benched one is called."""
        return "this model" if self.fp8 is None else "this model in FP8"


def in_precisions(model: PreTrainedModel, quantize: str | None) -> Precisions:
    """Of a model in bf16 or of an FP8 export, which is in FP8 already. Weights that need no change
    are shared; with `quantize` those of `model` itself are rounded.
    """
    if quantize is None and not is_in_fp8(model):
        return Precisions(model, None)
    if not is_in_fp8(model):
        round_model(model)
    bf16 = shared_copy(model)
    expand_model(bf16, DTYPE)
    return Precisions(bf16, model)


def is_in_fp8(model: nn.Module) -> bool:
    """Whether it has FP8 layers."""
    return any(isinstance(module, Fp8Linear) for module in model.modules())
