"""A model that does not exist yet: a config and a tokenizer, to be trained from random weights."""

from pathlib import Path

from twellctl.bundle.twell_config import new_twell
from twellctl.errors import TwellError, UsageError, shown
from twellctl.models.checkpoint import Checkpoint, open_config_file
from twellctl.models.checks import ffn_shape, refuse_quantised, refuse_unsupported
from twellctl.models.loading import without_weights
from twellctl.models.shards import TensorInfo
from twellctl.training.recipe import Recipe

STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def open_config(config: str | Path) -> Checkpoint:
    """What `finetune` takes in the place of a model folder: no weights, all else as there.

    `config` is a config.json, or a folder with one; a tokenizer lies beside it. Weights there are
    not read. `TwellError` names what is wrong: no config, a family transformers does not have, FFNs
    that are not gated or not ReLU, no tokenizer.
    """
    name = str(config)
    file, given = open_config_file(config)
    if given.get("hidden_act") != "relu":
        raise TwellError(
            f"{name} has hidden_act {shown(given.get('hidden_act'))}: --from-scratch trains ReLU, "
            'write "relu" there'
        )
    refuse_quantised(name, given)
    refuse_unsupported(name, given)
    complete, model = without_weights(name, given)
    dtype = STORED.get(str(complete.get("dtype") or "float32"))
    if dtype is None:
        raise TwellError(
            f"{name}: dtype must be {' or '.join(STORED)}, got {shown(complete['dtype'])}"
        )
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
