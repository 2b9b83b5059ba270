"""twellctl export: writes a ReLU model as a folder that transformers can run with TwELL.

Weights are written in SiLU form (models/silu_form.py), which engines that support only SiLU can
run, or in FP8, with one file in memory at a time. NaN and infinity are refused. config.json names
both the stock class and ours, and holds the slots of a profile. The folder also gets the bundle:
the code, the kernels' sources, and the manifest with their sha256 and that of FP8 weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twellctl.bundle.twell_config import (
    FP16,
    QUANTIZE,
    check_twell,
    least_sharpness,
    quantization_config,
)
from twellctl.errors import TwellError, UsageError, encodable
from twellctl.files.home import from_home
from twellctl.files.outputs import staged
from twellctl.firing.profiled import Profile, read_profile
from twellctl.here.resources import bundle_files
from twellctl.models.card import read_evaluation, write_card
from twellctl.models.card_speed import read_bench
from twellctl.models.carried import copy_side_files, own_file, write_config
from twellctl.models.checkpoint import GATED, SILU, Checkpoint, open_checkpoint
from twellctl.models.in_vllm import is_served_over_twell
from twellctl.models.shard_writer import write_shards
from twellctl.report.notebook import Shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Exported(Shown):
    """What `export` wrote. `class_name` is the class that `trust_remote_code` loads.

    `sharpness` is the least sharpness of any ReLU neuron. `quantize` is what the weights were
    rounded to, "fp8" or None. `over_twell_in_vllm`: whether vLLM serves the export with TwELL if
    twellctl is installed.
    """

    out: Path
    class_name: str
    tile: int
    slots: tuple[int, ...]
    profiled: bool
    sharpness: int
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
    overwrite: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write the ReLU `model` to `out`, with the bundle that runs it with TwELL.

    Slots come from `profile`, else from the model. The model card gets losses and tasks from
    `evaluation`, an 'eval --json' file, and the steps per second from `bench`, a 'bench decode
    --json' file. `quantize` "fp8" rounds the weights of linear layers to e4m3 with one scale per
    row. Raises `TwellError`.
    """
    from twellctl.models.linear_map import layers_without_map
    from twellctl.models.loading import fingerprint
    from twellctl.models.silu_form import choose_form

    out = from_home(out)
    if quantize not in (None, *QUANTIZE):
        raise UsageError(f"quantize must be {' or '.join(QUANTIZE)}, got {quantize!r}")
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
        layers, num_layers = measured.layers if measured else (), checkpoint.ffn.num_layers
        form, most = choose_form(layers, num_layers, checkpoint.silu_form)
        known = twell["source_act"]  # the one that engines know of this family
        act = known if known in GATED and known not in SILU else "silu"
        config = checkpoint.config | {checkpoint.activation_key: act, "twell": twell | form}
        config |= _write_weights_and_bundle(checkpoint, stage, form, quantize)
        copy_side_files(checkpoint, stage)
        write_config(stage, config)
        figures = {"profile": measured, "evaluation": judged or None, "bench": timed or None}
        write_card(stage, out.name, checkpoint.path, **figures)
    if evaluation is None and not checkpoint.is_only_converted:
        note(
            "this model's answers to tasks have not been measured: 'twellctl eval "
            f"{checkpoint.name} --reference MODEL --tasks FILE --json FILE', then export --eval"
        )
    checkpoint.beware_of_noise(note)
    if lost := layers_without_map(checkpoint):
        note(
            f"beware: the last {checkpoint.map_neurons} neurons no longer share one gate in {lost} "
            f"of {num_layers} layers, as the map of a fit does: another trainer has made them "
            "neurons that may fire, and decoding may be no faster than dense; fine-tune the fit "
            "again, with twellctl finetune"
        )
    try:
        checkpoint.require_tokenizer()
    except TwellError as error:
        note(f"beware: {error}, and beside the export's")
    if most > FP16:
        note(f"run it in bf16: in fp16 a value of {most:.0f}, which the profile saw, is infinite")
    return Exported(
        out=out,
        class_name=config["auto_map"]["AutoModelForCausalLM"].split(".")[-1],
        tile=twell["tile"],
        slots=tuple(twell["slots"]),
        profiled=profile is not None,
        sharpness=least_sharpness(form),
        quantize=quantize,
        over_twell_in_vllm=is_served_over_twell(config),
    )


def _write_weights_and_bundle(
    checkpoint: Checkpoint, folder: Path, form: dict, quantize: str | None
) -> dict:
    """Write both, for weights that are sound; what config.json says of classes and weights."""
    from twellctl.bundle.twell_bundle import make_bundle, write_bundle
    from twellctl.bundle.twell_model import config_entries
    from twellctl.models.exportable import exportable_skeleton
    from twellctl.models.loading import read_tensors, refuse_not_finite

    model = exportable_skeleton(checkpoint)
    entries = config_entries(type(model).__name__, checkpoint.config["model_type"])
    for shard in checkpoint.shards:
        own_file(checkpoint.path / shard)
    refuse_not_finite(checkpoint, read_tensors(checkpoint))
    tensors = _in_silu_form(checkpoint, form)
    if quantize is not None:
        from twellctl.models.quantised import in_fp8, kept_layers, rounded_layers

        tensors = in_fp8(tensors, rounded_layers(checkpoint, model))
        entries["quantization_config"] = quantization_config(kept_layers(model))
    files = [folder / name for name in write_shards(tensors, folder)]
    write_bundle(folder, make_bundle(bundle_files(), files if quantize is not None else ()))
    return entries


def _in_silu_form(checkpoint: Checkpoint, form: dict) -> Iterator[tuple[str, "Tensor"]]:
    """Names and tensors in SiLU form; `TwellError` for a weight that overflows its dtype."""
    from twellctl.models.loading import read_tensors
    from twellctl.models.silu_form import factors, scaled

    by = factors(checkpoint.tensors, form, checkpoint.ffn.intermediate_size)
    for name, tensor in read_tensors(checkpoint):
        if name in by:
            tensor = scaled(tensor, by[name])
            if not tensor.abs().amax().isfinite():
                raise TwellError(
                    f"{checkpoint.name}: {name} times its sharpness is too large for "
                    f"{checkpoint.tensors[name].dtype}: take a model whose gates are smaller"
                )
        yield name, tensor


def _completed(checkpoint: Checkpoint, found: Profile, label: str | Path, weights: str) -> dict:
    """The "twell" block with what the profile, which errors call `label`, measured.

    `weights`: the checkpoint's fingerprint.
    """
    name = checkpoint.name
    if found.fingerprint != weights:
        raise TwellError(
            f"{label} is for another model ({found.model}): "
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
