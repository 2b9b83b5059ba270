"""The screen of `twellctl bench decode`: a table a batch size, then the sentences. No torch."""

from typing import Any

from twellctl.screens import ui
from twellctl.screens.bench import benched_on, left_out, over_columns, over_rivals


def decoded(found: Any) -> None:
    """The figures of a `DecodeBench`."""
    benched_on(found.facts)
    ui.say(f"copies at {found.bandwidth / 1e9:.0f} GB/s, by which floors are reckoned")
    for model in found.models:
        for point in model.points:
            _model_table(point)
    for text in found.sentences:
        ui.say(text)


def ffn_decoded(found: Any) -> None:
    """The figures of a `Bench` by `bench decode --ffn`."""
    benched_on(found.facts)
    ui.say(f"copies at {found.facts['bandwidth_gb_s']:.0f} GB/s, by which floors are reckoned")
    for point in found.points:
        _ffn_table(point)
    for text in found.sentences:
        ui.say(text)


def _model_table(point: Any) -> None:
    over = over_columns(point.dense_fp8)
    columns = ["", "steps/s", "ms", "tokens/s", *over, "density", "floor", "of it"]
    rows = []
    for form in point.forms:
        rate = form.steps_per_second
        figures = [f"{rate:.4g}", f"{1000 * form.seconds:.4g}", f"{point.batch * rate:.4g}"]
        figures += [*over_rivals(point, form), f"{form.density:.2%}"]
        figures += [f"{1 / form.floor_seconds:.4g}", f"{form.floor_seconds / form.seconds:.0%}"]
        name = f"{form.name} ({form.chosen})" if form.chosen else form.name
        rows.append([name, *figures])
    steps = len(point.dense.step_seconds)
    ui.table(f"batch {point.batch}; medians of {steps} steps; floor in steps/s", columns, rows)
    left_out(point.skipped)
    if (twell := point.twell) and point.batch > 1:
        ui.say(f"neurons that fire for some row of a step: {twell.union:.1%}")
    alone = (f"{name} {1000 * seconds:.3g} ms" for name, seconds in point.ffn_seconds.items())
    ui.say(f"the FFNs of a step alone: {', '.join(alone)}")


def _ffn_table(point: Any) -> None:
    about, rows = point.about, []
    for c in point.candidates:
        floor = about["floor_ms"][c.kind] / 1000
        figures = [f"{1e6 * c.seconds:.4g}", f"{1e6 * floor:.3g}", f"{floor / c.seconds:.0%}"]
        rows.append([c.name, *figures, *over_rivals(point, c), f"{c.errors['error']:.1e}"])
    title = (
        f"batch {point.tokens}, density {about['density']:.2%}, "
        f"{about['fired_for_some_token']:.1%} fire for some token; {point.outcome.timed_by}"
    )
    ui.table(
        title, ["", "us", "floor, us", "of it", *over_columns(point.fastest_fp8), "error"], rows
    )
    left_out(point.outcome.skipped)
    if said := about["without_kernels"]:
        ui.note(said)
