"""The schemes that weights of linear layers can be stored in instead of bf16. No torch.

One row of `SCHEMES` for each. How weights are rounded to a scheme is in quantised.py.
"""

from dataclasses import dataclass
from typing import Any

from twellctl.bundle import twell_config


@dataclass(frozen=True)
class Scheme:
    """One way to store weights.

    `name` is what `export --quantize` takes, `title` what people read, and `numbers` says what is
    rounded to what. `kind` is that of the weights in the bundle (twell_spec.KINDS), `dtype` their
    type as safetensors spells it. `package` is what the stock class needs to load it.
    """

    name: str
    title: str
    numbers: str
    kind: str
    dtype: str
    package: str

    def quantization_config(self, kept: list[str]) -> dict[str, Any]:
        """That block of config.json; `kept` are the layers that stay as they are."""
        return twell_config.quantization_config(self.kind, kept)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="fp8",
            title="FP8",
            numbers="weights in e4m3 with one scale per row, inputs rounded to e4m3 with one scale "
            "per token",
            kind="e4m3",
            dtype="F8_E4M3",
            package="compressed-tensors",
        ),
    )
}


def scheme_of(config: dict[str, Any]) -> Scheme | None:
    """The scheme of an export with this config.json; None if its weights are not quantised."""
    kind = twell_config.rounded_kind(config)
    return next((scheme for scheme in SCHEMES.values() if scheme.kind == kind), None)


def title_of(name: str | None) -> str:
    """What people call the precision of linear layers that are exported with `--quantize name`."""
    return "bf16" if name is None else SCHEMES[name].title
