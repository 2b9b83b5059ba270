"""Rotary settings of an export's config.json, under the names that any reader looks for.

transformers 5 writes `rope_parameters`. transformers 4, mlx-lm and others know `rope_theta`,
`rope_scaling` and `partial_rotary_factor` instead, and take defaults where these are missing.
"""

import copy
import warnings
from typing import Any

_OF_THEIR_OWN = ("rope_theta", "partial_rotary_factor")  # keys beside `rope_scaling`
_NO_SIZES = ("auto_map", "twell", "quantization_config")
_OLD_LONGROPE = ("short_factor", "long_factor")  # with "type", all that transformers 4 takes


def for_all_readers(config: dict[str, Any]) -> dict[str, Any]:
    """Entries for `config`, a config.json, that give the rotary settings under both sets of names.

    There are none for a model without rotary embeddings, and none if transformers would read
    something else with them.
    """
    from twellctl.models.loading import quiet_transformers

    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        parameters = _as_read(config)
        entries = _entries(config, parameters)
        return entries if entries and _as_read(config | entries) == parameters else {}


def _entries(config: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """`parameters`, as transformers reads them from `config`, under both sets of names."""
    by_layer = {kind: one for kind, one in parameters.items() if isinstance(one, dict)}
    whole = by_layer.get("full_attention", {}) if by_layer else parameters
    if "rope_theta" not in whole:
        return {}
    entries = {key: whole[key] for key in _OF_THEIR_OWN if key in whole}
    if "rope_theta" in (sliding := by_layer.get("sliding_attention", {})):
        entries["rope_local_base_freq"] = sliding["rope_theta"]
    if scaling := _scaling(whole):
        entries["rope_scaling"] = config.get("rope_scaling") or scaling
    return entries | {"rope_parameters": parameters}


def _scaling(whole: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` as transformers 4 has it; None if positions are not scaled."""
    kind = whole.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "longrope":
        return {"type": kind} | {key: whole[key] for key in _OLD_LONGROPE if key in whole}
    return {key: whole[key] for key in whole if key not in _OF_THEIR_OWN}


def _as_read(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of the rotary settings of `config`; {} if there are none."""
    from transformers import AutoConfig

    # which fills in what is missing in the dicts themselves
    plain = copy.deepcopy({key: value for key, value in config.items() if key not in _NO_SIZES})
    try:
        found = getattr(AutoConfig.for_model(**plain), "rope_parameters", None)
    except Exception:  # whatever a family says of names that it does not know
        return {}
    return _without_old_name(found or {})


def _without_old_name(parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` without "type", by which "rope_type" was called."""
    return {
        key: _without_old_name(value) if isinstance(value, dict) else value
        for key, value in parameters.items()
        if key != "type"
    }
