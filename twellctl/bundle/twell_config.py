"""The "twell" block of config.json and the format's numbers. Standard library only.

    "twell": {"format_version": 1, "tile": int, "slots": [int a layer],
              "source": str, "source_act": str, "densities": [float a layer],
              "map_neurons": int, "rounded_from": str}

`densities`, the share of neurons that fire, are there if a profile measured them. `source_act` is
the activation of the model that this one was made from, `source` its id on the hub, if it has one.
`map_neurons` is of a fitted model: so many of the last neurons of every FFN always fire, for they
share one gate row; together they are a linear map of what the FFN reads. They are not part of any
density.
`rounded_from` names the model whose weights an FP8 export has (twell_fp8_config.py).
"""

FORMAT_VERSION = 1
TILE = 256
SLOTS = 64  # of 256: what no profile has measured yet may fire up to 25 % in every tile
MAX_COLUMNS = 65536  # a column is 16 bits
ROUTES = ("auto", "twell", "dense")  # see sparse_ffn


def new_twell(num_layers: int, source: str | None, source_act: str) -> dict:
    """The block before anything was measured: safe slots."""
    twell = {
        "format_version": FORMAT_VERSION,
        "tile": TILE,
        "slots": [SLOTS] * num_layers,
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
    if "thresholds" in twell:
        raise ValueError(
            '"twell" holds thresholds, of a version before sparse models were plain ReLU: '
            "fine-tune again from the SiLU model with this version"
        )
    if type(map_neurons := twell.get("map_neurons", 0)) is not int or map_neurons < 0:
        raise ValueError(f'"twell" must have map_neurons of 0 or more, got {map_neurons!r}')
    slots, tile = twell.get("slots"), twell.get("tile")
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
    return twell
