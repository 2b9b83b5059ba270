"""What bench decode found, for a plot: from its JSON."""

from typing import Any

from twellctl.report.charts import BarChart, BarPanel, Bars


def chart_of(found: dict[str, Any]) -> BarChart:
    """Steps per second of each form by the rows of a step, and what its bytes allow."""
    return BarChart(
        title="Decoding, token by token",
        x_label="rows of a step: sequences at once",
        y_label="steps/s",
        limit="limit: its bytes at the speed of a copy",
        panels=[_panel(model) for model in found["models"]],
        note=f"{found['device']}, copies at {found['bandwidth_gb_s']:.0f} GB/s; medians",
    )


def _panel(model: dict[str, Any]) -> BarPanel:
    """Forms by name, at each batch size; None where one was left out."""
    points = model["points"]
    bars = []
    for name in dict.fromkeys(name for point in points for name in point["forms"]):
        forms = [point["forms"].get(name, {}) for point in points]
        heights = [form.get("steps_per_second") for form in forms]
        bars.append(Bars(name, heights, [form.get("floor_steps_per_second") for form in forms]))
    return BarPanel(model["what"], [str(point["batch"]) for point in points], bars)
