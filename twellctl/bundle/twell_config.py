"""The "twell" block of config.json and the format's numbers. Standard library only.

    "twell": {"format_version": 1, "tile": int, "slots": [int a layer],
              "source": str, "source_revision": str, "source_act": str,
              "densities": [float a layer],
              "map_neurons": int, "rounded_from": str,
              "activation": "relu", "sharpness": [int a layer], "down_share": [int a layer]}

`densities`, the share of neurons that fire, are there if a profile measured them. `source_act` is
the activation of the model that this one was made from, `source` its id on the hub, if it has one,
`source_revision` the branch, tag or commit of it, if one was named.
`map_neurons` is of a fitted model: so many of the last neurons of every FFN always fire, for they
share one gate row; together they are a linear map of what the FFN reads. They are not part of any
density.
`rounded_from` names the model whose weights an export rounded (the end of this file).

The last three are of a ReLU model in *SiLU form*, which every export has: `hidden_act` is silu, and
of a neuron of sharpness k the gate row is times k, the up row is times share / k, and W_down is
divided by `down_share` of its layer. All are powers of two, and silu(k g) u / k is relu(g) u to
within 0.28 |u| / k: whoever knows SiLU alone computes that, whoever reads these keys ReLU. A
layer's sharpness may be a list, one a neuron: neurons of sharpness 1 are SiLU and always fire. Of a
family whose activation was another, like GELU, `hidden_act` is that one: as sharp it is ReLU, too.
"""

import os
from collections.abc import Mapping
from typing import Any

FORMAT_VERSION = 1
TILE = 256
SLOTS = 64  # of 256: what no profile has measured yet may fire up to 25 % in every tile
MAX_COLUMNS = 65536  # a column is 16 bits
ROUTES = ("auto", "twell", "dense")  # see sparse_ffn
LEAST_SHARPNESS = 16  # of a neuron that is read as ReLU
FP16 = 65504  # its largest number
SILU_FORM = ("activation", "sharpness", "down_share")


def requested(route: str) -> str:
    """`route` of the model if it says one, else that of TWELL_ROUTE, else "auto"."""
    if route != "auto":
        return check_route(route)
    return check_route(os.environ.get("TWELL_ROUTE") or "auto", "TWELL_ROUTE")


def check_route(route: str, name: str = "route") -> str:
    """`route` itself; `ValueError` with its `name` if there is no such route."""
    if route not in ROUTES:
        raise ValueError(f"{name} must be one of {', '.join(ROUTES)}, got {route!r}")
    return route


def new_twell(
    num_layers: int, source: str | None, source_act: str, source_revision: str | None = None
) -> dict:
    """The block before anything was measured: safe slots."""
    twell = {
        "format_version": FORMAT_VERSION,
        "tile": TILE,
        "slots": [SLOTS] * num_layers,
        "source_act": source_act,
    }
    named = {"source": source, "source_revision": source_revision}
    return twell | {key: name for key, name in named.items() if name is not None}


def mapped_neurons(config: object) -> int:
    """How many of the last neurons of each FFN are a map, by a model's config."""
    return (getattr(config, "twell", None) or {}).get("map_neurons", 0)


def density_with_map(twell: Mapping[str, Any], density: float | None, N: int) -> float | None:
    """Of N neurons, map included, the share that fires, by the `density` of the others."""
    mapped = twell.get("map_neurons", 0) / N
    return None if density is None else mapped + (1 - mapped) * density


def check_twell(twell: object, num_layers: int) -> dict:
    """The block itself if it is sound; `ValueError` says what is wrong with it."""
    if not isinstance(twell, dict):
        raise ValueError(f'"twell" must be an object, got {twell!r}')
    if twell.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f'"twell" has format_version {twell.get("format_version")!r}, '
            f"this code reads {FORMAT_VERSION}"
        )
    if "thresholds" in twell:
        raise ValueError(
            '"twell" holds thresholds, of a version before sparse models were plain ReLU: '
            "fine-tune again from the SiLU model with this version"
        )
    if type(map_neurons := twell.get("map_neurons", 0)) is not int or map_neurons < 0:
        raise ValueError(f'"twell" must have map_neurons of 0 or more, got {map_neurons!r}')
    slots: Any = twell.get("slots")
    tile = twell.get("tile")
    densities = twell.get("densities", [0.0] * num_layers)
    for key, values in (("slots", slots), ("densities", densities)):
        if not isinstance(values, list) or len(values) != num_layers:
            raise ValueError(f'"twell" must hold {num_layers} {key}, one a layer, got {values!r}')
    if type(tile) is not int or not 1 <= tile <= MAX_COLUMNS:
        raise ValueError(f'"twell" must have a tile of 1 to {MAX_COLUMNS}, got {tile!r}')
    if bad := [s for s in slots if type(s) is not int or not 1 <= s <= tile]:
        raise ValueError(f'"twell" must have slots of 1 to {tile} (its tile), got {bad[0]!r}')
    if bad := [d for d in densities if type(d) not in (int, float) or not 0 <= d <= 1]:
        raise ValueError(f'"twell" must have densities of 0 to 1, got {bad[0]!r}')
    if twell.keys() & set(SILU_FORM):
        _check_silu_form(twell, num_layers)
    return twell


