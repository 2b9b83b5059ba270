"""twellctl export: writes a model as a folder that transformers and other engines can run.

Weights of a ReLU model are written in SiLU form (models/silu_form.py), which engines that support
only SiLU can run, and may be quantised (models/schemes.py). Those in 4 bits stay so. One file is in
memory at a time. NaN and infinity are refused. config.json names both the stock class and ours, and
holds the slots of a profile. The folder also gets the bundle: the code, the kernels' sources, and
the manifest with their sha256 and that of quantised weights.

A model that was only rounded to 4 bits has no such form, no profile and no bundle: every neuron
fires, and its stock class computes all of it.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.bundle.twell_config import FP16, check_twell, least_sharpness
from twellctl.errors import TwellError, UsageError, encodable
from twellctl.files.home import from_home
from twellctl.files.outputs import staged
from twellctl.firing.profiled import Profile, read_profile
from twellctl.here.resources import bundle_files
from twellctl.models.card import read_evaluation, write_card
from twellctl.models.card_speed import read_bench
from twellctl.models.carried import CODE, copy_side_files, own_file, write_config
from twellctl.models.checkpoint import GATED, SILU, Checkpoint, open_checkpoint
from twellctl.models.in_vllm import is_served_over_twell
from twellctl.models.originals import find_original
from twellctl.models.rotary import for_all_readers
from twellctl.models.schemes import INT4, SCHEMES, Scheme, scheme_of
from twellctl.models.shard_writer import write_shards
from twellctl.models.shards import read_header
from twellctl.report.notebook import Shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Exported(Shown):
    """What `export` wrote. `class_name` is the class that `trust_remote_code` loads.

    `sharpness` is the least sharpness of any ReLU neuron. Both are None for a model that was only
    rounded: every neuron fires. `scheme` is what the weights of linear layers are stored in
    (models/schemes.py), None for plain floats. `over_twell_in_vllm`: whether vLLM serves the export
    with TwELL if twellctl is installed. `has_original`: whether the folder holds the model that it
    was made from, too.
    """

    out: Path
    class_name: str | None
    tile: int
    slots: tuple[int, ...]
    profiled: bool
    sharpness: int | None
    scheme: Scheme | None
    over_twell_in_vllm: bool
    has_original: bool


@dataclass(frozen=True)
class _Measured:
    """What the files given to `export` hold, read and checked against the model's weights."""

    profile: Profile | None
    evaluation: dict[str, Any] | None
    bench: dict[str, Any] | None
    twell: dict[str, Any]  # the "twell" block, with the profile's slots if there is one


