"""The page of a profile: what fires, where and when."""

from collections.abc import Sequence
from pathlib import Path

from twellctl.firing.profiled import PartDensity, Profile
from twellctl.report import advice
from twellctl.report.advice import percent
from twellctl.report.markup import Markup, table, tag
from twellctl.report.page import Section, Tile, page


def profile_page(profile: Profile) -> str:
    """The whole HTML file."""
    about = (
        f"{profile.windows} windows of {profile.seq_len} tokens, {profile.dtype}, {profile.device}"
    )
    sections = [
        Section("Neurons that fire, by layer", _by_layer(profile)),
        Section("By position in the window", _by_position(profile)),
        Section("By kind of text", _by_kind(profile)),
        Section("How it was measured", _facts(profile)),
    ]
    model = Path(profile.model)
    title = f"What fires in {model.name if model.is_absolute() else model}"
    return page(title, about, _tiles(profile), advice.of_profile(profile), sections)


def _tiles(profile: Profile) -> list[Tile]:
    size = profile.intermediate_size
    tokens = profile.distinct_tokens
    tiles = [
        Tile("neurons that fire", percent(profile.density), f"{profile.nnz_mean:.1f} of {size}"),
        Tile("dead neurons", percent(profile.dead_fraction), f"on {tokens} tokens"),
    ]
    return tiles


def _by_layer(profile: Profile) -> list[Markup]:
    text = (
        f"Slots are the places that a tile of {profile.tile} neurons has in the packed gate. A "
        "token with more in some tile overflows: it is computed apart. Dead neurons fired on no "
        "token."
    )
    bars = _bars([layer.density for layer in profile.layers])
    rows = [
        (number, bar, percent(layer.density), f"{layer.nnz_mean:.1f}",
         layer.nnz_p10, layer.nnz_p50, layer.nnz_p90, layer.nnz_p99, layer.nnz_max, layer.dead,
         layer.slots, f"{layer.overflow:.3%}")
        for number, (bar, layer) in enumerate(zip(bars, profile.layers, strict=True))
    ]  # fmt: skip
    columns = ["layer", "", "density", "mean", "p10", "p50", "p90", "p99", "most"]
    columns += ["dead", "slots", "overflow"]
    return [tag("p", text), table(columns, rows)]


def _by_position(profile: Profile) -> list[Markup]:
    return _parts([(part.span, part) for part in profile.by_position], "position")


def _by_kind(profile: Profile) -> list[Markup]:
    kinds = [(part.kind, part) for part in profile.by_kind]
    return _parts(kinds, "kind of text") if len(kinds) > 1 else []


def _parts(named: Sequence[tuple[str, PartDensity]], what: str) -> list[Markup]:
    """The density of those parts of the text that have tokens."""
    named = [(name, part) for name, part in named if part.tokens]
    bars = _bars([part.density for _, part in named])
    rows = [(name, bar, percent(part.density), part.tokens)
            for bar, (name, part) in zip(bars, named, strict=True)]  # fmt: skip
    return [table([what, "", "density", "tokens"], rows)] if rows else []


def _bars(shares: Sequence[float]) -> list[Markup]:
    """A bar for each; the largest is full."""
    most = max(shares, default=0.0) or 1.0
    return [tag("meter", value=share / most, aria_label=percent(share)) for share in shares]


def _facts(profile: Profile) -> list[Markup]:
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    facts = {
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "text": ", ".join(profile.data),
        "windows": f"{profile.windows} of {profile.seq_len} tokens, at even strides",
        "computed": f"densely, {profile.dtype}, {profile.device}",
        "software": versions,
    }
    return [tag("div", table(["", ""], facts.items()), class_="facts")]
