"""The page of a fine-tuning run: from its metrics.jsonl, what it ended with, and its recipe."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twellctl.models.verdict import verdict_of
from twellctl.report import advice, charts
from twellctl.report.axes import Axis, number_axis, percent, share_axis, short_percent
from twellctl.report.charts import Series
from twellctl.report.markup import Markup, folded, table, tag
from twellctl.report.page import Section, Tile, page

RUN_PAGE = "run.html"  # beside the metrics that it shows
BEYOND = 2  # times the largest KL of a step: a held-out one above it is not drawn
MOST = 300  # points of a line; of more, means are drawn

Row = dict[str, Any]  # of metrics.jsonl


def read_rows(metrics: Path) -> list[Row]:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def run_page(name: str, rows: Sequence[Row], report: dict[str, Any]) -> str:
    """The whole HTML file: `report` is what the run ended with, and its recipe."""
    about = f"{report['num_steps']} steps, {report['num_tokens']} tokens"
    steps = number_axis([0, report["num_steps"]], "{:,.0f}".format, zero=True)
    sections = [
        Section("Loss", _loss(rows, report, steps)),
        Section("Neurons that fire", _density(rows, report, steps)),
        Section("Neurons that fire, by layer", _by_layer(report)),
        Section("Price of a neuron", _one_line(rows, "price", "price", steps, "{:.2g}".format)),
        Section("Speed", _rate(rows, steps)),
        Section("Learning rate", _one_line(rows, "learning_rate", "learning rate", steps)),
        Section("Recipe", [tag("div", table(["", ""], report["recipe"].items()), class_="facts")]),
    ]
    verdict = verdict_of({}, report.get("answers"))
    sentences = [*([] if verdict is None else [str(verdict)]), *advice.of_run(report)]
    said = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences]
    return page(f"How {name} was trained", about, _tiles(rows, report), said, sections)


def _tiles(rows: Sequence[Row], report: dict[str, Any]) -> list[Tile]:
    wanted = report["target_density"]
    asked = "" if wanted is None else f"of {percent(wanted)} asked for"
    tiles = [Tile("neurons that fire", percent(report["density"]), asked)]
    if (after := report["cross_entropy"]) is not None:
        before = report["teacher_cross_entropy"]
        against = "" if before is None else f"{after - before:+.4f} against the teacher"
        tiles.append(Tile("held-out cross-entropy", f"{after:.4f}", against))
    if answers := report.get("answers"):
        agree = f"{answers['agree']} of {answers['answers']} agree to the end"
        tiles.append(Tile("KL on the teacher's answers", f"{answers['kl']['mean']:.4f}", agree))
    if (kl := report["teacher_kl"]) is not None:
        tiles.append(Tile("KL to the teacher", f"{kl:.4f}", "nats a token, held-out text"))
    if rows:
        seconds = rows[-1]["seconds"]
        spent = f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"
        tiles.append(
            Tile("time", spent, f"{report['num_tokens'] / max(seconds, 1e-9):.0f} tokens/s")
        )
    return tiles


def _loss(rows: Sequence[Row], report: dict[str, Any], steps: Axis) -> list[Markup | str]:
    series = [
        Series("of each step's text", _points(rows, "loss")),
        Series("of held-out text", _points(rows, "held_out")),
    ]
    if (teacher := report["teacher_cross_entropy"]) is not None:
        series.append(Series("of the teacher", ((0, teacher), (steps.high, teacher))))
    return _lines(series, steps, "cross-entropy in nats a token") + _teacher(rows, steps)


def _teacher(rows: Sequence[Row], steps: Axis) -> list[Markup | str]:
    trained, held_out = _points(rows, "teacher_kl"), _points(rows, "held_out_kl")
    figures = [y for _, y in trained or held_out]
    if not figures:
        return []
    drawn = tuple(point for point in held_out if point[1] <= BEYOND * max(figures))
    axis = number_axis([*figures, *(y for _, y in drawn)], "{:.4g}".format, zero=True)
    series = [Series("of each step's text", trained), Series("of held-out text", drawn)]
    parts = [tag("h3", "KL to the teacher"), *_lines(series, steps, "KL in nats a token", axis)]
    if len(drawn) < len(held_out):
        first = ", ".join(
            f"{y:.4g} at step {step:,.0f}" for step, y in held_out if (step, y) not in drawn
        )
        parts.append(tag("p", f"Not drawn: {first}. Held-out text is read by the ReLU model, also "
                              "while the gates still harden."))  # fmt: skip
    return parts


def _density(rows: Sequence[Row], report: dict[str, Any], steps: Axis) -> list[Markup | str]:
    series = [
        Series("on each step's text", _points(rows, "density")),
        Series("on held-out text", _points(rows, "held_out_density")),
    ]
    if (wanted := report["target_density"]) is not None:
        series.append(Series("target", ((0, wanted), (steps.high, wanted))))
    shares = [y for one in series for _, y in one.points]
    return _lines(series, steps, "share of the neurons that fire", share_axis(shares))


def _by_layer(report: dict[str, Any]) -> list[Markup | str]:
    shares = report["density_by_layer"]
    says = [f"layer {number}: {percent(share)}" for number, share in enumerate(shares)]
    label = "Share of the neurons that fire at the end, by layer"
    plot = charts.bar_chart(shares, short_percent, says, label=label, x_name="layer, at the end")
    rows = [(number, percent(share)) for number, share in enumerate(shares)]
    return [plot, folded("Table", table(["layer", "density"], rows))]


def _rate(rows: Sequence[Row], steps: Axis) -> list[Markup | str]:
    return _one_line(rows, "tokens_per_second", "tokens a second", steps, "{:,.0f}".format)


def _one_line(
    rows: Sequence[Row],
    field: str,
    name: str,
    steps: Axis,
    spelled: Callable[[float], str] = "{:.4g}".format,
) -> list[Markup | str]:
    points = _points(rows, field)
    if not points:
        return []
    axis = number_axis([y for _, y in points], spelled, zero=True)
    return _lines([Series(name, points)], steps, name, axis)


def _lines(
    series: Sequence[Series], steps: Axis, what: str, axis: Axis | None = None
) -> list[Markup | str]:
    """A plot of what there is of `series`, by steps, with a key if it is several."""
    there = [one for one in series if one.points]
    if not there:
        return []
    axis = axis or number_axis([y for one in there for _, y in one.points], "{:.4g}".format)
    marks = charts.lines(series, steps, axis) + _said(there, steps, axis)
    plot = charts.chart(
        marks, charts.ticks(axis), charts.ticks(steps), label=f"{what}, by step", x_name="step"
    )
    swatches = [(f"line-{number}", one.name) for number, one in enumerate(series) if one.points]
    return [charts.key(*swatches), plot] if len(there) > 1 else [plot]


def _said(series: Sequence[Series], steps: Axis, axis: Axis) -> list[Markup]:
    """What takes the pointer: a strip for each point of the first line."""
    others = {one.name: dict(one.points) for one in series[1:]}
    made, before = [], 0.0
    for at, (step, value) in enumerate(points := series[0].points):
        after = (steps.at(step) + steps.at(points[at + 1][0])) / 2 if at + 1 < len(points) else 1.0
        also = "".join(f", {_figure(found[step])} {name}" for name, found in others.items()
                       if step in found)  # fmt: skip
        text = f"step {step:,.0f}: {_figure(value)} {series[0].name}{also}"
        made.append(charts.strip(before, after, text))
        before = after
    return made


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _points(rows: Sequence[Row], field: str) -> tuple[tuple[float, float], ...]:
    """(step, figure) of the rows that have it; of many, means of neighbours."""
    found = [row for row in rows if row.get(field) is not None]
    return tuple(
        (
            statistics.fmean(row["step"] for row in group),
            statistics.fmean(row[field] for row in group),
        )
        for group in _groups(found, MOST)
    )


def _groups(rows: Sequence[Row], most: int) -> list[Sequence[Row]]:
    """Neighbours put together so that there are at most so many groups."""
    size = -(-len(rows) // most) or 1
    return [rows[at : at + size] for at in range(0, len(rows), size)]
