"""twellctl convert: SiLU becomes ReLU. Only config.json changes, no weight is read."""

from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import new_twell
from twellctl.errors import TwellError
from twellctl.files.outputs import staged
from twellctl.models.card import write_card
from twellctl.models.carried import copy_side_files, copy_weights, has_chat_template, write_config
from twellctl.models.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote; `is_chat_model`: the model has a chat template."""

    out: Path
    num_layers: int
    hidden_size: int
    intermediate_size: int
    source_act: str
    is_chat_model: bool


def convert(
    model: str | Path, out: str | Path, *, revision: str | None = None, overwrite: bool = False
) -> Converted:
    """Write to `out` the SiLU `model` (a folder or hub id) with `hidden_act: "relu"`.

    Takes no memory for weights: their files are copied. The result loads with plain
    `AutoModelForCausalLM.from_pretrained(out)`. Raises `TwellError`.
    """
    out = Path(out)
    with staged(out, overwrite=overwrite, inputs=(Path(model),)) as stage:
        checkpoint = open_checkpoint(model, revision=revision)
        checkpoint.require_unquantised()
        config = _with_relu(checkpoint)
        copy_weights(checkpoint, stage)
        copy_side_files(checkpoint, stage)
        write_config(stage, config)
        write_card(stage, out.name, checkpoint.path)
        is_chat_model = has_chat_template(stage)
    ffn = checkpoint.ffn
    sizes = ffn.num_layers, ffn.hidden_size, ffn.intermediate_size
    return Converted(out, *sizes, checkpoint.activation, is_chat_model)


def _with_relu(checkpoint: Checkpoint) -> dict:
    """config.json of the converted model; `TwellError` if there is no SiLU to replace."""
    name, activation = checkpoint.name, checkpoint.activation
    if activation == "relu":
        raise TwellError(f"{name} is already ReLU: go on with 'twellctl finetune {name} OUT'")
    if not checkpoint.is_silu:
        raise TwellError(f"{name} has hidden_act {activation!r}: take a model with 'silu'")
    twell = new_twell(checkpoint.ffn.num_layers, checkpoint.hub_id, activation)
    config = checkpoint.config | {"hidden_act": "relu", "twell": twell}
    config.pop("auto_map", None)  # the stock class serves, and the code is not carried over
    return config
