"""Writes tensors into safetensors files of at most 5 GB, with one file in memory at a time."""

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from twellctl.files.strict_json import json_text
from twellctl.models.shards import INDEX, SINGLE

SHARD_BYTES = 5 * 10**9


def write_shards(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    apart: Container[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Write the files, a tensor that is larger alone, and an index if there are many.

    Tensors that are named in `apart` share no file with others, if they come one after the other.
    `elsewhere`: files that hold further tensors of the model, by name. Returns the names of the
    files. `OSError` for a full disk.
    """
    parts: list[list[str]] = []
    num_bytes = 0
    for part in _parts(tensors, apart):
        save_tensors(part, folder / _part_name(len(parts)))
        parts.append(list(part))
        num_bytes += sum(tensor.nbytes for tensor in part.values())
        part.clear()  # the generator holds it, too
    count = len(parts)
    files = tuple(f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))
    if count == 1 and not elsewhere:
        files = (SINGLE,)
    else:
        weight_map = {n: file for file, part in zip(files, parts, strict=True) for n in part}
        weight_map |= elsewhere
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json_text(index), encoding="utf-8")
    for number, file in enumerate(files):
        (folder / _part_name(number)).rename(folder / file)
    return files


def _part_name(number: int) -> str:
    """The name of a file while the number of files is not known."""
    return f"part-{number}.safetensors"


def _parts(
    tensors: Iterable[tuple[str, Tensor]], apart: Container[str]
) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    filled, was_apart = 0, False
    for name, tensor in tensors:
        changes, was_apart = was_apart != (name in apart), name in apart
        if part and (changes or filled + tensor.nbytes > SHARD_BYTES):
            yield part
            part, filled = {}, 0
        part[name] = tensor
        filled += tensor.nbytes
    yield part


def save_tensors(tensors: dict[str, Tensor], file: Path, **metadata: str) -> None:
    """Write one file; `OSError` for a full disk."""
    try:
        save_file(tensors, file, metadata={"format": "pt"} | metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error  # a full disk arrives as this, too
