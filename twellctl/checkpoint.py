"""A model folder without torch: its config, what its safetensors files hold, what its FFNs look like.

Every command opens its MODEL here, so that a folder which cannot work is refused before anything is
loaded or written. Nothing here reads a weight, except `fingerprint`. Below that, the few ways in which
commands carry parts of one folder over to the next.
"""

import hashlib
import json
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import MAX_COLUMNS, check_twell, new_twell
from twellctl.errors import TwellError
from twellctl.outputs import link_or_copy

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SILU = ("silu", "swish")
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
OTHER_FORMATS = {
    ".bin": "PyTorch pickle (.bin)",
    ".pt": "PyTorch pickle (.pt)",
    ".pth": "PyTorch pickle (.pth)",
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".h5": "TensorFlow (.h5)",
    ".msgpack": "Flax (.msgpack)",
}
NOT_CARRIED = {*OTHER_FORMATS, ".safetensors", ".py", ".onnx"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FFN_WEIGHT = re.compile(r"(.+)\.(gate_proj|up_proj|gate_up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: dtype as safetensors spells it, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    stop: int


@dataclass(frozen=True)
class FfnShape:
    """The gated FFNs of a model: all of `[N, K]`, `fused` when gate and up are one weight."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    fused: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checked model folder. `name` is what the user called it, `path` where it lies."""

    name: str
    path: Path
    config: dict
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    ffn: FfnShape

    @property
    def activation(self) -> str:
        return self.config["hidden_act"]

    @property
    def is_silu(self) -> bool:
        return self.activation in SILU

    @property
    def twell(self) -> dict:
        """The "twell" block of config.json, checked; a default one for a ReLU model that has none."""
        if "twell" not in self.config:
            return new_twell(self.ffn.num_layers, str(self.path.resolve()), self.activation)
        try:
            return check_twell(self.config["twell"], self.ffn.num_layers)
        except ValueError as error:
            raise TwellError(f"{self.name}: config.json's {error}") from error

    def require_relu(self) -> None:
        """Refuse a model whose FFNs are not ReLU (yet)."""
        if self.is_silu:
            raise TwellError(
                f"{self.name} is a SiLU model: make it ReLU with "
                f"'twellctl convert {self.name} OUT', then fine-tune"
            )
        if self.activation != "relu":
            raise TwellError(
                f"{self.name} has hidden_act {self.activation!r}: twellctl works on SiLU models "
                "made ReLU by 'twellctl convert'"
            )

    def require_tokenizer(self) -> None:
        """Refuse a folder without a tokenizer."""
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
        if not any((self.path / name).is_file() for name in names):
            raise TwellError(
                f"{self.name} has no tokenizer (no {' or '.join(names[:2])}): "
                "copy the tokenizer files of its original beside the weights"
            )


def open_checkpoint(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Read and check a local folder, or a hub id (downloaded to the hub's cache).

    `TwellError` names what is wrong: not a folder, no config, no safetensors, a missing or truncated
    shard, a quantised, MoE, multimodal or non-gated model, remote code.
    """
    name, path = str(model), Path(model)
    if not path.exists():
        path = _download(name, revision)
    if not path.is_dir():
        raise TwellError(f"{name} is no model folder: give the folder that holds config.json")
    config = _read_json(path / "config.json", f"{name} has no config.json: is it a model folder?")
    _refuse_unsupported(name, config)
    tensors, shards = _read_shards(name, path)
    ffn = _ffn_shape(name, config, tensors)
    return Checkpoint(name, path, config, tensors, shards, ffn)


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over name, dtype, shape and bytes of all tensors in the order of their names.

    Sharding and config do not change it. It reads every weight once.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with (checkpoint.path / tensor.shard).open("rb") as shard:
            shard.seek(tensor.start)
            left = tensor.stop - tensor.start
            while left:
                block = shard.read(min(left, 1 << 24))
                if not block:
                    raise TwellError(f"{checkpoint.path / tensor.shard} ended early: copy it again")
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def link_shards(checkpoint: Checkpoint, folder: Path) -> None:
    """The weights as they are: linked where the disk allows, else copied."""
    for shard in checkpoint.shards:
        link_or_copy(checkpoint.path / shard, folder / shard)
    if checkpoint.shards != (SINGLE,):
        shutil.copyfile(checkpoint.path / INDEX, folder / INDEX)


def copy_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer, generation config, licence and the like: all but config.json, weights and code."""
    left_out = {"config.json", INDEX, "twell_manifest.json"}
    for source in sorted(checkpoint.path.iterdir()):
        if source.name.startswith(".") or source.name in left_out or source.suffix in NOT_CARRIED:
            continue
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
        elif source.name == "additional_chat_templates":
            shutil.copytree(source, folder / source.name, copy_function=shutil.copyfile)


def write_config(folder: Path, config: dict) -> None:
    """config.json as transformers writes it."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; `TwellError` if it is truncated or no such file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length + 8 > size:
                raise TwellError(f"{path} is truncated or no safetensors file: copy it again")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        tensors = {
            name: TensorInfo(
                name,
                entry["dtype"],
                tuple(entry["shape"]),
                path.name,
                start + entry["data_offsets"][0],
                start + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        }
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TwellError(f"{path} is no safetensors file (bad header): copy it again") from error
    end = max((tensor.stop for tensor in tensors.values()), default=start)
    if end != size:
        raise TwellError(f"{path} is truncated: {size} bytes of {end}; copy it again")
    return tensors


def _download(name: str, revision: str | None) -> Path:
    if not _HUB_ID.fullmatch(name):
        raise TwellError(f"{name} does not exist: give a model folder or a hub id like owner/model")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja", "*.txt", "*.md", "LICENSE*"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TwellError(
            f"{name} is no local folder and could not be fetched from the hub: {reason}"
        ) from error


def _read_json(path: Path, if_missing: str) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TwellError(if_missing) from None
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TwellError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TwellError(f"{path} holds no JSON object")
    return content


def _refuse_unsupported(name: str, config: dict) -> None:
    if "quantization_config" in config or "compression_config" in config:
        quantised = config.get("quantization_config") or config.get("compression_config") or {}
        method = quantised.get("quant_method", "unknown method")
        raise TwellError(
            f"{name} is quantised ({method}): twellctl needs the original bf16, fp16 or fp32 weights"
        )
    if "text_config" in config and "hidden_act" not in config:
        raise TwellError(f"{name} is multimodal (text_config): twellctl takes text-only models")
    auto_map = config.get("auto_map") or {}
    if auto_map and "twell" not in config:
        raise TwellError(
            f"{name} needs remote code (auto_map): twellctl takes models that transformers knows"
        )
    if "model_type" not in config:
        raise TwellError(f"{name}: config.json has no model_type; is it a transformers model?")
    if not isinstance(config.get("hidden_act"), str):
        seen = config.get("hidden_activation") or config.get("activation_function")
        found = f"its activation is {seen!r}" if seen else "config.json has no hidden_act"
        raise TwellError(f"{name} is no gated SiLU model: {found}")


def _read_shards(name: str, path: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE), (SINGLE,)
    if not (path / INDEX).is_file():
        found = {OTHER_FORMATS[f.suffix] for f in path.iterdir() if f.suffix in OTHER_FORMATS}
        if found:
            raise TwellError(
                f"{name} holds {', '.join(sorted(found))} weights: save it as safetensors first "
                "(in transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
            )
        raise TwellError(f"{name} has no weights: neither {SINGLE} nor {INDEX}")
    weight_map = _read_json(path / INDEX, "").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TwellError(f"{path / INDEX} has no weight_map: copy it again")
    tensors: dict[str, TensorInfo] = {}
    shards = tuple(sorted({str(shard) for shard in weight_map.values()}))
    for shard in shards:
        if Path(shard).name != shard:
            raise TwellError(f"{path / INDEX} names {shard}, which is outside the folder")
        if not (path / shard).is_file():
            raise TwellError(f"{path / INDEX} names {shard}, which is missing: fetch it again")
        tensors |= read_header(path / shard)
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].shard != shard:
            raise TwellError(f"{path / shard} lacks {tensor}, which {INDEX} puts there")
    return tensors, shards


def _ffn_shape(name: str, config: dict, tensors: dict[str, TensorInfo]) -> FfnShape:
    experts = [key for key in config if re.fullmatch(r"(num|n)_(local_|routed_)?experts", key)]
    if any(config[key] for key in experts) or any(".experts." in tensor for tensor in tensors):
        raise TwellError(f"{name} is a mixture of experts: twellctl takes dense models only")
    ffns: dict[str, dict[str, TensorInfo]] = {}
    for tensor_name, tensor in tensors.items():
        if match := _FFN_WEIGHT.fullmatch(tensor_name):
            ffns.setdefault(match[1], {})[match[2]] = tensor
    gated = [
        {"gate_proj", "up_proj", "down_proj"} == set(ffn) or {"gate_up_proj", "down_proj"} == set(ffn)
        for ffn in ffns.values()
    ]
    num_layers = config.get("num_hidden_layers")
    if not ffns or not all(gated) or len(ffns) != num_layers:
        raise TwellError(
            f"{name} ({config['model_type']}) has {sum(gated)} gated FFNs in {num_layers} layers: "
            "twellctl takes models with gate_proj, up_proj and down_proj (or gate_up_proj) in each"
        )
    shapes = {(part, tensor.shape) for ffn in ffns.values() for part, tensor in ffn.items()}
    down = next(shape for part, shape in shapes if part == "down_proj")
    if len(shapes) > 3 or len(down) != 2:
        raise TwellError(f"{name} has FFNs of several shapes: twellctl takes one shape for all layers")
    hidden_size, intermediate_size = down
    wrong = {t.dtype for ffn in ffns.values() for t in ffn.values()} - set(FLOATS)
    if wrong:
        raise TwellError(
            f"{name} holds {', '.join(sorted(wrong))} weights: twellctl needs bf16, fp16 or fp32"
        )
    if intermediate_size > MAX_COLUMNS:
        raise TwellError(
            f"{name} has {intermediate_size} neurons a layer: TwELL holds at most {MAX_COLUMNS}"
        )
    fused = any(part == "gate_up_proj" for part, _ in shapes)
    return FfnShape(len(ffns), hidden_size, intermediate_size, fused)
