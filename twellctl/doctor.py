"""twellctl doctor: what this machine has, what works, what to install, and if a folder is sound."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import least_sharpness
from twellctl.errors import TwellError, first_line
from twellctl.files.strict_json import read_json
from twellctl.heads.folder import WEIGHTS, WITHIN, is_head, open_head
from twellctl.here.kernels import (
    find_cache,
    find_kernels,
    find_nvrtc,
    find_plans,
    find_variables,
)
from twellctl.here.machine import (
    Finding,
    find_cupy,
    find_driver,
    find_gpu,
    find_libraries,
    torch_cuda,
)
from twellctl.here.resources import bundle_files
from twellctl.models.answerer import open_answerer
from twellctl.models.checkpoint import Checkpoint, checkpoint_in, located
from twellctl.models.originals import find_original
from twellctl.models.shards import ABOVE, ORIGINAL, read_header
from twellctl.vllm.installed import find_vllm


@dataclass(frozen=True)
class Diagnosis:
    """All findings on the machine, and on the folder if one was given."""

    machine: tuple[Finding, ...]
    folder: tuple[Finding, ...]

    @property
    def broken(self) -> list[str]:
        """What is wrong with the folder."""
        return [finding.what for finding in self.folder if finding.state == "bad"]


def doctor(
    model: str | Path | None = None, note: Callable[[str], None] = lambda text: None
) -> Diagnosis:
    """Check this machine, and the folder `model` if given. Findings are returned, never raised.

    On a GPU, the kernels are loaded, and compiled if they never were; `note` is called before that.
    """
    cuda = torch_cuda()
    driver, driver_cuda = find_driver()
    libraries, gpu = find_libraries(), find_gpu(driver, cuda)
    found = [libraries, driver, gpu, find_cupy(cuda), find_nvrtc(cuda, driver_cuda)]
    variables = find_variables()
    if gpu.state == "ok":
        note("loading the kernels; the first time they are compiled, some ten seconds")
    kernels = find_kernels(gpu)
    works = _works(libraries, gpu, kernels, variables)
    found += [variables, kernels, find_cache(), find_vllm(), works]
    return Diagnosis(tuple(found), () if model is None else _find_folder(model))


def _works(libraries: Finding, gpu: Finding, kernels: Finding, variables: Finding) -> Finding:
    if libraries.state != "ok":
        return Finding("works", "bad", "unclear until the libraries fit")
    if gpu.state != "ok":
        what = "all commands but bench, on the CPU; exports run over TwELL in plain PyTorch"
        return Finding("works", "ok", what)
    if kernels.state != "ok":
        exports = "exports run in plain PyTorch, without kernels"
    elif variables.state == "bad":
        return Finding("works", "bad", f"exports do not run: {variables.what}", variables.advice)
    elif os.environ.get("TWELL_ROUTE") == "dense":
        exports = "exports run densely, as TWELL_ROUTE says"
    else:
        exports = "exports run in bf16 over the kernels, where they are faster than dense"
    return Finding("works", "ok", f"all commands, on the GPU; {exports}")


def _find_folder(model: str | Path) -> tuple[Finding, ...]:
    try:
        name, path = located(model)
        if is_head(path):
            return (_find_head(name, path),)
        checkpoint = checkpoint_in(name, path)
    except TwellError as error:
        return (Finding("checkpoint", "bad", str(error)),)
    ffn, form, scheme = checkpoint.ffn, checkpoint.silu_form, checkpoint.scheme
    what = (
        f"{checkpoint.config['model_type']}, {checkpoint.activation}"
        f"{f' as SiLU of sharpness {least_sharpness(form)}' if form else ''}"
        f"{f', {scheme.title}' if scheme else ''}, {ffn.num_layers} gated FFNs "
        f"{ffn.hidden_size} x {ffn.intermediate_size}, {len(checkpoint.tensors)} tensors in "
        f"{len(checkpoint.shards)} files"
    )
    plans = find_plans(ffn.hidden_size, ffn.intermediate_size, ffn.num_layers)
    found = Finding("checkpoint", "ok", what), _find_bundle(checkpoint), plans
    within = path / WITHIN
    head = (_find_head(name, within, "this model"),) if is_head(within) else ()
    return (*found, *head, *_find_original(checkpoint))


def _find_head(name: str, path: Path, drafts_for: str | None = None) -> Finding:
    """Whether the draft head in `path` is whole, and of the sizes of its original, if that lies
    here; `name`: of what --exact takes."""
    try:
        head = open_head(name, path)
        read_header(path / WEIGHTS)
        if drafts_for or (head.source and Path(head.source).exists()):
            open_answerer(name, exact=True)
    except TwellError as error:
        return Finding("draft head", "bad", str(error))
    what = drafts_for or head.source
    how = f"for {what} with --exact" if what else "with --exact --original MODEL"
    size = (path / WEIGHTS).stat().st_size / 1e6
    return Finding("draft head", "ok", f"drafts {how}; {size:.3g} MB")


def _find_original(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Whether the original in an export is that of its fit; nothing if there is none."""
    if not (checkpoint.path / ORIGINAL).is_dir():
        return ()
    try:
        found = find_original(checkpoint)
        assert found is not None
    except TwellError as error:
        return (Finding("original", "bad", str(error)),)
    shared = sum(tensor.shard.startswith(ABOVE) for tensor in found.stored.values())
    what = f"{ORIGINAL}, {shared} of its {len(found.stored)} tensors are this model's: for --exact"
    return (Finding("original", "ok", what),)


