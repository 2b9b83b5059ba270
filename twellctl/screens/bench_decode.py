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
