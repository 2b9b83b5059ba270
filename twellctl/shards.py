"""The safetensors files of a model folder, without torch: which there are, which tensors lie where.

Only headers are read. What is missing, truncated or no safetensors file is refused by its name.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from twellctl.errors import TwellError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
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
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TwellError(f"{path / INDEX} has no weight_map: copy it again")
    tensors: dict[str, TensorInfo] = {}
    shards = tuple(sorted({str(shard) for shard in weight_map.values()}))
    for shard in shards:
        if Path(shard).name != shard:
            raise TwellError(f"{path / INDEX} names {shard}, outside the folder: copy it again")
        if not (path / shard).is_file():
            raise TwellError(f"{path / INDEX} names {shard}, which is missing: fetch it again")
        tensors |= read_header(path / shard)
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
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: _tensor_info(name, entry, path.name, 8 + length) for name, entry in header.items()
        }
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TwellError(f"{path} is no safetensors file (bad header): copy it again") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        wrong = "is truncated" if size < end else "goes on behind its last tensor"
        raise TwellError(f"{path} {wrong}: {size} bytes of {end}; copy it again")
    return tensors


def read_json(path: Path) -> dict:
    """The JSON object in `path`; `TwellError` if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TwellError(f"{path} is not valid JSON ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise TwellError(f"{path} holds no JSON object: copy it again")
    return content


def other_weights(path: Path) -> str:
    """Why the weights in `path` (a folder or file) cannot be taken; "" if there are no such."""
    files = path.iterdir() if path.is_dir() else [path]
    found = sorted({OTHER_FORMATS[file.suffix] for file in files if file.suffix in OTHER_FORMATS})
    if not found:
        return ""
    return (
        f"holds {', '.join(found)} weights: save it as safetensors first "
        "(transformers: from_pretrained, then save_pretrained)"
    )


def _tensor_info(name: str, entry: dict, shard: str, data_start: int) -> TensorInfo:
    start, stop = entry["data_offsets"]
    shape = tuple(map(int, entry["shape"]))
    dtype = str(entry["dtype"])
    if dtype in FLOATS and stop - start != FLOATS[dtype] * math.prod(shape):
        raise ValueError(f"{name} has {stop - start} bytes for {list(shape)} of {dtype}")
    return TensorInfo(name, dtype, shape, shard, data_start + start, data_start + stop)
