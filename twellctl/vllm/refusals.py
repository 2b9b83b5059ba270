"""What the plugin does not serve: one line that says what and what to do."""

import re
from typing import Any

from twellctl.bundle.twell_config import check_twell
from twellctl.errors import TwellError
from twellctl.models.in_vllm import DENSELY

VERSIONS = ((0, 26), (0, 32))  # of vLLM, the first and the last that models were built in


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
    if config.hidden_act != "relu":
        raise TwellError(
            f"{model}: in config.json hidden_act is {config.hidden_act!r}, of an export it is "
            "'relu': export it again"
        )
    if getattr(config, "quantization_config", None):
        raise TwellError(f"{model}: an FP8 export is served densely: add {DENSELY}")
    if "densities" not in twell:
        raise TwellError(
            f"{model}: its config.json holds no profile, from which routes come: export it with "
            f"--profile (see twellctl profile), {densely}"
        )
    if quantized:
        raise TwellError(f"{model}: exports are served in bf16: drop --quantization, {densely}")
    if lora:
        raise TwellError(f"{model}: exports take no adapters: drop --enable-lora, {densely}")
