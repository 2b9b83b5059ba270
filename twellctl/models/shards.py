"""The safetensors files of a model folder, without torch: which there are, which tensors lie where.

Only headers are read, as strictly as the safetensors library reads them: what it would refuse is
refused here, by its name.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from twellctl.errors import TwellError, reason, shown
from twellctl.files.strict_json import parse_json, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F32", "F16", "BF16")
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
MAX_TENSORS = 100_000  # a dense model of a thousand layers has a tenth of it
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
OTHER_FORMATS = {
    ".bin": "PyTorch pickle (.bin)",
    ".pt": "PyTorch pickle (.pt)",
    ".pth": "PyTorch pickle (.pth)",
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".h5": "TensorFlow (.h5)",
    ".msgpack": "Flax (.msgpack)",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: dtype as safetensors spells it, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    stop: int


def read_shards(name: str, path: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """All tensors of the folder `path`, and its files; `name` is what the user called it."""
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE), (SINGLE,)
    if not (path / INDEX).is_file():
        why = other_weights(path) or f"has no weights: give a folder with {SINGLE} or {INDEX}"
        raise TwellError(f"{name} {why}")
    index = read_json(path / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TwellError(f"{path / INDEX} has no weight_map: copy it again")
    if not isinstance(index.get("metadata"), dict):
        raise TwellError(
            f"{path / INDEX} has no metadata, without which transformers does not load it: add "
            '"metadata": {} to it'
        )
    tensors: dict[str, TensorInfo] = {}
    shards = tuple(sorted({str(shard) for shard in weight_map.values()}))
    for shard in shards:
        if Path(shard).name != shard:
            raise TwellError(f"{path / INDEX} names {shard}, outside the folder: copy it again")
        if not os.path.isfile(path / shard):  # Path's raises for a name that is too long
            raise TwellError(f"{path / INDEX} names {shard}, which is missing: fetch it again")
        found = read_header(path / shard)  # what another shard has as well counts there
        tensors |= {name: it for name, it in found.items() if weight_map.get(name, shard) == shard}
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].shard != shard:
            raise TwellError(
                f"{path / shard} lacks {tensor}, which {INDEX} puts there: fetch both again"
            )
    return tensors, shards


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; `TwellError` if it is truncated or no such file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise TwellError(f"{path} is truncated or no safetensors file: copy it again")
            header = file.read(length)
        tensors = _tensors(header, path.name, 8 + length)
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TwellError(
            f"{path} is no safetensors file (bad header: {reason(error)}): copy it again"
        ) from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        wrong = "is truncated" if size < end else "goes on behind its last tensor"
        raise TwellError(f"{path} {wrong}: {size} bytes of {end}; copy it again")
    return tensors


def other_weights(path: Path) -> str:
    """Why the weights in `path` (a folder or file) cannot be taken; "" if there are no such."""
    files = list(path.iterdir()) if path.is_dir() else [path]
    found = sorted({OTHER_FORMATS[file.suffix] for file in files if file.suffix in OTHER_FORMATS})
    if not found:
        return ""
    if "GGUF" in found or "GGML" in found:
        return "holds GGUF weights: take the safetensors model that they were made from"
    if any(path.is_dir() and file.name.startswith("consolidated.") for file in files):
        return "holds weights in their maker's own layout: take the form for transformers (-hf)"
    return (
        f"holds {', '.join(found)} weights: save it as safetensors first "
        "(transformers: from_pretrained, then save_pretrained)"
    )


def _tensors(header: bytes, shard: str, data_start: int) -> dict[str, TensorInfo]:
    """The tensors of a header, by name; `ValueError` says what is wrong with it."""
    if not header.startswith(b"{"):
        raise ValueError("it does not begin with {")
    entries = parse_json(header)
    if len(entries) > MAX_TENSORS:
        raise ValueError(f"it has {len(entries)} tensors, more than {MAX_TENSORS}")
    metadata = entries.pop("__metadata__", {})
    if metadata is not None and not _is_text_by_text(metadata):
        raise ValueError("its __metadata__ must be texts by name")
    tensors = {
        name: _tensor_info(name, entry, shard, data_start) for name, entry in entries.items()
    }
    in_order = sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop))
    starts = [tensor.start for tensor in in_order]
    ends = [data_start, *(tensor.stop for tensor in in_order)]
    for tensor, start, end in zip(in_order, starts, ends, strict=False):
        if start != end:
            wrong = "overlaps the tensor before it" if start < end else "begins behind a gap"
            raise ValueError(f"{shown(tensor.name)} {wrong}")
    return tensors


def _tensor_info(name: str, entry: object, shard: str, data_start: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)):
        raise ValueError(f"{shown(name)} needs a dtype, a shape and data_offsets of whole numbers")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{shown(name)} has data_offsets {shown(offsets)}")
    start, stop = offsets
    if dtype not in _BITS:
        raise ValueError(f"{shown(name)} is of an unknown dtype {shown(dtype)}")
    if 8 * (stop - start) != _BITS[dtype] * _num_elements(shape):
        raise ValueError(f"{shown(name)} has {stop - start} bytes for {shown(shape)} of {dtype}")
    return TensorInfo(name, dtype, tuple(shape), shard, data_start + start, data_start + stop)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _num_elements(shape: list[int]) -> int:
    """Their product; `ValueError` where a product on the way there does not fit in 64 bits."""
    count = 1
    for size in shape:
        if (count := count * size) >= 2**63:
            raise ValueError(f"{shown(shape)} has too many elements")
    return count


def _is_text_by_text(metadata: object) -> bool:
    return isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
