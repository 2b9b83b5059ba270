"""The files that belong to an export, each guarded by the sha256 that twell_manifest.json lists.

Of an export whose weights are rounded it lists these, too.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from transformers.utils import cached_file

from .twell_config import FORMAT_VERSION

MANIFEST = "twell_manifest.json"


def read_bundle(model: str | Path, **source) -> dict[str, bytes]:
    """{name: content} of an export's bundled files (folder or hub id), each equal to its sha256.

    `source` goes to transformers' `cached_file` (revision, cache_dir, token...). `ValueError` names
    the first file that is missing, was changed, or would lie outside the folder. Weights that the
    manifest lists are compared, too.
    """
    bundle = {MANIFEST: _read(model, MANIFEST, source)}
    files, weights = _digests(model, bundle[MANIFEST])
    for name, digest in files.items():
        bundle[name] = _read(model, name, source)
        if hashlib.sha256(bundle[name]).hexdigest() != digest:
            raise _changed(model, name)
    for name, digest in weights.items():
        if _digest_of(_find(model, name, source)) != digest:
            raise _changed(model, name)
    return bundle


def _digests(model: str | Path, manifest_bytes: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """sha256 by name, of the bundled files and of the weights."""
    try:
        manifest = json.loads(manifest_bytes)
        version, digests = manifest["format_version"], dict(manifest["sha256"])
        weights = dict(manifest.get("weights_sha256", {}))
        if not digests:
            raise ValueError("it lists no file")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _changed(model, MANIFEST) from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{model}: {MANIFEST} has format_version {version!r}, "
            f"this code reads {FORMAT_VERSION}: export the model again"
        )
    for name in (*digests, *weights):
        _check_name(model, name)
    return digests, weights


def _changed(model: str | Path, name: str) -> ValueError:
    return ValueError(f"{model}: bundled file {name} was changed: export the model again")


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


def make_bundle(files: dict[str, bytes], weights: Iterable[Path] = ()) -> dict[str, bytes]:
    """`files` with the manifest that lists them: format version and sha256 of each.

    It guards the files `weights`, too, which lie in the folder of the export.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = {"format_version": FORMAT_VERSION, "sha256": digests}
    if guarded := {path.name: _digest_of(path) for path in sorted(weights)}:
        manifest["weights_sha256"] = guarded
    return {MANIFEST: (json.dumps(manifest, indent=2) + "\n").encode()} | files


def _read(model: str | Path, name: str, source: dict) -> bytes:
    return _find(model, name, source).read_bytes()


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _find(model: str | Path, name: str, source: dict) -> Path:
    try:
        return Path(cached_file(str(model), name, **source))
    except OSError as error:
        raise ValueError(
            f"{model}: bundled file {name} is missing: export the model again"
        ) from error
