"""What a config.json and the headers of its weights must be; what its FFNs look like. No torch."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from twellctl.bundle.twell_config import MAX_COLUMNS
from twellctl.errors import TwellError, shown
from twellctl.models.schemes import scheme_of
from twellctl.models.shards import FLOATS, TensorInfo

ACTIVATION_KEYS = ("hidden_act", "hidden_activation")  # the first that a config has
_BY_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES = (
    *_BY_LAYER,
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
)
_OTHER_DTYPES = {"BOOL", "I32", "I64"}  # of masks and positions
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
TIE = 'set "tie_word_embeddings": true in config.json if its head is its embeddings'
_KEYS_VALUES = re.compile(r"(.+\.self_attn)\.[kv]_proj\.weight")
_FFN_WEIGHT = re.compile(r"(.+)\.(gate_proj|up_proj|gate_up_proj|down_proj)\.weight")
_EXPERTS = re.compile(r"(\w+_)?(num|n)_(local_|routed_)?experts")
_FUSED, _SPLIT = {"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class FfnShape:
    """The gated FFNs of a model: all of `[N, K]`."""

    num_layers: int
    hidden_size: int
    intermediate_size: int


def refuse_quantised(name: str, config: dict) -> None:
    """`TwellError` for a model that config.json says is quantised."""
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise TwellError(
            f"{name} is quantised ({method or 'unknown method'}): "
            "take the original bf16, fp16 or fp32 model"
        )


def refuse_unsupported(name: str, config: dict) -> None:
    """`TwellError` for what no command works on: multimodal, remote code, not causal."""
    if towers := [key for key in config if key in ("text_config", "vision_config", "audio_config")]:
        raise TwellError(f"{name} is multimodal ({towers[0]}): take a text-only model")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise TwellError(f"{name}: config.json has no model_type: give a model of transformers")
    if config.get("auto_map") and "twell" not in config and not _transformers_has(model_type):
        raise TwellError(
            f"{name} ({model_type}) needs remote code (auto_map): take a model transformers knows"
        )
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise TwellError(
            f"{name}: config.json's architectures must be a list, got {shown(classes)}: copy it "
            "again"
        )
    causal = ("ForCausalLM", "LMHeadModel")
    if classes and not any(str(cls).endswith(causal) for cls in classes):
        raise TwellError(f"{name} is a {classes[0]}: take a causal language model (...ForCausalLM)")
    for key in SIZES:
        _refuse_wrong_size(name, config, key)
    for key in TOKEN_IDS:
        _refuse_wrong_id(name, config, key)
    if not isinstance(tied := config.get("tie_word_embeddings", False), bool):
        raise TwellError(
            f"{name}: config.json's tie_word_embeddings must be true or false, got {shown(tied)}: "
            f"correct it (false if there is an {HEAD}, else true)"
        )
    if "/" in str(config.get("_attn_implementation") or config.get("attn_implementation") or ""):
        raise TwellError(
            f"{name}: config.json names attention code of the hub (_attn_implementation): take "
            "that line out"
        )
    if not isinstance(config.get(activation_key(config)), str):
        seen = config.get("activation_function")
        found = f"its activation is {shown(seen)}" if seen else "config.json has no hidden_act"
        raise TwellError(f"{name} ({model_type}) is not a gated SiLU model: {found}; take another")


def _refuse_wrong_size(name: str, config: dict, key: str) -> None:
    """`TwellError` unless `key` is a size. Some families lack one, or have one for each layer."""
    value = config.get(key)
    if value is None or (isinstance(value, list) and key in _BY_LAYER):
        return
    if type(value) is not int or not 1 <= value < 2**31:
        raise TwellError(
            f"{name}: config.json's {key} must be a whole number from 1, got {shown(value)}: "
            "copy it again"
        )


def _refuse_wrong_id(name: str, config: dict, key: str) -> None:
    """`TwellError` unless `key` is the id of a token, or null. There may be several end tokens."""
    value = config.get(key)
    several = isinstance(value, list) and key == "eos_token_id"
    if value is None or all(type(one) is int for one in (value if several else [value])):
        return
    raise TwellError(
        f"{name}: config.json's {key} must be the id of a token, or null for none, got "
        f"{shown(value)}: correct it"
    )


def activation_key(config: dict) -> str:
    """What this config calls the activation of its FFNs."""
    return next((key for key in ACTIVATION_KEYS if config.get(key)), ACTIVATION_KEYS[0])


def _transformers_has(model_type: str) -> bool:
    """Whether transformers knows the family without remote code. Imports nothing."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return False
    folder = model_type.replace("-", "_")
    return (Path(package.origin).parent / "models" / folder).is_dir()


def refuse_dtypes(name: str, tensors: dict[str, TensorInfo], taken: set[str]) -> None:
    """Refuse tensors that are neither floats nor of the dtypes `taken`."""
    odd = {tensor.dtype for tensor in tensors.values()} - {*FLOATS, *_OTHER_DTYPES, *taken}
    odd |= {n.rsplit(".", 1)[-1] for n in tensors if n.endswith((".qweight", ".weight_packed"))}
    if odd:
        raise TwellError(
            f"{name} holds {', '.join(sorted(odd))} weights: "
            "take the original bf16, fp16 or fp32 model"
        )


