"""The screen of `twellctl bench`: a table a point, then the sentences. No torch."""

from typing import Any

from twellctl.screens import ui


def benched(found: Any) -> None:
    """The figures of a `Bench`."""
    benched_on(found.facts)
    for point in found.points:
        _table(point)
    for text in found.sentences:
        ui.say(text)


def benched_on(facts: dict[str, Any]) -> None:
    """The device, and versions of what makes its code."""
    versions = facts["versions"]
    named = ("torch", *(name for name in versions if name.startswith("cupy")), "nvrtc")
    listed = ", ".join(f"{name} {versions[name]}" for name in named if versions.get(name))
    ui.say(f"{facts['device']}; {listed}")
    if said := facts.get("without_fp8"):
        ui.note(f"dense FP8 was left out: {said}")


def _table(point: Any) -> None:
    columns = ["", "ms", "tokens/ms", *over_columns(point.fastest_fp8), "error", "worst row"]
    rows = []
    for c in point.candidates:
        figures = [f"{1000 * c.seconds:.4g}", f"{point.tokens / c.seconds / 1000:.4g}"]
        figures += over_rivals(point, c)
        figures += [f"{c.errors[name]:.1e}" for name in ("error", "worst_row_error")]
        rows.append([c.name, *figures])
    title = f"{point.tokens} tokens, {_firing(point.about)}; {point.outcome.timed_by}"
    ui.table(title, columns, rows)
    _remarks(point)


def over_columns(dense_fp8: Any | None) -> list[str]:
    """What `over_rivals` gives, with a dense candidate in FP8 or without."""
    return ["over dense", "over FP8"] if dense_fp8 else ["over dense"]


def over_rivals(point: Any, candidate: Any) -> list[str]:
    """How many times as fast as the fastest dense candidate, and as that in FP8 if there is one."""
    ratios = (point.over_dense(candidate), point.over_fp8(candidate))
    return [f"{ratio:.2f}x" for ratio in ratios if ratio is not None]


def _remarks(point: Any) -> None:
    """What stands below a table: what was left out, which ways were gone."""
    left_out(point.outcome.skipped)
    if said := point.about["without_kernels"]:
        ui.note(said)
    if took := point.about.get("auto_took"):
        ui.say("auto took " + ", ".join(f"{route} ({n})" for route, n in took.items()))
    ui.say(f"error relative to {point.reference}")


def left_out(skipped: dict[str, str]) -> None:
    """Dense candidates that could not run, or were wrong, and why."""
    for name, reason in skipped.items():
        ui.note(f"{name} was left out: {reason}")


def _firing(about: dict[str, Any]) -> str:
    """The density in words."""
    first, last = about["layers"][0]["density"], about["layers"][-1]["density"]
    return f"density {about['density']:.2%} (first layer {first:.2%}, last {last:.2%})"
