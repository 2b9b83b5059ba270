"""The page of a profile: what fires, where and when, and what that is worth here."""

import math
from collections.abc import Sequence
from pathlib import Path

from twellctl.firing.profiled import SHARES, LayerProfile, PartDensity, Profile
from twellctl.report import advice, charts
from twellctl.report.axes import number_axis, percent, share_axis, short_percent
from twellctl.report.markup import Markup, folded, table, tag
from twellctl.report.page import Section, Tile, page


def profile_page(profile: Profile) -> str:
    """The whole HTML file."""
    about = (
        f"{profile.windows} windows of {profile.seq_len} tokens, {profile.dtype}, {profile.device}"
    )
    sections = [
        Section("Neurons that fire, by layer", _by_layer(profile)),
        Section("Tokens by the neurons that fire for them", _by_token(profile)),
        Section("Neurons by how often they fire", _by_neuron(profile)),
        Section("Speed of the layers", _speed(profile)),
        Section("By position in the window", _by_position(profile)),
        Section("By kind of text", _by_kind(profile)),
        Section("Packed form: slots, overflow, dead neurons", _packed(profile)),
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
    size, layers = profile.intermediate_size, profile.layers
    spreads = [_spread(layer, size) for layer in layers]
    axis = share_axis([share for spread in spreads for share in spread] + [profile.density])
    says = [
        f"layer {number}: mean {layer.nnz_mean:.1f} neurons ({percent(layer.density)}); "
        f"median {layer.nnz_p50}, 99 % of tokens at most {layer.nnz_p99}, most {layer.nnz_max}"
        for number, layer in enumerate(layers)
    ]
    marks = charts.ranges(
        [(low, high) for low, high, _ in spreads],
        [layer.density for layer in layers],
        [end for *_, end in spreads],
        axis,
        says,
    )
    plot = charts.chart(
        marks,
        charts.ticks(axis),
        charts.places(len(layers)),
        label=f"Share of the neurons that fire, by layer, mean {percent(profile.density)}",
        x_name="layer; the axis of shares is logarithmic",
    )
    key = charts.key(
        ("middle", "mean"), ("box", "80 % of the tokens"), ("end", "up to 99 % of the tokens")
    )
    return [key, plot]


def _spread(layer: LayerProfile, size: int) -> tuple[float, float, float]:
    """The shares that 10, 90 and 99 % of the tokens do not exceed."""
    low = layer.nnz_p50 if layer.nnz_p10 is None else layer.nnz_p10
    high = layer.nnz_p50 if layer.nnz_p90 is None else layer.nnz_p90
    return low / size, high / size, layer.nnz_p99 / size


def _by_token(profile: Profile) -> list[Markup | str]:
    if not profile.tokens_by_share:
        return []
    first, last = _filled(profile.tokens_by_share)
    counts = profile.tokens_by_share[first : last + 1]
    shares = [count / profile.tokens for count in counts]
    axis = number_axis(shares, short_percent, zero=True)
    names = [_bin(number) for number in range(first, last + 1)]
    says = [
        f"{count} tokens ({percent(share)}) fire {name} of the neurons"
        for count, share, name in zip(counts, shares, names, strict=True)
    ]
    ends = [short_percent(round(SHARES[number], 6)) for number in range(first, last + 1)]
    plot = charts.chart(
        charts.bars(shares, axis, says),
        charts.ticks(axis),
        charts.places(len(counts), [_rounded(end) for end in ends]),
        label="Histogram of tokens by the share of all neurons that fire",
        x_name="up to this share of all layers' neurons fire for the token",
    )
    return [tag("p", f"All {profile.tokens} tokens, and what of all layers fires for each."), plot]


def _rounded(text: str) -> str:
    """A share of quarter decades with two digits."""
    return f"{_two_digits(float(text.split()[0]))} %"


def _two_digits(x: float) -> str:
    return f"{float(f'{x:.2g}'):g}"  # 100, and not 1e+02


def _bin(number: int) -> str:
    """The range of shares of a bin of `SHARES`, in words."""
    if number == 0:
        return "none"
    low, high = (_two_digits(100 * SHARES[at]) for at in (number - 1, number))
    return f"up to {high} %" if number == 1 else f"{low} to {high} %"


def _filled(counts: Sequence[int]) -> tuple[int, int]:
    """The first and the last bin that hold something."""
    filled = [number for number, count in enumerate(counts) if count]
    return filled[0], filled[-1]


def _by_neuron(profile: Profile) -> list[Markup | str]:
    layers = profile.layers
    if not all(layer.neurons_by_share for layer in layers):
        return []
    height = charts.row_height(len(layers))
    cells = [
        cell
        for number, layer in enumerate(layers)
        for cell in _neuron_cells(number, height, layer, profile.intermediate_size)
    ]
    plot = charts.chart(
        cells,
        charts.row_ticks(len(layers)),
        [(share, short_percent(share)) for share in (0, 0.25, 0.5, 0.75, 1)],
        label="Heat map: a row a layer, its neurons from the most to the least frequent",
        x_name="neurons of the layer, those that fire most often first",
        height=height * len(layers),
        ruled=False,
    )
    key = charts.key(
        ("none", "never"), ("scale", "0.01 to 100 % of the tokens, logarithmic; a row is a layer")
    )
    return [key, plot]


def _neuron_cells(number: int, height: int, layer: LayerProfile, size: int) -> list[Markup]:
    """The neurons of one layer, a cell for all of one bin, the most frequent first."""
    cells, start = [], 0
    for share in reversed(range(len(SHARES))):
        if count := layer.neurons_by_share[share]:
            on = "on none of the tokens" if share == 0 else f"on {_bin(share)} of the tokens"
            says = f"layer {number}: {count} neurons ({percent(count / size)}) fire {on}"
            value = share / (len(SHARES) - 1)
            cells.append(charts.level(value, number, height, start / size, count / size, says))
            start += count
    return cells


def _speed(profile: Profile) -> list[Markup | str]:
    if profile.speed is None:
        return []
    fired = [layer.nnz_mean for layer in profile.layers]
    speedups = [layer.speedup for layer in profile.speed.layers]
    says = [
        f"layer {number}: {speedup:.2f}x with {count:.1f} neurons firing; {layer.twell_ms:.3f} ms "
        f"for {layer.dense_ms:.3f} ms ({layer.dense})"
        for number, (speedup, count, layer) in enumerate(
            zip(speedups, fired, profile.speed.layers, strict=True)
        )
    ]
    y = number_axis([*speedups, 1.0], "{:g}x".format, zero=True)
    x = number_axis(fired, zero=True)
    by_layer = charts.chart(
        [*charts.bars(speedups, y, says), charts.mark(y.at(1))],
        charts.ticks(y),
        charts.places(len(speedups)),
        label="Speed-up of each layer's FFN over the fastest dense form",
        x_name="layer",
    )
    scatter = charts.chart(
        [charts.mark(y.at(1)), *charts.dots(list(zip(fired, speedups, strict=True)), x, y, says)],
        charts.ticks(y),
        charts.ticks(x),
        label="Speed-up of each layer by the neurons that fire in it",
        x_name="neurons that fire in the layer, mean of the tokens",
    )
    found = profile.speed_correlation
    said = "" if found is None else f" Pearson's correlation of the two is {found:.3f}."
    timed = profile.speed
    text = (
        f"Each layer's FFN on what it reads of {timed.tokens} tokens, on {timed.device}: over "
        f"TwELL, and in the fastest dense form, which is 1x. All over TwELL are "
        f"{timed.speedup:.2f}x, and with the faster of the two in each layer "
        f"{timed.best_speedup:.2f}x.{said}"
    )
    both = tag("div", tag("div", by_layer), tag("div", scatter), class_="pair")
    rows = [
        (number, f"{count:.1f}", layer.dense, f"{layer.dense_ms:.4f}", f"{layer.twell_ms:.4f}",
         f"{layer.speedup:.2f}x")
        for number, (count, layer) in enumerate(zip(fired, profile.speed.layers, strict=True))
    ]  # fmt: skip
    columns = ["layer", "neurons", "fastest dense form", "dense ms", "TwELL ms", "speed-up"]
    return [tag("p", text), both, folded("Table", table(columns, rows))]


def _by_position(profile: Profile) -> list[Markup | str]:
    parts = [part for part in profile.by_position if part.tokens]
    return _parts(parts, [part.span for part in parts], "position")


def _by_kind(profile: Profile) -> list[Markup | str]:
    parts = [part for part in profile.by_kind if part.tokens]
    return _parts(parts, [part.kind for part in parts], "kind of text") if len(parts) > 1 else []


def _parts(parts: Sequence[PartDensity], names: list[str], what: str) -> list[Markup | str]:
    """Density and loss of parts of the text side by side, then density by layer as a heat map."""
    if not parts:
        return []
    plots = [_part_density(parts, names, what)]
    if any(part.loss is not None for part in parts):
        plots.append(_part_loss(parts, names, what))
    rows = [(name, part.tokens, percent(part.density), _number(part.loss))
            for name, part in zip(names, parts, strict=True)]  # fmt: skip
    return [
        tag("div", *plots, class_="pair"),
        tag("h3", f"Density by layer and {what}"),
        _part_layers(parts, names, what),
        folded("Table", table([what, "tokens", "density", "cross-entropy"], rows)),
    ]


def _part_density(parts: Sequence[PartDensity], names: list[str], what: str) -> Markup:
    densities = [part.density for part in parts]
    axis = number_axis(densities, short_percent, zero=True)
    says = [
        f"{name}: {percent(part.density)} of the neurons fire, {part.tokens} tokens"
        for name, part in zip(names, parts, strict=True)
    ]
    plot = charts.chart(
        charts.bars(densities, axis, says),
        charts.ticks(axis),
        charts.places(len(parts), names),
        label=f"Share of the neurons that fire, by {what}",
        x_name=what,
    )
    return tag("div", tag("h3", "Neurons that fire"), plot)


def _part_loss(parts: Sequence[PartDensity], names: list[str], what: str) -> Markup:
    axis = number_axis([part.loss for part in parts if part.loss is not None], zero=True)
    says = [
        f"{name}: {_number(part.loss)} nats a token"
        for name, part in zip(names, parts, strict=True)
    ]
    plot = charts.chart(
        charts.bars([part.loss or 0.0 for part in parts], axis, says),
        charts.ticks(axis),
        charts.places(len(parts), names),
        label=f"Cross-entropy in nats a token, by {what}",
        x_name=what,
    )
    return tag("div", tag("h3", "Cross-entropy, nats a token"), plot)


def _part_layers(parts: Sequence[PartDensity], names: list[str], what: str) -> Markup:
    height = charts.row_height(len(parts[0].layers))
    axis = share_axis(share for part in parts for share in part.layers)
    cells = [
        charts.level(
            axis.at(share), layer, height, place / len(parts), 1 / len(parts),
            f"layer {layer}, {name}: {percent(share)}",
        )
        for layer in range(len(parts[0].layers))
        for place, (name, part) in enumerate(zip(names, parts, strict=True))
        for share in (part.layers[layer],)
    ]  # fmt: skip
    plot = charts.chart(
        cells,
        charts.row_ticks(len(parts[0].layers)),
        charts.places(len(parts), names),
        label=f"Heat map of the density, a row a layer, a column a {what}",
        x_name=what,
        height=height * len(parts[0].layers),
        ruled=False,
    )
    ends = f"{short_percent(axis.low)} to {short_percent(axis.high)}, logarithmic; a row is a layer"
    return tag("div", charts.key(("scale", ends)), plot)


def _packed(profile: Profile) -> list[Markup | str]:
    size = profile.intermediate_size
    dead = [layer.dead / size for layer in profile.layers]
    says = [
        f"layer {number}: {layer.dead} neurons ({percent(layer.dead / size)}) fired on no token"
        for number, layer in enumerate(profile.layers)
    ]
    axis = number_axis(dead, short_percent, zero=True)
    plot = charts.chart(
        charts.bars(dead, axis, says),
        charts.ticks(axis),
        charts.places(len(dead)),
        label="Share of neurons that never fired, by layer",
        x_name="layer",
    )
    slots = [layer.slots for layer in profile.layers]
    slot_axis = number_axis(slots, zero=True)
    slot_says = [
        f"layer {number}: {layer.slots} slots; {percent(layer.overflow)} of the tokens overflow"
        for number, layer in enumerate(profile.layers)
    ]
    slot_plot = charts.chart(
        charts.bars(slots, slot_axis, slot_says),
        charts.ticks(slot_axis),
        charts.places(len(slots)),
        label="Slots a tile, by layer",
        x_name="layer",
    )
    text = (
        f"Slots are the places that a tile of {profile.tile} neurons has in the packed gate. A "
        "token with more in some tile overflows: it is computed apart."
    )
    pair = tag(
        "div",
        tag("div", tag("h3", "Neurons that never fired"), plot),
        tag("div", tag("h3", "Slots a tile"), slot_plot),
        class_="pair",
    )
    return [tag("p", text), pair, folded("Table of all layers", _layer_table(profile))]


def _layer_table(profile: Profile) -> Markup:
    spread = ["mean", "p10", "p50", "p90", "p99", "most"]
    columns = ["layer", *spread, "density", "dead", "slots", "overflow"]
    rows = [
        (number, f"{layer.nnz_mean:.1f}", *map(_number, (layer.nnz_p10, layer.nnz_p50,
         layer.nnz_p90, layer.nnz_p99, layer.nnz_max)), percent(layer.density), layer.dead,
         layer.slots, f"{layer.overflow:.3%}")
        for number, layer in enumerate(profile.layers)
    ]  # fmt: skip
    return table(columns, rows)


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
    rows = tag("div", table(["", ""], facts.items()), class_="facts")
    return [rows]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}" if math.isfinite(value) else "-"
