"""twellctl export: a ReLU model becomes a folder that runs over TwELL wherever transformers runs.

Weights stay as they are (or are cut anew, one shard in memory at a time). They are read once: NaN
and infinity are refused. config.json names both the stock class and ours, and holds the slots of a
profile. Beside them goes the bundle: the code, the kernels' sources and the manifest with their
sha256.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import check_twell
from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import staged
from twellctl.files.strict_json import to_json
from twellctl.firing.profiled import Profile, read_profile
from twellctl.here.resources import bundle_files
from twellctl.models.card import read_evaluation, write_card
from twellctl.models.carried import copy_side_files, copy_weights, own_file, write_config
from twellctl.models.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.models.in_vllm import is_served_over_twell
from twellctl.models.shards import INDEX, SINGLE

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Exported:
    """What `export` wrote. `class_name` is the one that `trust_remote_code` loads.

    `over_twell_in_vllm`: whether vLLM serves it over TwELL, where twellctl is installed.
    """

    out: Path
    class_name: str
    tile: int
    slots: tuple[int, ...]
    profiled: bool
    over_twell_in_vllm: bool


def export(
    model: str | Path,
    out: str | Path,
    *,
    profile: str | Path | Profile | None = None,
    evaluation: str | Path | None = None,
    shard_size: str | int | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write to `out` the ReLU `model` with the bundle that runs it over TwELL.

    Slots are those of `profile`, else the model's own. Losses and tasks of `evaluation`, an 'eval
    --json' file, go into the model card. `shard_size` ("2GB", or bytes) cuts the weights anew.
    Raises `TwellError`.
    """
    out = Path(out)
    shard_bytes = None if shard_size is None else parse_size(shard_size)
    inputs = [Path(path) for path in (model, profile, evaluation) if isinstance(path, str | Path)]
    with staged(out, overwrite=overwrite, inputs=inputs) as stage:
        checkpoint = open_checkpoint(model)
        checkpoint.require_relu()
        measured = read_profile(profile) if isinstance(profile, str | Path) else profile
        twell = checkpoint.twell
        if measured is not None:
            label = "the profile" if measured is profile else profile
            twell = _completed(checkpoint, measured, label)
        judged = evaluation and read_evaluation(Path(evaluation), fingerprint(checkpoint))
        entries = _write_bundle_and_entries(checkpoint, stage)
        if shard_bytes is None:
            copy_weights(checkpoint, stage)
        else:
            write_shards(checkpoint, stage, shard_bytes)
        copy_side_files(checkpoint, stage)
        write_config(stage, checkpoint.config | entries | {"twell": twell})
        write_card(stage, out.name, checkpoint.path, measured, judged or None)
    return Exported(
        out,
        entries["auto_map"]["AutoModelForCausalLM"].split(".")[-1],
        twell["tile"],
        tuple(twell["slots"]),
        profile is not None,
        is_served_over_twell(entries["architectures"][0], profiled="densities" in twell),
    )


def _write_bundle_and_entries(checkpoint: Checkpoint, folder: Path) -> dict:
    """Write the bundle, for weights that are sound; what config.json says of its classes."""
    from twellctl.bundle.twell_bundle import make_bundle, write_bundle
    from twellctl.bundle.twell_model import config_entries
    from twellctl.models.exportable import stock_class
    from twellctl.models.loading import check_stored_weights

    entries = config_entries(stock_class(checkpoint), checkpoint.config["model_type"])
    check_stored_weights(checkpoint)
    write_bundle(folder, make_bundle(bundle_files()))
    return entries


def parse_size(size: str | int) -> int:
    """Bytes of "500MB", "2GB", "1.5GiB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", str(size).strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if num_bytes < 1:
        raise UsageError(f"shard-size must be like 500MB or 2GB, got {size!r}")
    return num_bytes


def plan_shards(checkpoint: Checkpoint, shard_bytes: int) -> list[list[str]]:
    """Names of tensors by shard, in their order; a tensor larger than a shard gets its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in checkpoint.tensors.items():
        num_bytes = tensor.stop - tensor.start
        if shards[-1] and filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    return shards


def write_shards(checkpoint: Checkpoint, folder: Path, shard_bytes: int) -> None:
    """The weights in shards of at most `shard_bytes`, with an index if there are several."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards = plan_shards(checkpoint, shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        try:
            save_file(_read_tensors(checkpoint, names), folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error  # a full disk arrives as this, too
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.stop - tensor.start for tensor in checkpoint.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(to_json(index, indent=2) + "\n", encoding="utf-8")


def _read_tensors(checkpoint: Checkpoint, names: list[str]) -> dict:
    from safetensors import safe_open

    tensors = {}
    for shard in dict.fromkeys(checkpoint.tensors[name].shard for name in names):
        with safe_open(own_file(checkpoint.path / shard), framework="pt") as file:
            here = (name for name in names if checkpoint.tensors[name].shard == shard)
            tensors |= {name: file.get_tensor(name) for name in here}
    return tensors


def _completed(checkpoint: Checkpoint, found: Profile, label: str | Path) -> dict:
    """The "twell" block with what the profile, which errors call `label`, measured."""
    name = checkpoint.name
    if found.fingerprint != fingerprint(checkpoint):
        raise TwellError(
            f"{label} is of another model ({found.model}): "
            f"write one with 'twellctl profile {name} --data FILE --json FILE'"
        )
    measured = {
        "tile": found.tile,
        "slots": [layer.slots for layer in found.layers],
        "densities": [round(layer.density, 6) for layer in found.layers],
    }
    try:
        return check_twell(checkpoint.twell | measured, checkpoint.ffn.num_layers)
    except ValueError as error:
        raise TwellError(f"{label}: its {error}: profile the model again") from error
