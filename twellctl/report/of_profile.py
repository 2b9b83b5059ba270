"""The page of a profile: what fires, where and when, and what that is worth here."""

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
        Section("Speed of the layers", _speed(profile)),
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
    if profile.speed is not None:
        about = f"all FFNs, each the faster way, {profile.speed.tokens} tokens"
        tiles.insert(1, Tile("speed-up", f"{profile.speed.best_speedup:.2f}x", about))
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


def _speed(profile: Profile) -> list[Markup | str]:
    timed = profile.speed
    if timed is None:
        return []
    fired = [layer.nnz_mean for layer in profile.layers]
    speedups = [layer.speedup for layer in timed.layers]
    says = [
        f"layer {number}: {layer.speedup:.2f}x with {count:.1f} neurons firing; "
        f"{layer.twell_ms:.3f} ms for {layer.dense_ms:.3f} ms ({layer.dense})"
        for number, (count, layer) in enumerate(zip(fired, timed.layers, strict=True))
    ]
    label = "Speed-up of each layer's FFN over the fastest dense form"
    spelled = "{:g}x".format
    plot = charts.bar_chart(speedups, spelled, says, label=label, x_name="layer", mark=1.0)
    found = profile.speed_correlation
    said = (
        ""
        if found is None
        else f" Pearson's correlation with the neurons that fire is {found:.3f}."
    )
    text = (
        f"Each layer's FFN on what it reads of {timed.tokens} tokens, on {timed.device}: over "
        f"TwELL, and in the fastest dense form, which is 1x. All over TwELL are "
        f"{timed.speedup:.2f}x, and with the faster of the two in each layer "
        f"{timed.best_speedup:.2f}x.{said}"
    )
    rows = [
        (number, f"{count:.1f}", layer.dense, f"{layer.dense_ms:.4f}", f"{layer.twell_ms:.4f}",
         f"{layer.speedup:.2f}x")
        for number, (count, layer) in enumerate(zip(fired, timed.layers, strict=True))
    ]  # fmt: skip
    columns = ["layer", "neurons", "fastest dense form", "dense ms", "TwELL ms", "speed-up"]
    return [tag("p", text), plot, folded("Table", table(columns, rows))]


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
