"""The files that belong to an export, each guarded by the sha256 that twell_manifest.json lists."""

import hashlib
import json
from pathlib import Path, PurePosixPath

from transformers.utils import cached_file

from .twell_config import FORMAT_VERSION

MANIFEST = "twell_manifest.json"


def read_bundle(model: str | Path, **source) -> dict[str, bytes]:
    """{name: content} of an export's bundled files (folder or hub id), each equal to its sha256.

    `source` goes to transformers' `cached_file` (revision, cache_dir, token...). `ValueError` names
    the first file that is missing, was changed, or would lie outside the folder.
    """
    bundle = {MANIFEST: _read(model, MANIFEST, source)}
    for name, digest in _digests(model, bundle[MANIFEST]).items():
        bundle[name] = _read(model, name, source)
        if hashlib.sha256(bundle[name]).hexdigest() != digest:
            raise ValueError(f"{model}: bundled file {name} was changed: export the model again")
    return bundle


def _digests(model: str | Path, manifest_bytes: bytes) -> dict[str, str]:
    try:
        manifest = json.loads(manifest_bytes)
        version, digests = manifest["format_version"], dict(manifest["sha256"])
        if not digests:
            raise ValueError("it lists no file")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{model}: bundled file {MANIFEST} was changed: export the model again"
        ) from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{model}: {MANIFEST} has format_version {version!r}, "
            f"this code reads {FORMAT_VERSION}: export the model again"
        )
    for name in digests:
        _check_name(model, name)
    return digests


def _check_name(model: str | Path, name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(
            f"{model}: bundled file {name!r} would lie outside the folder: export the model again"
        )


def write_bundle(folder: Path, bundle: dict[str, bytes]) -> None:
    """Write the files of a bundle into `folder`; `ValueError` for a name that leads out of it."""
    for name in bundle:
        _check_name(folder, name)
    for name, content in bundle.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def make_bundle(files: dict[str, bytes]) -> dict[str, bytes]:
    """`files` with the manifest that lists them: format version and sha256 of each."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = {"format_version": FORMAT_VERSION, "sha256": digests}
    return {MANIFEST: (json.dumps(manifest, indent=2) + "\n").encode()} | files


def _read(model: str | Path, name: str, source: dict) -> bytes:
    try:
        return Path(cached_file(str(model), name, **source)).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{model}: bundled file {name} is missing: export the model again"
        ) from error
