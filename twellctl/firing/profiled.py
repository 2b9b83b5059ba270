"""What a profile holds, and its JSON: written by `twellctl profile`, read by `twellctl export`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from twellctl.errors import TwellError, reason, shown
from twellctl.files.outputs import check_json_path, write_file
from twellctl.files.strict_json import read_json, to_json

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """One layer: neurons that fired a token (`nnz`), and what its tiles need.

    `nnz_p99` is the smallest count that 99 % of the tokens do not exceed. `dead` neurons fired on
    no token. `overflow` is the share of tokens whose row goes to the backup, given `slots` a tile.
    """

    nnz_mean: float
    nnz_p50: int
    nnz_p99: int
    nnz_max: int
    density: float
    dead: int
    slots: int
    overflow: float


@dataclass(frozen=True)
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
            return cls(tokens, None, (None,) * len(fired), **which)
        layers = tuple(count / places for count in fired)
        return cls(tokens, sum(fired) / (places * len(fired)), layers, **which)


@dataclass(frozen=True)
class PositionDensity(PartDensity):
    """At positions `first` to `last` of a window, counted from 0, both included."""

    first: int
    last: int


@dataclass(frozen=True)
class KindDensity(PartDensity):
    """In text of one kind."""

    kind: str


@dataclass(frozen=True)
class Profile:
    """A measured model. `fingerprint` is that of its weights, `data` what it was measured on."""

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
    by_position: tuple[PositionDensity, ...] = ()
    by_kind: tuple[KindDensity, ...] = ()

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

    def to_json(self) -> dict:
        """The content of the file: schema version and means first, then all fields."""
        means = {key: getattr(self, key) for key in ("nnz_mean", "density", "dead_fraction")}
        return {"schema_version": SCHEMA_VERSION} | means | asdict(self)


def save_profile(profile: Profile, path: Path) -> None:
    """Write the JSON whole or not at all, replacing an older one."""
    write_file(path, profile_json(profile))


def profile_json(profile: Profile) -> str:
    """The whole text of the file."""
    return to_json(profile.to_json(), indent=2, ensure_ascii=False) + "\n"


def check_profile_path(path: Path) -> None:
    """Refuse, before any work, a file that could not be written, or that is something else."""
    check_json_path(path, "schema_version", "profile")


def read_profile(path: str | Path) -> Profile:
    """The profile in a JSON file; `TwellError` if it is none, or of another schema."""
    again = "write it again with 'twellctl profile MODEL --data FILE --json FILE'"
    content = read_json(Path(path), again)
    version = content.get("schema_version")
    if version is None:
        raise TwellError(f"{path} is no profile (no schema_version): {again}")
    if version != SCHEMA_VERSION:
        raise TwellError(
            f"{path} has schema_version {shown(version)}, this twellctl reads {SCHEMA_VERSION}: "
            f"{again}"
        )
    try:
        content = {"by_position": [], "by_kind": []} | content  # the first profiles had neither
        fields = {name: content[name] for name in Profile.__dataclass_fields__}
        fields["layers"] = tuple(LayerProfile(**layer) for layer in fields["layers"])
        fields["by_position"] = _parts(PositionDensity, fields["by_position"])
        fields["by_kind"] = _parts(KindDensity, fields["by_kind"])
        return Profile(**fields | {"data": tuple(fields["data"])})
    except (KeyError, TypeError) as error:
        raise TwellError(f"{path} is no whole profile ({reason(error)}): {again}") from error


def _parts(made: type[PartDensity], parts: list[dict]) -> tuple[PartDensity, ...]:
    return tuple(made(**part | {"layers": tuple(part["layers"])}) for part in parts)
