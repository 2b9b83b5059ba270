"""twellctl convert: SiLU becomes ReLU. Only config.json changes, no weight is read."""

from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import new_twell
from twellctl.checkpoint import copy_side_files, link_shards, open_checkpoint, write_config
from twellctl.errors import TwellError
from twellctl.outputs import check_output, staged


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote."""

    out: Path
    num_layers: int
    hidden_size: int
    intermediate_size: int
    source_act: str


def convert(
    model: str | Path, out: str | Path, *, revision: str | None = None, overwrite: bool = False
) -> Converted:
    """Write to `out` the SiLU `model` (a folder or hub id) with `hidden_act: "relu"`.

    Takes no memory for weights: shards are hard-linked where the disk allows, else copied. The
    result loads with plain `AutoModelForCausalLM.from_pretrained(out)`. Raises `TwellError`.
    """
    out = Path(out)
    check_output(out, overwrite=overwrite, inputs=(Path(model),))
    checkpoint = open_checkpoint(model, revision=revision)
    if checkpoint.activation == "relu":
        raise TwellError(f"{model} is already ReLU: go on with 'twellctl finetune {model} OUT'")
    if not checkpoint.is_silu:
        raise TwellError(
            f"{model} has hidden_act {checkpoint.activation!r}: take a model with 'silu'"
        )
    ffn = checkpoint.ffn
    source = str(checkpoint.path.resolve()) if Path(model).exists() else str(model)
    config = checkpoint.config | {
        "hidden_act": "relu",
        "twell": new_twell(ffn.num_layers, source, checkpoint.activation),
    }
    config.pop("auto_map", None)  # the stock class serves, and the code is not carried over
    with staged(out, overwrite=overwrite) as stage:
        link_shards(checkpoint, stage)
        copy_side_files(checkpoint, stage)
        write_config(stage, config)
    return Converted(
        out, ffn.num_layers, ffn.hidden_size, ffn.intermediate_size, checkpoint.activation
    )
