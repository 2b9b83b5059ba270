"""What a profile holds, and its JSON: written by `twellctl profile`, read by `twellctl export`."""

from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_origin, get_type_hints

from twellctl.errors import TwellError, counted, reason, shown
from twellctl.files.outputs import write_file
from twellctl.files.strict_json import json_text, read_json
from twellctl.report.charts import Curves, Line, Panel, short_name
from twellctl.report.notebook import Shown

SCHEMA_VERSION = 1
_TAKEN = {int: (int,), float: (int, float), str: (str,)}  # of JSON
PROFILE_KEY = "nnz_mean"  # by which such a file is known


@dataclass(frozen=True)
class LayerProfile:
    """One layer: neurons that fired a token (`nnz`), and what its tiles need.

    `nnz_p99` is the smallest count that 99 % of the tokens do not exceed. `dead` neurons fired on
    no token. `overflow` is the share of tokens whose row goes to the backup, given `slots` a tile.
    `largest_gate` is the largest gate by its size before the activation, `largest_hidden` the
    largest of active gate times up: what fp16 must hold.
    """

    nnz_mean: float
    nnz_p50: int
    nnz_p99: int
    nnz_max: int
    density: float
    dead: int
    slots: int
    overflow: float
    nnz_p10: int
    nnz_p90: int
    largest_gate: float
    largest_hidden: float


@dataclass(frozen=True, kw_only=True)
class PartDensity:
    """The density of some tokens: mean of the layers, and by layer; all None for no tokens."""

    tokens: int
    density: float | None
    layers: tuple[float | None, ...]

    @classmethod
    def of(cls, fired: list[int], tokens: int, intermediate_size: int, **which: Any) -> Self:
        """From the neurons that fired in each layer, summed over the tokens."""
        places = tokens * intermediate_size
        if not places:
            return cls(tokens=tokens, density=None, layers=(None,) * len(fired), **which)
        layers = tuple(count / places for count in fired)
        density = sum(fired) / (places * len(fired))
        return cls(tokens=tokens, density=density, layers=layers, **which)


@dataclass(frozen=True, kw_only=True)
class PositionDensity(PartDensity):
    """At positions `first` to `last` of a window, counted from 0, both included."""

    first: int
    last: int

    @property
    def span(self) -> str:
        """Like "0" or "8-15"."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class KindDensity(PartDensity):
    """In text of one kind."""

    kind: str


@dataclass(frozen=True)
class Profile(Shown):
    """A measured model. `fingerprint` is that of its weights, `data` what it was measured on.

    `tokens` are those of all windows, `text_tokens` those of the text: those of a short one are in
    several windows. `intermediate_size` counts a model's own neurons, without those of a map, which
    always fire.
    """

    model: str
    fingerprint: str
    data: tuple[str, ...]
    windows: int
    seq_len: int
    tokens: int
    dtype: str
    device: str
    versions: dict[str, str]
    intermediate_size: int
    tile: int
    layers: tuple[LayerProfile, ...]
    by_position: tuple[PositionDensity, ...]
    by_kind: tuple[KindDensity, ...]
    text_tokens: int

    @property
    def distinct_tokens(self) -> int:
        """At most so many tokens of the text were read, some of them more than once."""
        return min(self.tokens, self.text_tokens)

    @property
    def nnz_mean(self) -> float:
        return sum(layer.nnz_mean for layer in self.layers) / len(self.layers)

    @property
    def density(self) -> float:
        return self.nnz_mean / self.intermediate_size

    @property
    def dead_fraction(self) -> float:
        dead = sum(layer.dead for layer in self.layers)
        return dead / len(self.layers) / self.intermediate_size

    def to_chart(self) -> Curves:
        """What fires by layer, of each kind of text if there are several, and by position."""
        N = self.intermediate_size
        low, high = ([getattr(one, p) / N for one in self.layers] for p in ("nnz_p10", "nnz_p90"))
        lines = [Line("mean, and 80% of the tokens", [x.density for x in self.layers], low, high)]
        if len(self.by_kind) > 1:
            lines += [Line(part.kind, part.layers) for part in self.by_kind]
        dead = Line("dead", [layer.dead / N for layer in self.layers])
        starts = [str(part.first) for part in self.by_position]
        spans = Line("density", [part.density for part in self.by_position])
        layers = range(len(self.layers))
        return Curves(
            title=f"{short_name(self.model)}: {self.density:.2%} of {N} neurons fire",
            panels=[
                Panel("Neurons that fire", "layer", layers, lines),
                Panel("Neurons that never fired", "layer", layers, [dead]),
                Panel(
                    "Neurons that fire, by position",
                    "position in the window, from",
                    starts,
                    [spans],
                ),
            ],
            note=f"{counted(self.windows, 'window')} of {self.seq_len} tokens",
        )

    def to_json(self) -> dict:
        """The content of the file: schema version and means first, then all fields."""
        names = ("nnz_mean", "density", "dead_fraction")
        means = {key: getattr(self, key) for key in names}
        return {"schema_version": SCHEMA_VERSION} | means | asdict(self)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the JSON whole or not at all, replacing an older one."""
    write_file(Path(path), json_text(profile.to_json()))


def read_profile(path: str | Path) -> Profile:
    """The profile in a JSON file; `TwellError` if it is none, or of another schema."""
    again = "write it again with 'twellctl profile MODEL --data FILE --json FILE'"
    content = read_json(Path(path), again)
    version = content.get("schema_version")
    if version is None:
        raise TwellError(f"{path} is not a profile (no schema_version): {again}")
    if version != SCHEMA_VERSION:
        raise TwellError(
            f"{path} has schema_version {shown(version)}, this twellctl reads {SCHEMA_VERSION}: "
            f"{again}"
        )
    try:
        found = _made(Profile, content, "")
        _check(found)
        return found
    except ValueError as error:
        raise TwellError(f"{path} is not a complete profile ({reason(error)}): {again}") from error


def _check(found: Profile) -> None:
    """`ValueError` for numbers that no figure can be made of."""
    for name in ("intermediate_size", "tokens", "text_tokens"):
        if (value := getattr(found, name)) < 1:
            raise ValueError(f"{name} is {value}")
    if not found.layers:
        raise ValueError("it has no layers")


def _made(kind: Any, value: Any, where: str) -> Any:
    """`value`, read from JSON, as a `kind`; `ValueError` says where it is none."""
    if isinstance(kind, UnionType):  # of something and None
        return None if value is None else _made(kind.__args__[0], value, where)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        given = {name: value[name] for name in hints if name in value}
        made = {name: _made(hints[name], part, f"{where}.{name}") for name, part in given.items()}
        try:
            return kind(**made)
        except TypeError as error:  # it lacks some
            raise ValueError(reason(error)) from error
    holds = get_origin(kind)
    if holds is tuple and isinstance(value, list):
        return tuple(_made(kind.__args__[0], part, f"{where}[{i}]") for i, part in enumerate(value))
    if holds is dict and isinstance(value, dict):
        return {key: _made(kind.__args__[1], part, f"{where}.{key}") for key, part in value.items()}
    if type(value) in _TAKEN.get(kind, ()):
        return value
    raise ValueError(f"{where.removeprefix('.')} is {shown(value)}")
