"""The safetensors files of a model folder, and the tensors in each, read without torch.

Only headers are read, and the shapes that are stored with packed weights.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from twellctl.bundle.twell_config import PACKED, PACKED_IN_ONE, PACKED_PARTS
from twellctl.errors import TwellError, reason
from twellctl.files.strict_json import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ORIGINAL, ABOVE = "twell_original", "../"  # a model in a model's folder, some of whose files it has
FLOATS = ("F32", "F16", "BF16")
_NUMBERED = re.compile(r"-of-0*(\d+)\.safetensors$")
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file, the `shard`; its dtype as safetensors spells it.

    `parts`: the tensors, in their shards, that a weight is stored as if it is packed; then its
    dtype and shape are those that it has once it is unpacked.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    parts: tuple["TensorInfo", ...] = ()


def read_shards(name: str, path: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """All tensors of the folder `path`, and its files; `name` is what the user called it.

    Files of the folder above are for one that is called `ORIGINAL`.
    """
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE), (SINGLE,)
    if not (path / INDEX).is_file():
        why = _without_index(path) or other_weights(path)
        why = why or f"has no weights: give a folder with {SINGLE} or {INDEX}"
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
        inside = shard.removeprefix(ABOVE) if path.name == ORIGINAL else shard
        if Path(inside).name != inside:
            raise TwellError(f"{path / INDEX} names {shard}, outside the folder: copy it again")
        if not os.path.isfile(path / shard):  # Path's raises for a name that is too long
            raise TwellError(f"{path / INDEX} names {shard}, which is missing: fetch it again")
        found = read_header(path / shard, shard)  # what another shard has as well counts there
        tensors |= {name: it for name, it in found.items() if weight_map.get(name, shard) == shard}
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].shard != shard:
            raise TwellError(
                f"{path / shard} lacks {tensor}, which {INDEX} puts there: fetch both again"
            )
    return tensors, shards


def with_weights(
    name: str, path: Path, tensors: dict[str, TensorInfo], group_size: int | None
) -> dict[str, TensorInfo]:
    """`tensors` of the folder `path` with a weight in the place of the parts of each packed one.

    `TwellError` where parts are missing or do not belong together, where a weight is there twice,
    and where not `group_size` inputs share a scale, as config.json has it.
    """
    layers = [stored.removesuffix(PACKED) for stored in tensors if stored.endswith(PACKED)]
    parts = {layer: [tensors.get(layer + end) for end in PACKED_PARTS] for layer in layers}
    made = {}
    for stored, tensor in tensors.items():
        layer, _, end = stored.rpartition(".")
        if layer not in parts or f".{end}" not in PACKED_PARTS:
            made[stored] = tensor
        elif f".{end}" == PACKED:
            weight = _packed_weight(f"{layer}.weight", parts[layer])
            if weight is None or weight.name in tensors:
                raise TwellError(
                    f"{name}: {layer} lacks its scales or its shape, or they are not those of "
                    f"{stored}, or it has a weight, too: fetch its safetensors files again"
                )
            _check_group_size(name, weight, group_size)
            made[weight.name] = weight
    _check_shapes(path, [weight for weight in made.values() if weight.parts])
    return made


def _check_shapes(path: Path, weights: list[TensorInfo]) -> None:
    """`TwellError` unless the shapes stored with packed weights, which others use, are theirs."""
    for shard in {weight.parts[2].shard for weight in weights}:
        with safe_open(path / shard, framework="np") as file:
            for weight in weights:
                if (shape := weight.parts[2]).shard != shard:
                    continue
                if (said := file.get_tensor(shape.name).tolist()) != list(weight.shape):
                    raise TwellError(
                        f"{path / shard}: {shape.name} says {said}, its weight is "
                        f"{list(weight.shape)}: fetch it again"
                    )


def _packed_weight(name: str, parts: list[TensorInfo | None]) -> TensorInfo | None:
    there = tuple(part for part in parts if part is not None)
    if len(there) < len(parts) or [len(part.shape) for part in there] != [2, 2, 1]:
        return None
    packed, scale, shape = there
    (N, eights), (rows, groups) = packed.shape, scale.shape
    K = eights * PACKED_IN_ONE
    dtypes = packed.dtype, shape.dtype
    if rows != N or not groups or K % groups or dtypes != ("I32", "I64"):
        return None
    return TensorInfo(name, scale.dtype, (N, K), packed.shard, there)


def _check_group_size(name: str, weight: TensorInfo, wanted: int | None) -> None:
    found = weight.shape[1] // weight.parts[1].shape[1]
    if found != wanted:
        raise TwellError(
            f"{name}: in {weight.parts[1].name} {found} inputs share a scale, by config.json's "
            f"group_size {wanted}: fetch config.json and weights again, from one place"
        )


def read_header(path: Path, shard: str | None = None) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, which its model calls `shard`, None: by its name;
    `TwellError` if it is truncated or no such file."""
    try:
        with path.open("rb"), safe_open(path, framework="np") as file:  # which says why not
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(
                    name, part.get_dtype(), tuple(part.get_shape()), shard or path.name
                )
                for name, part in slices.items()
            }
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise TwellError(
            f"{path} is truncated or not a safetensors file ({reason(error)}): copy it again"
        ) from error


def _without_index(path: Path) -> str:
    """What to do with the safetensors files in `path`, which no index names; "" if there are none.

    `path` has neither `SINGLE` nor `INDEX`.
    """
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if not found:
        return ""
    if found[0].startswith("consolidated"):
        return f"holds {found[0]}, whose names are not those of transformers: take {SINGLE} instead"
    numbers = [_NUMBERED.search(file) for file in found]
    wanted = max((int(number[1]) for number in numbers if number), default=len(found))
    if len(found) == wanted == 1:
        return f"holds {found[0]}, but no {SINGLE}: rename it"
    if len(found) < wanted:
        return f"holds {len(found)} of {wanted} weight files, and no {INDEX}: fetch the others, too"
    return f"holds {found[0]} and so on, but no {INDEX}, which says what lies where: fetch it, too"


def other_weights(path: Path) -> str:
    """Why the weights in `path` (a folder or file) cannot be taken; "" if there are no such."""
    files = list(path.iterdir()) if path.is_dir() else [path]
    found = sorted({file.suffix for file in files if file.suffix in OTHER_FORMATS})
    if not found:
        return ""
    return (
        f"holds {', '.join(found)} weights: take the model in safetensors, in the form for "
        "transformers (-hf), or save it so (from_pretrained, then save_pretrained)"
    )
