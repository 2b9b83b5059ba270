"""The screens of `twellctl bench`: tables, then the sentences. No torch."""

from statistics import median
from typing import Any

from twellctl.screens import ui


def benched(found: Any) -> None:
    """The figures of a `Bench`."""
    _benched_on(found.facts)
    for point in found.points:
        _table(point)
    for text in found.sentences:
        ui.say(text)


def _benched_on(facts: dict[str, Any]) -> None:
    """The device, and versions of what makes its code."""
    versions = facts["versions"]
    named = ("torch", *(name for name in versions if name.startswith("cupy")), "nvrtc")
    listed = ", ".join(f"{name} {versions[name]}" for name in named if versions.get(name))
    ui.say(f"{facts['device']}; {listed}")


def _table(point: Any) -> None:
    columns = ["", "ms", "tokens/ms", *_over(point), "error", "worst row"]
    rows = []
    for c in point.candidates:
        figures = [f"{1000 * c.seconds:.4g}", f"{point.tokens / c.seconds / 1000:.4g}"]
        figures += point.ratios(c)
        figures += [f"{c.errors[name]:.1e}" for name in ("error", "worst_row_error")]
        rows.append([c.name, *figures])
    title = f"{point.tokens} tokens, {_firing(point.about)}; {point.outcome.timed_by}"
    ui.table(title, columns, rows)
    _left_out(point.outcome.skipped)
    if said := point.about["without_kernels"]:
        ui.note(said)
    if took := point.about.get("auto_took"):
        ui.say("auto took " + ", ".join(f"{route} ({n})" for route, n in took.items()))
    ui.say(f"error relative to {point.reference}")


def _over(point: Any) -> list[str]:
    """The columns of its ratios."""
    return ["over dense", "over FP8"] if point.dense_fp8 else ["over dense"]


def _left_out(skipped: dict[str, str]) -> None:
    """Dense candidates that could not run, or were wrong, and why."""
    for name, reason in skipped.items():
        ui.note(f"{name} was left out: {reason}")


def _firing(about: dict[str, Any]) -> str:
    """The density in words."""
    first, last = about["layers"][0]["density"], about["layers"][-1]["density"]
    return f"density {about['density']:.2%} (first layer {first:.2%}, last {last:.2%})"


def decoded(found: Any) -> None:
    """The figures of a `DecodeBench`."""
    _benched_on(found.facts)
    ui.say(f"copies at {found.bandwidth / 1e9:.0f} GB/s, which sets the floors")
    for model in found.models:
        for point in model.points:
            _model_table(point)
    for text in found.sentences:
        ui.say(text)


def _model_table(point: Any) -> None:
    over = _over(point)
    columns = ["", "steps/s", "ms", "tokens/s", *over, "density", "floor", "of it"]
    rows = []
    for form in point.forms:
        rate = form.steps_per_second
        figures = [f"{rate:.4g}", f"{1000 * form.seconds:.4g}", f"{point.batch * rate:.4g}"]
        figures += [*point.ratios(form), f"{form.density:.2%}"]
        figures += [f"{1 / form.floor_seconds:.4g}", f"{form.floor_seconds / form.seconds:.0%}"]
        name = f"{form.name} ({form.way})" if form.way else form.name
        rows.append([name, *figures])
    steps = len(point.dense.step_seconds)
    ui.table(f"batch {point.batch}; medians of {steps} steps; floor in steps/s", columns, rows)
    _left_out(point.skipped)
    for form in point.forms:
        if form.stages:
            _stage_table(form)
    if (twell := point.twell) and point.batch > 1:
        ui.say(f"neurons that fire for some row of a step: {twell.union:.1%}")


def _stage_table(form: Any) -> None:
    rows = [
        [stage.name, *(f"{us:.2f}" for us in (stage.mean, stage.least, stage.most))]
        for stage in form.stages
    ]
    ui.table(f"a layer of {form.name}, in us", ["until", "mean", "least block", "most"], rows)


def drafted(found: Any) -> None:
    """The figures of an `ExactBench`."""
    _benched_on(found.facts)
    for point in found.points:
        _exact_table(point)
    ui.say("a pass: tokens for each pass of the original over a sequence")
    ui.say("of a drafter (fit, head, lookup): which share of its drafts was kept")
    prompts = found.points[0].prompts
    ui.say(f"differ: of {prompts} prompts, those with other tokens than the original with --stable")
    for text in found.sentences:
        ui.say(text)


def _exact_table(point: Any) -> None:
    drafters = sorted({name for form in point.forms for name in form.drafted.read})
    columns = [
        "",
        "tokens/s",
        "least",
        "most",
        "over original",
        "least",
        "a pass",
        *(f"of {drafter}" for drafter in drafters),
        "differ",
    ]
    rows = []
    for form in point.forms:
        rates, ratios = point.rates(form), point.ratios(form)
        figures = [f"{rate:.4g}" for rate in (median(rates), min(rates), max(rates))]
        figures += [f"{ratio:.2f}x" for ratio in (median(ratios), min(ratios))]
        a_pass, read = form.drafted.tokens_a_pass, form.drafted.read
        figures.append("" if a_pass is None else f"{a_pass:.2f}")
        for drafter in drafters:
            share = form.drafted.kept[drafter] / read[drafter] if read[drafter] else None
            figures.append("" if share is None else f"{share:.1%}")
        rows.append([form.name, *figures, str(form.differing)])
    of = "prompts" if point.batch == 1 else f"groups of {point.batch} prompts"
    ui.table(f"batch {point.batch}; medians of {point.num_timed} {of}", columns, rows)
