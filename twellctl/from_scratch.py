"""A model that does not exist yet: a config and a tokenizer, to be trained from random weights."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.bundle.twell_config import new_twell
from twellctl.checkpoint import Checkpoint, ffn_shape, refuse_unsupported
from twellctl.errors import TwellError, UsageError
from twellctl.model import quiet_transformers
from twellctl.recipe import Recipe
from twellctl.shards import TensorInfo, read_json

STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def open_config(config: str | Path) -> Checkpoint:
    """What `finetune` takes in the place of a model folder: no weights, all else as there.

    `config` is a config.json, or a folder with one; a tokenizer lies beside it. Weights there are
    not read. `TwellError` names what is wrong: no config, a family transformers does not have, FFNs
    that are not gated or not ReLU, no tokenizer.
    """
    name, file = str(config), Path(config)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise TwellError(f"{file} does not exist: give a config.json, or a folder with one")
    given = {key: value for key, value in read_json(file).items() if key != "auto_map"}
    if given.get("hidden_act") != "relu":
        raise TwellError(
            f"{name} has hidden_act {given.get('hidden_act')!r}: --from-scratch trains ReLU, write "
            '"relu" there'
        )
    refuse_unsupported(name, given)
    complete, model = _without_weights(name, given)
    dtype = STORED.get(str(complete.get("dtype") or "float32"))
    if dtype is None:
        raise TwellError(f"{name}: dtype must be {' or '.join(STORED)}, got {complete['dtype']!r}")
    tensors = {
        tensor: TensorInfo(tensor, dtype, tuple(parameter.shape), "", 0, 0)
        for tensor, parameter in model.named_parameters()
    }
    ffn = ffn_shape(name, complete, tensors)
    twell = new_twell(ffn.num_layers, None, "relu")
    complete |= {"architectures": [type(model).__name__], "twell": twell}
    checkpoint = Checkpoint(str(file), file.parent, complete, tensors, (), ffn)
    checkpoint.require_tokenizer()
    return checkpoint


def check_from_scratch(recipe: Recipe) -> None:
    """`UsageError` for settings that random weights make no sense of."""
    if recipe.lora_rank:
        raise UsageError("from-scratch trains all weights: leave lora-rank out")


def _without_weights(name: str, given: dict) -> tuple[dict, nn.Module]:
    """The config as transformers completes it, and the model on no device."""
    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.for_model(**given)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a family makes of odd numbers
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TwellError(f"{name}: transformers makes no model of it: {reason}") from error
    return json.loads(config.to_json_string()), model
