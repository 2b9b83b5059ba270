"""The screen of `twellctl bench train`: two tables a point, then the sentences. No torch."""

from typing import Any

from twellctl.screens import ui
from twellctl.screens.bench import benched_on, firing, remarks


def trained(found: Any) -> None:
    """The figures of a `TrainBench`."""
    benched_on(found.facts)
    for point in found.points:
        _speed_and_memory(point)
        _errors(point)
        remarks(point)
    for text in found.sentences:
        ui.say(text)


def _speed_and_memory(point: Any) -> None:
    eager, rows = point.eager.also, []
    columns = ["", "ms", "over fastest dense"]
    columns += ["forward", "backward"] if "forward_ms" in eager else []
    memory = [name for name in ("kept_mib", "peak_mib") if name in eager]
    columns += [f"{name.removesuffix('_mib')} MiB" for name in memory]
    for c in point.candidates:
        figures = [f"{1000 * c.seconds:.4g}", f"{point.over_dense(c):.2f}x"]
        if forward := c.also.get("forward_ms"):
            figures += [f"{forward:.3g}", f"{1000 * c.seconds - forward:.3g}"]
        rows.append([c.name, *figures, *(f"{c.also[name]:.0f}" for name in memory)])
    title = f"{point.tokens} tokens, {firing(point.about)}"
    if "checkpointing" in point.about:
        title += f", checkpointing {'on' if point.about['checkpointing'] else 'off'}"
    ui.table(f"{title}; {point.outcome.timed_by}", columns, rows)
    if memory and "gradients_mib" in point.about:
        ui.say(f"peak: with y and gradients, all of these {point.about['gradients_mib']:.0f} MiB")


def _errors(point: Any) -> None:
    columns = ["", *(name.removesuffix("_error").replace("_", " ") for name in point.eager.errors)]
    rows = [[c.name, *(f"{error:.2e}" for error in c.errors.values())] for c in point.candidates]
    ui.table(f"relative errors against {point.reference}", columns, rows)
