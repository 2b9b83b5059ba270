"""twellctl export: a ReLU model becomes a folder that runs over TwELL wherever transformers runs.

Weights stay as they are, or are cut anew or rounded to FP8, one shard in memory at a time. NaN and
infinity are refused. config.json names both the stock class and ours, and holds the slots of a
profile. Beside them goes the bundle: the code, the kernels' sources and the manifest with their
sha256, of FP8 weights too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import check_twell
from twellctl.bundle.twell_fp8_config import QUANTIZE, quantization_config
from twellctl.errors import TwellError, UsageError, encodable
from twellctl.files.outputs import staged
from twellctl.firing.profiled import Profile, read_profile
from twellctl.here.resources import bundle_files
from twellctl.models.card import read_evaluation, write_card
from twellctl.models.card_speed import read_bench
from twellctl.models.carried import copy_side_files, copy_weights, own_file, write_config
from twellctl.models.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.models.in_vllm import is_served_over_twell
from twellctl.models.shard_writer import write_shards

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_FP8_SHARD = 5 * 10**9  # bytes of a file of FP8 weights that nobody chose


@dataclass(frozen=True)
class Exported:
    """What `export` wrote. `class_name` is the one that `trust_remote_code` loads.

    `quantize` is what its weights were rounded to, "fp8" or None. `over_twell_in_vllm`: whether
    vLLM serves it over TwELL, where twellctl is installed.
    """

    out: Path
    class_name: str
    tile: int
    slots: tuple[int, ...]
    profiled: bool
    quantize: str | None
    over_twell_in_vllm: bool


def export(
    model: str | Path,
    out: str | Path,
    *,
    profile: str | Path | Profile | None = None,
    evaluation: str | Path | None = None,
    bench: str | Path | None = None,
    quantize: str | None = None,
    shard_size: str | int | None = None,
    overwrite: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write to `out` the ReLU `model` with the bundle that runs it over TwELL.

    Slots are those of `profile`, else the model's own. Losses and tasks of `evaluation`, an 'eval
    --json' file, and the steps of `bench`, a 'bench decode --json' file, go into the model card.
    `quantize` "fp8" rounds the weights of linear layers to e4m3 with a scale for each row.
    `shard_size` ("2GB", or bytes) cuts the weights anew. Raises `TwellError`.
    """
    out = Path(out)
    if quantize not in (None, *QUANTIZE):
        raise UsageError(f"quantize must be {' or '.join(QUANTIZE)}, got {quantize!r}")
    shard_bytes = None if shard_size is None else parse_size(shard_size)
    files = model, profile, evaluation, bench
    inputs = [Path(path) for path in files if isinstance(path, str | Path)]
    with staged(out, overwrite=overwrite, inputs=inputs) as stage:
        checkpoint = open_checkpoint(model)
        checkpoint.require_unquantised()
        checkpoint.require_relu()
        measured = read_profile(profile) if isinstance(profile, str | Path) else profile
        twell = checkpoint.twell
        is_measured = bool(profile or evaluation or bench)
        weights = fingerprint(checkpoint) if is_measured else ""  # it reads every weight
        if measured is not None:
            label = "the profile" if measured is profile else profile
            twell = _completed(checkpoint, measured, label, weights)
        judged = evaluation and read_evaluation(Path(evaluation), weights)
        timed = bench and read_bench(Path(bench), weights, quantize)
        if quantize is not None:
            origin = checkpoint.hub_id or checkpoint.path.resolve().name
            twell = twell | {"rounded_from": encodable(origin)}
        config = checkpoint.config | {"twell": twell}
        config |= _write_weights_and_bundle(checkpoint, stage, quantize, shard_bytes)
        copy_side_files(checkpoint, stage)
        write_config(stage, config)
        write_card(stage, out.name, checkpoint.path, measured, judged or None, timed or None)
    if evaluation is None and not checkpoint.is_only_converted:
        note(
            "nobody has measured what this model writes, beyond what finetune did: 'twellctl eval "
            f"{checkpoint.name} --reference MODEL --tasks FILE --json FILE', then export --eval"
        )
    checkpoint.beware_of_noise(note)
    served = is_served_over_twell(config)
    class_name = config["auto_map"]["AutoModelForCausalLM"].split(".")[-1]
    slots = tuple(twell["slots"])
    return Exported(out, class_name, twell["tile"], slots, profile is not None, quantize, served)


def _write_weights_and_bundle(
    checkpoint: Checkpoint, folder: Path, quantize: str | None, shard_bytes: int | None
) -> dict:
    """Write both, for weights that are sound; what config.json says of classes and weights."""
    from twellctl.bundle.twell_bundle import make_bundle, write_bundle
    from twellctl.bundle.twell_model import config_entries
    from twellctl.models.exportable import exportable_skeleton
    from twellctl.models.loading import check_stored_weights, read_tensors

    model = exportable_skeleton(checkpoint)
    entries = config_entries(type(model).__name__, checkpoint.config["model_type"])
    for shard in checkpoint.shards:
        own_file(checkpoint.path / shard)
    check_stored_weights(checkpoint)
    guarded: tuple[str, ...] = ()
    if quantize is not None:
        from twellctl.models.quantised import in_fp8, kept_layers, rounded_layers

        tensors = in_fp8(read_tensors(checkpoint), rounded_layers(checkpoint, model))
        guarded = write_shards(tensors, folder, shard_bytes or _FP8_SHARD)
        entries["quantization_config"] = quantization_config(kept_layers(model))
    elif shard_bytes is not None:
        write_shards(read_tensors(checkpoint), folder, shard_bytes)
    else:
        copy_weights(checkpoint, folder)
    write_bundle(folder, make_bundle(bundle_files(), [folder / name for name in guarded]))
    return entries


def parse_size(size: str | int) -> int:
    """Bytes of "500MB", "2GB", "1.5GiB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", str(size).strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if num_bytes < 1:
        raise UsageError(f"shard-size must be like 500MB or 2GB, got {size!r}")
    return num_bytes


def _completed(checkpoint: Checkpoint, found: Profile, label: str | Path, weights: str) -> dict:
    """The "twell" block with what the profile, which errors call `label`, measured.

    `weights`: the checkpoint's fingerprint.
    """
    name = checkpoint.name
    if found.fingerprint != weights:
        raise TwellError(
            f"{label} is of another model ({found.model}): "
            f"write one with 'twellctl profile {name} --data FILE --json FILE'"
        )
    if found.intermediate_size != checkpoint.own_neurons or any(
        not 0 <= layer.density <= 1 for layer in found.layers
    ):
        raise TwellError(f"{label} was changed: profile the model again")
    measured = {
        "tile": found.tile,
        "slots": [layer.slots for layer in found.layers],
        "densities": [round(layer.density, 6) for layer in found.layers],
    }
    try:
        return check_twell(checkpoint.twell | measured, checkpoint.ffn.num_layers)
    except ValueError as error:
        raise TwellError(f"{label}: its {error}: profile the model again") from error