def is_silu_form(twell: Mapping) -> bool:
    """Whether a model with this block, a sound one, is ReLU and written as SiLU."""
    return "activation" in twell


def stays_silu(sharpness: int | list[int]) -> list[bool]:
    """Which neurons of a layer of this sharpness are SiLU, `[N]`; empty: all are ReLU."""
    by_neuron = [sharpness] if isinstance(sharpness, int) else sharpness
    return [k == 1 for k in by_neuron] if 1 in by_neuron else []


def least_sharpness(form: Mapping) -> int:
    """That of all neurons that are read as ReLU; 1 if there are none."""
    layers = (k if isinstance(k, list) else [k] for k in form["sharpness"])
    return min((k for numbers in layers for k in numbers if k > 1), default=1)


def _check_silu_form(twell: dict, num_layers: int) -> None:
    if twell.get("activation") != "relu":
        raise ValueError(f'"twell" must have activation relu, got {twell.get("activation")!r}')
    for key, least in (("sharpness", LEAST_SHARPNESS), ("down_share", 1)):
        values = twell.get(key)
        if not isinstance(values, list) or len(values) != num_layers:
            raise ValueError(f'"twell" must hold {num_layers} {key}, one a layer, got {values!r}')
        lists = (v if isinstance(v, list) and key == "sharpness" else [v] for v in values)
        for k in (k for numbers in lists for k in numbers):
            if type(k) is not int or not 0 < k <= 1 << 16 or k & (k - 1) or 1 < k < least:
                raise ValueError(f'"twell" must hold {key} that are powers of two, got {k!r}')


# ---- models whose weights are rounded
#
# The formats are those of compressed-tensors, which transformers (with that package) and vLLM read.
# Kinds of weights are named as in twell_spec.KINDS; int4 is a way to store bf16. Each linear layer
# but those of `ignore` is stored in parts:
#
# e4m3 is `float-quantized`: a weight in e4m3 [N, K] and a weight_scale, float32 [N, 1]; the layer's
# weight is weight * weight_scale. It rounds its input to e4m3 as it comes, with a scale for each
# token.
#
# int4 is `pack-quantized`, symmetric, with a scale for each group of inputs (twell_int4.py).

WEIGHT_SCALE = ".weight_scale"  # behind the name of a layer
PACKED = ".weight_packed"
PACKED_PARTS = (PACKED, WEIGHT_SCALE, ".weight_shape")
PACKED_IN_ONE = 8  # codes of four bits in an int32
_METHOD = "compressed-tensors"
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True}


def _in_e4m3(group_size: int | None) -> dict:
    return {
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _E4M3 | {"strategy": "channel", "dynamic": False},
                "input_activations": _E4M3 | {"strategy": "token", "dynamic": True},
            }
        },
    }


def _in_int4(group_size: int | None) -> dict:
    weights = _INT4 | {"strategy": "group", "group_size": group_size, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"format": "pack-quantized", "config_groups": groups}


_FORMATS = {"e4m3": _in_e4m3, "int4": _in_int4}


def quantization_config(kind: str, ignore: list[str], group_size: int | None = None) -> dict:
    """The block "quantization_config" of a model whose linear layers are rounded to `kind`.

    `ignore` names those that are not. `group_size`: inputs that share a scale, where a kind has
    such.
    """
    common = {"quant_method": _METHOD, "quantization_status": "compressed", "ignore": ignore}
    return common | _FORMATS[kind](group_size)


def group_size_of(found: Mapping) -> int | None:
    """How many inputs share a scale, by a block "quantization_config"; None: it does not say."""
    try:
        size = found["config_groups"]["group_0"]["weights"]["group_size"]
    except (KeyError, TypeError):
        return None
    return size if type(size) is int and size > 0 else None


def rounded_kind(config: Mapping) -> str | None:
    """To which kind the linear layers of a model are rounded, by its config.json; None: to none.

    None, too, for what is no model of ours.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict) or "twell" not in config:
        return None
    if not isinstance(ignore := found.get("ignore"), list):
        return None
    size = group_size_of(found)
    return next((k for k in _FORMATS if found == quantization_config(k, ignore, size)), None)