def ffn_shape(name: str, config: dict, tensors: dict[str, TensorInfo]) -> FfnShape:
    """What the gated FFNs look like; `TwellError` if there is not one in each layer, all alike."""
    experts = [key for key in config if _EXPERTS.fullmatch(key) and config[key]]
    if experts or any(".experts." in tensor for tensor in tensors):
        raise TwellError(f"{name} is a mixture of experts: take a dense model")
    ffns = ffns_of(tensors)
    gated = [ffn for ffn in ffns.values() if set(ffn) in (_FUSED, _SPLIT)]
    num_layers = config.get("num_hidden_layers")
    if not gated or len(gated) != len(ffns) or len(ffns) != num_layers:
        raise TwellError(
            f"{name} ({config['model_type']}) has {len(gated)} gated FFNs in {num_layers} layers: "
            "take a model with gate_proj, up_proj and down_proj (or gate_up_proj) in each"
        )
    if scheme := scheme_of(config):
        return _common_shape(name, gated, scheme.dtypes, "export the model again")
    return _common_shape(name, gated, FLOATS, "take a model with equal FFNs in all layers")


def ffns_of(tensors: dict[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """By the name of each FFN its weights, by what they are."""
    ffns: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        if match := _FFN_WEIGHT.fullmatch(name):
            ffns.setdefault(match[1], {})[match[2]] = tensor
    return ffns


def compare_sizes(name: str, config: dict, tensors: dict[str, TensorInfo], ffn: FfnShape) -> None:
    """Refuse a config.json that contradicts the weights, as far as their headers show it.

    Only keys that are there are compared: families differ in their defaults and names. The rest is
    compared by transformers when it loads the model.
    """
    again = "fetch config.json and weights again, from one place"
    given = {key: config[key] for key in SIZES if type(config.get(key)) is int}
    # as in Gemma 4, layers have heads of several sizes
    if config.get("per_layer_config") or config.get("global_head_dim"):
        given.pop("num_key_value_heads", None)
    for key, size in (
        ("hidden_size", ffn.hidden_size),
        ("intermediate_size", ffn.intermediate_size),
    ):
        if given.get(key, size) != size:
            raise TwellError(f"{name}: {key} is {given[key]}, but its FFNs have {size}: {again}")
    for tensor in tensors.values():
        rows = _rows_by_config(tensor.name, given, tensors)
        if rows is not None and tensor.shape[:1] != (rows,):
            raise TwellError(
                f"{name}: {tensor.name} is {list(tensor.shape)}, by config.json it has {rows} rows:"
                f" {again}"
            )
    untied = config.get("tie_word_embeddings") is False
    if untied and EMBEDDINGS in tensors and HEAD not in tensors:
        raise TwellError(
            f"{name} lacks {HEAD}, which tie_word_embeddings false asks for: {TIE}, else {again}"
        )


def _rows_by_config(
    tensor: str, sizes: dict[str, int], tensors: dict[str, TensorInfo]
) -> int | None:
    """Rows of a weight by what config.json says; None if it does not say."""
    if tensor in (EMBEDDINGS, HEAD):
        return sizes.get("vocab_size")
    if not (match := _KEYS_VALUES.fullmatch(tensor)) or "num_key_value_heads" not in sizes:
        return None
    head_dim, heads = sizes.get("head_dim"), sizes.get("num_attention_heads")
    if head_dim is None and heads is not None:  # a family's own default, or what queries have
        queries = tensors.get(f"{match[1]}.q_proj.weight")
        if queries is not None and queries.shape[:1] == (sizes.get("hidden_size"),):
            head_dim = sizes["hidden_size"] // heads
    return head_dim and head_dim * sizes["num_key_value_heads"]


def _common_shape(
    name: str, ffns: list[dict[str, TensorInfo]], dtypes: tuple[str, ...], remedy: str
) -> FfnShape:
    """`TwellError`, with the `remedy`, unless all `ffns` have one shape and one of `dtypes`."""
    K, N = ffns[0]["down_proj"].shape if len(ffns[0]["down_proj"].shape) == 2 else (0, 0)
    expected = {"down_proj": (K, N), "gate_proj": (N, K), "up_proj": (N, K)}
    expected["gate_up_proj"] = (2 * N, K)
    for ffn in ffns:
        for part, tensor in ffn.items():
            if tensor.shape != expected[part] or tensor.dtype not in dtypes:
                raise TwellError(
                    f"{name}: {tensor.name} is {list(tensor.shape)} of {tensor.dtype}, expected "
                    f"{list(expected[part])} of {' or '.join(dtypes)}: {remedy}"
                )
    if N > MAX_COLUMNS:
        raise TwellError(f"{name} has {N} neurons a layer: TwELL holds at most {MAX_COLUMNS}")
    return FfnShape(len(ffns), K, N)
