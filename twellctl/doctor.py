"""twellctl doctor: what is on this machine, what works, what to install; is a folder sound."""

import json
from dataclasses import dataclass
from pathlib import Path

from twellctl.checkpoint import Checkpoint, open_checkpoint
from twellctl.errors import TwellError
from twellctl.machine import (
    Finding,
    find_cupy,
    find_driver,
    find_gpu,
    find_libraries,
    find_nvrtc,
    line,
    torch_cuda,
)
from twellctl.resources import bundle_files


@dataclass(frozen=True)
class Diagnosis:
    """All findings; of the machine, and of the folder if one was given."""

    machine: tuple[Finding, ...]
    folder: tuple[Finding, ...]

    @property
    def broken(self) -> list[str]:
        """What is wrong with the folder."""
        return [finding.what for finding in self.folder if finding.state == "bad"]


def doctor(out: str | Path | None = None) -> Diagnosis:
    """Look at this machine, and at the model folder `out`. Does not raise for what it finds."""
    cuda = torch_cuda()
    driver, driver_cuda = find_driver()
    found = (
        find_libraries(),
        driver,
        find_gpu(driver, cuda),
        find_cupy(cuda),
        find_nvrtc(cuda, driver_cuda),
    )
    return Diagnosis((*found, _works(*found)), () if out is None else _find_folder(out))


def _works(libraries: Finding, driver: Finding, gpu: Finding, *rest: Finding) -> Finding:
    if libraries.state != "ok":
        return Finding("works", "bad", "not surely, before the libraries fit")
    where = "GPU" if gpu.state == "ok" else "CPU"
    what = f"all commands, on the {where}; TwELL in plain PyTorch, without kernels yet"
    return Finding("works", "ok", what)


def _find_folder(out: str | Path) -> tuple[Finding, ...]:
    try:
        checkpoint = open_checkpoint(out)
        thresholds = checkpoint.twell["thresholds"]
    except TwellError as error:
        return (Finding("checkpoint", "bad", str(error)),)
    ffn = checkpoint.ffn
    what = (
        f"{checkpoint.config['model_type']}, {checkpoint.activation}, {ffn.num_layers} gated FFNs "
        f"{ffn.hidden_size} x {ffn.intermediate_size}, {len(checkpoint.tensors)} tensors in "
        f"{len(checkpoint.shards)} files, thresholds {min(thresholds):g} to {max(thresholds):g}"
    )
    return Finding("checkpoint", "ok", what), _find_bundle(checkpoint)


def _find_bundle(checkpoint: Checkpoint) -> Finding:
    exported = "modeling_twell" in json.dumps(checkpoint.config.get("auto_map"))
    if not exported and not (checkpoint.path / "twell_manifest.json").exists():
        return Finding("bundle", "none", "none: this is no export")
    try:
        from twellctl.bundle.twell_bundle import make_bundle, read_bundle

        bundle = read_bundle(checkpoint.path)
    except ImportError as error:
        return Finding("bundle", "bad", f"{checkpoint.name}: bundle not read: {line(error)}")
    except ValueError as error:
        return Finding("bundle", "bad", str(error))
    if not exported:
        what = f"{checkpoint.name}: config.json lost its auto_map: export the model again"
        return Finding("bundle", "bad", what)
    ours = make_bundle({name: path.read_bytes() for name, path in bundle_files().items()})
    if bundle == ours:
        return Finding("bundle", "ok", f"{len(bundle)} files, intact, as this twellctl writes them")
    advice = f"twellctl export {checkpoint.name} OUT would renew it"
    return Finding("bundle", "ok", f"{len(bundle)} files, intact, of another version", advice)
