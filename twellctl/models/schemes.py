"""The schemes that weights of linear layers can be stored in instead of bf16. No torch.

One row of `SCHEMES` for each. How weights are rounded to a scheme is in quantised.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twellctl.bundle import twell_config


@dataclass(frozen=True)
class Scheme:
    """One way to store weights.

    `name` is what `export --quantize` takes, `title` what people read, and `numbers` says what is
    rounded to what. `dtype` is that of the weights as safetensors spells it. `quantization_config`
    makes that block of config.json from the names of the layers that stay as they are; `is_scheme`
    recognises the config.json of an export. `package` is what the stock class needs to load it.
    """

    name: str
    title: str
    numbers: str
    dtype: str
    package: str
    quantization_config: Callable[[list[str]], dict[str, Any]]
    is_scheme: Callable[[dict[str, Any]], bool]


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="fp8",
            title="FP8",
            numbers="weights in e4m3 with one scale per row, inputs rounded to e4m3 with one scale "
            "per token",
            dtype="F8_E4M3",
            package="compressed-tensors",
            quantization_config=twell_config.quantization_config,
            is_scheme=twell_config.is_fp8,
        ),
    )
}


def scheme_of(config: dict[str, Any]) -> Scheme | None:
    """The scheme of an export with this config.json; None if its weights are not quantised."""
    return next((scheme for scheme in SCHEMES.values() if scheme.is_scheme(config)), None)


def title_of(name: str | None) -> str:
    """What people call the precision of linear layers that are exported with `--quantize name`."""
    return "bf16" if name is None else SCHEMES[name].title
