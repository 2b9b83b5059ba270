"""Low-rank adapters for fine-tuning with less memory; `merge_and_unload` takes them in again."""

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from twellctl.bundle.twell_model import gated_ffns
from twellctl.training.recipe import Recipe


def with_lora(model: PreTrainedModel, recipe: Recipe) -> Any:
    """LoRA on the layers' attention; on the FFN too, or the FFN in full."""
    from peft import LoraConfig, get_peft_model

    inside_ffn = {id(module) for ffn in gated_ffns(model) for module in ffn.modules()}
    ffn_linears, others = set(), set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            (ffn_linears if id(module) in inside_ffn else others).add(name.rpartition(".")[2])
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        target_modules=sorted(others | ffn_linears if recipe.lora_ffn else others),
        modules_to_save=None if recipe.lora_ffn else sorted(ffn_linears),
        task_type="CAUSAL_LM",
    )
    if recipe.gradient_checkpointing:
        model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own calls of transformers
        return get_peft_model(model, config)
