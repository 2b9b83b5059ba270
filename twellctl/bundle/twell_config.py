"""The "twell" block of config.json and the format's numbers. Standard library only.

    "twell": {"format_version": 1, "tile": int, "slots": [int a layer],
              "thresholds": [float a layer], "source": str, "source_act": str,
              "densities": [float a layer]}

`densities`, the share of neurons that fire, are there if a profile measured them. `source_act` is
the activation of the model that this one was made from, `source` its id on the hub, if it has one.
"""

import struct

FORMAT_VERSION = 1
TILE = 256
SLOTS = 64  # of 256: what no profile has measured yet may fire up to 25 % in every tile
MAX_COLUMNS = 65536  # a column is 16 bits


def new_twell(num_layers: int, source: str | None, source_act: str) -> dict:
    """The block before anything was measured: zero thresholds, safe slots."""
    twell = {
        "format_version": FORMAT_VERSION,
        "tile": TILE,
        "slots": [SLOTS] * num_layers,
        "thresholds": [0.0] * num_layers,
        "source_act": source_act,
    }
    return twell if source is None else twell | {"source": source}


def check_twell(twell: object, num_layers: int) -> dict:
    """The block itself if it is sound; `ValueError` says what is wrong with it."""
    if not isinstance(twell, dict):
        raise ValueError(f'"twell" must be an object, got {twell!r}')
    if twell.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f'"twell" has format_version {twell.get("format_version")!r}, '
            f"this code reads {FORMAT_VERSION}"
        )
    slots, thresholds, tile = twell.get("slots"), twell.get("thresholds"), twell.get("tile")
    densities = twell.get("densities", [0.0] * num_layers)
    lists = (("slots", slots), ("thresholds", thresholds), ("densities", densities))
    for key, values in lists:
        if not isinstance(values, list) or len(values) != num_layers:
            raise ValueError(f'"twell" must hold {num_layers} {key}, one a layer, got {values!r}')
    if type(tile) is not int or not 1 <= tile <= MAX_COLUMNS:
        raise ValueError(f'"twell" must have a tile of 1 to {MAX_COLUMNS}, got {tile!r}')
    if bad := [s for s in slots if type(s) is not int or not 1 <= s <= tile]:
        raise ValueError(f'"twell" must have slots of 1 to {tile} (its tile), got {bad[0]!r}')
    numbers = (int, float)
    if bad := [t for t in thresholds if type(t) not in numbers or storable_threshold(t) != t]:
        raise ValueError(f'"twell" must have thresholds that bf16 holds exactly, got {bad[0]!r}')
    if bad := [d for d in densities if type(d) not in numbers or not 0 <= d <= 1]:
        raise ValueError(f'"twell" must have densities of 0 to 1, got {bad[0]!r}')
    return twell


def storable_threshold(threshold: float) -> float:
    """The nearest threshold that bf16 holds exactly; `ValueError` unless finite and >= 0."""
    if not 0 <= threshold <= 3.3e38:
        raise ValueError(f"a threshold must be finite and >= 0, got {threshold}")
    bits = struct.unpack("<I", struct.pack("<f", abs(threshold)))[0]
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", rounded))[0]
