"""The schemes that weights of linear layers can be stored in instead of bf16. No torch.

`SCHEMES` are those of `export --quantize`, which rounds each weight for itself (quantised.py).
`INT4` is that of `convert --bits 4`, which rounds them inside a fit (fitting/grid.py).
"""

from dataclasses import dataclass
from typing import Any

from twellctl.bundle import twell_config
from twellctl.models.shards import FLOATS


@dataclass(frozen=True)
class Scheme:
    """One way to store weights.

    `name` is what `export --quantize` takes, `title` what people read, and `numbers` says what is
    rounded to what. `kind` is that of the weights in the bundle (twell_config.py), `dtypes` what
    they may be as safetensors spells it, once unpacked. `package` is what the stock class needs to
    load it.
    """

    name: str
    title: str
    numbers: str
    kind: str
    dtypes: tuple[str, ...]
    package: str

    @property
    def by_export(self) -> bool:
        """Whether `export --quantize` rounds to it, after a model was measured; else `convert`."""
        return self.name in SCHEMES

    def quantization_config(self, kept: list[str], group_size: int | None = None) -> dict[str, Any]:
        """That block of config.json; `kept` are the layers that stay as they are."""
        return twell_config.quantization_config(self.kind, kept, group_size)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="fp8",
            title="FP8",
            numbers="weights in e4m3 with one scale per row, inputs rounded to e4m3 with one scale "
            "per token",
            kind="e4m3",
            dtypes=("F8_E4M3",),
            package="compressed-tensors",
        ),
    )
}

INT4 = Scheme(
    name="int4",
    title="4 bits",
    numbers="weights in 4 bits with one scale for each group of inputs, inputs as they are",
    kind="int4",
    dtypes=FLOATS,
    package="compressed-tensors",
)


def scheme_of(config: dict[str, Any]) -> Scheme | None:
    """The scheme of a model with this config.json; None if its weights are not quantised."""
    kind = twell_config.rounded_kind(config)
    return next((scheme for scheme in (*SCHEMES.values(), INT4) if scheme.kind == kind), None)


def title_of(name: str | None) -> str:
    """What people call the precision of linear layers that are exported with `--quantize name`."""
    return "bf16" if name is None else SCHEMES[name].title
