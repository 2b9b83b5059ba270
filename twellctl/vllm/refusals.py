"""What the plugin does not serve: one line that says what and what to do."""

import re
from typing import Any

from twellctl.bundle.twell_config import check_twell, is_silu_form, rounded_kind, stays_silu
from twellctl.errors import TwellError
from twellctl.models.in_vllm import DENSELY

VERSIONS = ((0, 26), (0, 32))  # of vLLM, the first and the last that models were built in
_ADDED = ("total_num_heads", "total_num_kv_heads")  # by vLLM, to compressed-tensors' block


def check_version(version: str) -> None:
    """`TwellError` for a vLLM that is not one of `VERSIONS`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not VERSIONS[0] <= tuple(map(int, found.groups())) <= VERSIONS[1]:
        first, last = (".".join(map(str, version)) for version in VERSIONS)
        raise TwellError(
            f"vLLM {version} is not one that twellctl's plugin knows: install vLLM {first} to "
            f"{last}, or serve densely with {DENSELY}"
        )


def check_served(model: str, config: Any, *, quantized: bool, lora: bool) -> None:
    """`TwellError` unless the export `model` with its `config` can be served over TwELL.

    `quantized`: whether vLLM would quantise its weights; `lora`: whether it would take adapters.
    """
    densely = f"or serve it densely with {DENSELY}"
    try:
        twell = check_twell(config.twell, config.num_hidden_layers)
    except ValueError as error:
        raise TwellError(f"{model}: in config.json {error}: export it again") from error
    if not is_silu_form(twell) or config.hidden_act != "silu":
        raise TwellError(
            f"{model}: its config.json is not that of a ReLU model written as SiLU: export it again"
        )
    is_rounded = _kind_of(config) is not None
    if getattr(config, "quantization_config", None) and not is_rounded:
        raise TwellError(
            f"{model}: in config.json quantization_config is not that of an export: export it again"
        )
    if "densities" not in twell:
        raise TwellError(
            f"{model}: its config.json holds no profile, from which plans come: export it with "
            f"--profile (see twellctl profile), {densely}"
        )
    if quantized and not is_rounded:
        raise TwellError(f"{model}: it was exported in bf16: drop --quantization, {densely}")
    if lora:
        raise TwellError(f"{model}: exports do not support adapters: drop --enable-lora, {densely}")


def why_densely(config: Any) -> str | None:
    """Why the plugin leaves a model of ours with this `config` to vLLM's own class; None: it does
    not."""
    if _kind_of(config) == "int4":
        return "its weights are in 4 bits"
    sharpness = config.twell.get("sharpness") if isinstance(config.twell, dict) else None
    if any(map(stays_silu, sharpness if isinstance(sharpness, list) else [])):
        return "some of its neurons are SiLU, and fire for every token"
    return None


def check_densely(model: str, config: Any) -> None:
    """`TwellError` unless vLLM's own class computes what the `model` with its `config` does."""
    if config.hidden_act == "relu":  # where they know SiLU
        raise TwellError(
            f"{model}: vLLM knows no ReLU in this model's class: serve what 'twellctl export' "
            "makes of it"
        )


def _kind_of(config: Any) -> str | None:
    """To which kind its weights are rounded, by what config.json had."""
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict):
        stored = {key: value for key, value in stored.items() if key not in _ADDED}
    return rounded_kind(vars(config) | {"quantization_config": stored})