def _find_bundle(checkpoint: Checkpoint) -> Finding:
    named, scheme = _named_code(checkpoint.path), checkpoint.scheme
    exported = any(target.startswith("modeling_twell.") for target in named)
    if not exported and not (checkpoint.path / "twell_manifest.json").exists():
        why = "every neuron fires" if checkpoint.is_only_rounded else "this is not an export"
        return Finding("bundle", "none", f"none: {why}")
    try:
        from twellctl.bundle.twell_bundle import make_bundle, read_bundle

        guarded = [checkpoint.path / shard for shard in checkpoint.shards if scheme]
        bundle, ours = read_bundle(checkpoint.path), make_bundle(bundle_files(), guarded)
    except ImportError as error:
        return Finding("bundle", "bad", f"{checkpoint.name}: bundle not read: {first_line(error)}")
    except ValueError as error:
        return Finding("bundle", "bad", str(error))
    if not named:
        what = f"{checkpoint.name}: config.json lost its auto_map: export the model again"
        return Finding("bundle", "bad", what)
    if foreign := _foreign_code(checkpoint.path, named, set(bundle)):
        what = f"{checkpoint.name}: {foreign} is no code of its manifest, but trust_remote_code "
        return Finding("bundle", "bad", f"{what}could run it: export the model again")
    if bundle == ours:
        return Finding("bundle", "ok", f"{len(bundle)} files, intact: this twellctl's own")
    what = f"{len(bundle)} files, as its own manifest lists them: of another version of twellctl, "
    advice = f"twellctl export {checkpoint.name} OUT puts this twellctl's own there"
    if scheme and scheme.by_export:
        again = f"export the bf16 model again with --quantize {scheme.name}"
        advice = f"to have this twellctl's own, {again}"
    return Finding("bundle", "ok", f"{what}or changed together with the manifest", advice)


def _named_code(folder: Path) -> list[str]:
    """The classes that `auto_map` names, "module.Class", in all JSON files of a model."""
    named: list[str | None] = []
    for file in sorted(folder.glob("*.json")):
        try:
            auto_map = read_json(file).get("auto_map") or {}
        except TwellError:
            continue
        for target in auto_map.values() if isinstance(auto_map, dict) else [str(auto_map)]:
            named += target if isinstance(target, list) else [target]
    return [str(target) for target in named if target is not None]


def _foreign_code(folder: Path, named: list[str], bundled: set[str]) -> str:
    """What remote code could run that is not `bundled`; "" if there is nothing."""
    for target in named:
        if f"{target.rsplit('.', 1)[0]}.py" not in bundled:
            return f"{target} (auto_map)"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return next((name for name in found if name not in bundled), "")