def export(
    model: str | Path,
    out: str | Path,
    *,
    profile: str | Path | Profile | None = None,
    evaluation: str | Path | None = None,
    bench: str | Path | None = None,
    quantize: str | None = None,
    with_original: bool = False,
    original: str | Path | None = None,
    overwrite: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write `model` to `out`: a ReLU model with the bundle that runs it with TwELL, or one that
    was only rounded to 4 bits, with its codes as they are.

    Slots come from `profile`, else from the model. The model card gets losses and tasks from
    `evaluation`, an 'eval --json' file, and the steps per second from `bench`, a 'bench decode
    --json' file. `quantize` names the scheme to which the weights of linear layers are rounded
    (models/schemes.py). `with_original`: the folder also holds the model that `model` was made
    from (`original` as in `twellctl.generate.load`), for exact answers (models/with_original.py).
    Raises `TwellError`.
    """
    out = from_home(out)
    if quantize not in (None, *SCHEMES):
        raise UsageError(f"quantize must be {' or '.join(SCHEMES)}, got {quantize!r}")
    files = model, profile, evaluation, bench, original
    inputs = [Path(path) for path in files if isinstance(path, str | Path)]
    with staged(out, overwrite=overwrite, inputs=inputs) as stage:
        checkpoint = open_checkpoint(model)
        if quantize is not None or checkpoint.scheme is not INT4:
            checkpoint.require_unquantised()
        if profile or bench or not checkpoint.is_only_rounded:
            checkpoint.require_relu()
        source = find_original(checkpoint, with_original, original, "--with-original")
        measured = _read_measured(checkpoint, profile, evaluation, bench, quantize)
        config, largest = _write_model(checkpoint, stage, measured, quantize, source)
        _write_card(checkpoint, stage, out.name, measured)
    _note_shortcomings(checkpoint, is_evaluated=evaluation is not None, largest=largest, note=note)
    return _exported(out, config, is_profiled=profile is not None, has_original=with_original)


def _read_measured(
    checkpoint: Checkpoint,
    profile: str | Path | Profile | None,
    evaluation: str | Path | None,
    bench: str | Path | None,
    quantize: str | None,
) -> _Measured:
    """`TwellError` for a file of another model, or one that is not what it was given as."""
    from twellctl.models.loading import fingerprint

    if not (profile or evaluation or bench):
        return _Measured(None, None, None, checkpoint.twell)
    weights = fingerprint(checkpoint)  # it reads every weight
    found, twell = None, checkpoint.twell
    if isinstance(profile, Profile):
        found, twell = profile, _completed(checkpoint, profile, "the profile", weights)
    elif profile:
        found = read_profile(profile)
        twell = _completed(checkpoint, found, profile, weights)
    return _Measured(
        profile=found,
        evaluation=read_evaluation(Path(evaluation), weights) if evaluation else None,
        bench=read_bench(Path(bench), weights, quantize) if bench else None,
        twell=twell,
    )


def _write_model(
    checkpoint: Checkpoint,
    folder: Path,
    measured: _Measured,
    quantize: str | None,
    original: Checkpoint | None,
) -> tuple[dict[str, Any], float]:
    """Write all but the card. Returns config.json and the largest value that was measured."""
    twell = measured.twell
    if quantize is not None:
        origin = checkpoint.hub_id or checkpoint.path.resolve().name
        twell = twell | {"rounded_from": encodable(origin)}
    form, largest = _form_of(checkpoint, measured.profile)
    config = {key: value for key, value in checkpoint.config.items() if key not in CODE}
    config["twell"] = twell | form
    if form:
        config[checkpoint.activation_key] = _stock_activation(twell["source_act"])
    config |= _write_weights_and_bundle(checkpoint, folder, form, quantize, original)
    config |= for_all_readers(config)
    copy_side_files(checkpoint, folder)
    write_config(folder, config)
    return config, largest


def _form_of(checkpoint: Checkpoint, profile: Profile | None) -> tuple[dict[str, Any], float]:
    """As `choose_form`; no form for a model that was only rounded."""
    from twellctl.models.silu_form import choose_form

    if checkpoint.is_only_rounded:
        return {}, 0.0
    layers = profile.layers if profile else ()
    return choose_form(layers, checkpoint.ffn.num_layers, checkpoint.silu_form)


def _stock_activation(source_act: str) -> str:
    """The activation that config.json names: the family's own, which other engines support."""
    return source_act if source_act in GATED and source_act not in SILU else "silu"


def _write_card(checkpoint: Checkpoint, folder: Path, name: str, measured: _Measured) -> None:
    write_card(
        folder,
        name,
        checkpoint.path,
        profile=measured.profile,
        evaluation=measured.evaluation,
        bench=measured.bench,
    )


def _note_shortcomings(
    checkpoint: Checkpoint, *, is_evaluated: bool, largest: float, note: Callable[[str], None]
) -> None:
    """Note what the user of an export should know; `largest` is a value that its profile saw."""
    if not is_evaluated and not checkpoint.is_only_converted:
        note(
            "this model's answers to tasks have not been measured: 'twellctl eval "
            f"{checkpoint.name} --reference MODEL --tasks FILE --json FILE', then export --eval"
        )
    checkpoint.beware_of_noise(note)
    _note_lost_map(checkpoint, note)
    try:
        checkpoint.require_tokenizer()
    except TwellError as error:
        note(f"beware: {error}, and into the export")
    if largest > FP16:
        note(
            f"run it in bf16: in fp16 a value of {largest:.0f}, which the profile saw, is infinite"
        )


def _note_lost_map(checkpoint: Checkpoint, note: Callable[[str], None]) -> None:
    """Note layers whose map, that of a fit, another trainer has changed."""
    from twellctl.models.linear_map import layers_without_map

    if lost := layers_without_map(checkpoint):
        note(
            f"beware: the last {checkpoint.map_neurons} neurons no longer share one gate in {lost} "
            f"of {checkpoint.ffn.num_layers} layers, as the map of a fit does: another trainer has "
            "made them neurons that may fire, and decoding may be no faster than dense; fine-tune "
            "the fit again, with twellctl finetune"
        )


def _exported(
    out: Path, config: dict[str, Any], *, is_profiled: bool, has_original: bool
) -> Exported:
    twell, ours = config["twell"], config.get("auto_map")
    return Exported(
        out=out,
        class_name=ours["AutoModelForCausalLM"].split(".")[-1] if ours else None,
        tile=twell["tile"],
        slots=tuple(twell["slots"]),
        profiled=is_profiled,
        sharpness=least_sharpness(twell) if ours else None,
        scheme=scheme_of(config),
        over_twell_in_vllm=is_served_over_twell(config),
        has_original=has_original,
    )


def _write_weights_and_bundle(
    checkpoint: Checkpoint,
    folder: Path,
    form: dict,
    quantize: str | None,
    original: Checkpoint | None,
) -> dict:
    """Write both, for weights that are sound, and what the `original` has besides; what config.json
    says of classes and weights. Without a `form` there is no bundle."""
    from twellctl.bundle.twell_bundle import make_bundle, write_bundle
    from twellctl.bundle.twell_model import config_entries
    from twellctl.models.exportable import exportable_skeleton
    from twellctl.models.loading import read_tensors, refuse_not_finite
    from twellctl.models.quantised import kept_layers, round_tensors, rounded_layers
    from twellctl.models.with_original import equal_tensors, write_original

    model = exportable_skeleton(checkpoint)
    kind = checkpoint.config["model_type"]
    entries = config_entries(type(model).__name__, kind) if form else {}
    for shard in checkpoint.shards:
        own_file(checkpoint.path / shard)
    apart = set() if original is None else equal_tensors(original, checkpoint)
    refuse_not_finite(checkpoint, read_tensors(checkpoint))
    if quantize is None:
        tensors = _in_silu_form(checkpoint, form, first=apart)
    else:
        scheme, layers = SCHEMES[quantize], rounded_layers(checkpoint, model)
        apart -= {f"{layer}.weight" for layer in layers}
        tensors = round_tensors(_in_silu_form(checkpoint, form, first=apart), layers, scheme)
        entries["quantization_config"] = scheme.quantization_config(kept_layers(model))
    files = [folder / name for name in write_shards(tensors, folder, apart=apart)]
    if original is not None:
        file_of = {name: file.name for file in files for name in read_header(file)}
        write_original(original, folder, {name: file_of[name] for name in apart})
    if form:
        is_rounded = quantize is not None or checkpoint.scheme is not None
        write_bundle(folder, make_bundle(bundle_files(), files if is_rounded else ()))
    return entries


def _in_silu_form(
    checkpoint: Checkpoint, form: dict, first: Container[str]
) -> Iterator[tuple[str, "Tensor"]]:
    """Names and tensors in SiLU form, if there is a `form`, those that are named in `first` before
    others; `TwellError` for a weight that overflows its dtype."""
    from twellctl.models.loading import read_tensors
    from twellctl.models.silu_form import factors, scaled

    by = factors(checkpoint.stored, form, checkpoint.ffn.intermediate_size) if form else {}
    names = sorted(checkpoint.stored, key=lambda name: name not in first)
    for name, tensor in read_tensors(checkpoint, names, packed=True):
        if name in by:
            tensor = scaled(tensor, by[name])
            if not tensor.abs().amax().isfinite():
                raise TwellError(
                    f"{checkpoint.name}: {name} times its sharpness is too large for "
                    f"{checkpoint.stored[name].dtype}: take a model whose gates are smaller"
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
