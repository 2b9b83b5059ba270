"""The page of a profile: what fires, where and when."""

from collections.abc import Sequence
from pathlib import Path

from twellctl.firing.profiled import PartDensity, Profile
from twellctl.report import advice, charts
from twellctl.report.axes import percent, short_percent
from twellctl.report.markup import Markup, folded, table, tag
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
    if profile.loss is not None:
        error = "" if profile.loss_error is None else f"± {profile.loss_error:.4f} "
        tiles.insert(1, Tile("cross-entropy", f"{profile.loss:.4f}", f"{error}nats a token"))
    return tiles


def _by_layer(profile: Profile) -> list[Markup | str]:
    layers = profile.layers
    says = [
        f"layer {number}: mean {layer.nnz_mean:.1f} neurons ({percent(layer.density)}); "
        f"median {layer.nnz_p50}, 99 % of tokens at most {layer.nnz_p99}, most {layer.nnz_max}"
        for number, layer in enumerate(layers)
    ]
    label = f"Share of the neurons that fire, by layer, mean {percent(profile.density)}"
    plot = charts.bar_chart(
        [layer.density for layer in layers], short_percent, says, label=label, x_name="layer"
    )
    text = (
        f"Slots are the places that a tile of {profile.tile} neurons has in the packed gate. A "
        "token with more in some tile overflows: it is computed apart. Dead neurons fired on no "
        "token."
    )
    rows = [
        (number, f"{layer.nnz_mean:.1f}", *map(_number, (layer.nnz_p10, layer.nnz_p50,
         layer.nnz_p90, layer.nnz_p99, layer.nnz_max)), percent(layer.density), layer.dead,
         layer.slots, f"{layer.overflow:.3%}")
        for number, layer in enumerate(layers)
    ]  # fmt: skip
    columns = ["layer", "mean", "p10", "p50", "p90", "p99", "most"]
    columns += ["density", "dead", "slots", "overflow"]
    return [plot, folded("Table of all layers", tag("p", text), table(columns, rows))]


def _by_position(profile: Profile) -> list[Markup | str]:
    parts = [part for part in profile.by_position if part.tokens]
    return _parts(parts, [part.span for part in parts], "position")


def _by_kind(profile: Profile) -> list[Markup | str]:
    parts = [part for part in profile.by_kind if part.tokens]
    return _parts(parts, [part.kind for part in parts], "kind of text") if len(parts) > 1 else []


def _parts(parts: Sequence[PartDensity], names: list[str], what: str) -> list[Markup | str]:
    """Density of parts of the text, and their losses in a table."""
    if not parts:
        return []
    says = [
        f"{name}: {percent(part.density)} of the neurons fire, {part.tokens} tokens"
        for name, part in zip(names, parts, strict=True)
    ]
    label = f"Share of the neurons that fire, by {what}"
    densities = [part.density for part in parts]
    plot = charts.bar_chart(densities, short_percent, says, label=label, x_name=what, names=names)
    rows = [(name, part.tokens, percent(part.density), _number(part.loss))
            for name, part in zip(names, parts, strict=True)]  # fmt: skip
    return [plot, folded("Table", table([what, "tokens", "density", "cross-entropy"], rows))]


def _facts(profile: Profile) -> list[Markup | str]:
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


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"
