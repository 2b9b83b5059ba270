"""What a user would pick instead of a model: a table, of what lies in the folder of its run.

The original in 16, 8 and 4 bits; this model by itself (fast), and as the draft of its original
(exact). Speeds are those of one sequence, of steps by `bench decode` and of answers by
`bench exact`. The dense forms of `bench decode` have the size of the original, and so its speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.bench.exact_results import EXACT, FIT, ORIGINAL
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.evaluation.in_report import share_kept
from twellctl.files.strict_json import read_json
from twellctl.models.checkpoint import FIT_FILE
from twellctl.report.charts import short_name
from twellctl.report.page import Table
from twellctl.screens import ui

UNKNOWN = "not measured"
TITLE = "What you would pick instead"
BITS16, BITS8, BITS4, FAST, EXACTLY = range(5)  # rows
ROUNDED = {"fp8": BITS8, "int4": BITS4}  # of dense forms
ANSWERED = {ORIGINAL: BITS16, FIT: FAST, EXACT: EXACTLY}  # by forms of bench exact


@dataclass
class Rival:
    """A row of the table; what is None was not measured. Speeds are tokens a second."""

    name: str
    steps: float | None = None
    answers: float | None = None
    same: str = UNKNOWN
    kept: str = UNKNOWN
    set_up: str = UNKNOWN
    weights: int | None = None


def rivals_of(
    folder: Path, evaluations: dict[str, dict[str, Any]], benches: Sequence[dict[str, Any]]
) -> Table | None:
    """The table; None where nothing of it was measured. `evaluations` by their files' names."""
    own = evaluations.get("eval.json")
    if own is None and not benches:
        return None
    rows = _named(own, benches)
    for bench in benches:
        if bench["command"] == "bench exact":
            _add_answers(rows, bench)
    for bench in benches:
        if bench["command"] == "bench decode":
            _add_steps(rows, bench)
    _add_fits(rows, folder, evaluations)
    if own:
        _add_evaluation(rows[FAST], own)
    rows[BITS16].set_up, rows[BITS16].kept, rows[BITS16].same = "none", "100%", "yes"
    return _table(rows, benches)


def _named(own: dict[str, Any] | None, benches: Sequence[dict[str, Any]]) -> list[Rival]:
    found = (one["models"] for one in benches if one["command"] == "bench exact")
    exact: dict[str, str] = next(found, {})
    model, original = exact.get("fit", "this model"), exact.get("original", "the original")
    if own:
        model, original = own["model"], own["reference"] or original
    model, original = short_name(model), short_name(original)
    names = [f"{original}, {bits} bits" for bits in (16, 8, 4)]
    return [Rival(name) for name in (*names, f"{model}, fast", f"{model}, exact")]


def _of_one(bench: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The forms of one sequence in JSON of a bench."""
    for point in bench["points"]:
        if point["batch"] == 1:
            yield from ({"name": name} | form for name, form in point["forms"].items())


def _add_answers(rows: list[Rival], bench: dict[str, Any]) -> None:
    prompts = next((point["prompts"] for point in bench["points"] if point["batch"] == 1), 0)
    for form in _of_one(bench):
        if (number := ANSWERED.get(form["name"])) is None or rows[number].answers:
            continue
        rows[number].answers = form["tokens_per_second"]
        rows[number].weights = form.get("weight_bytes")
        if number == EXACTLY:
            same = prompts - form["differing"]
            rows[number].same = _share(same, prompts)
            rows[number].kept = "100%" if same == prompts else UNKNOWN


def _add_steps(rows: list[Rival], bench: dict[str, Any]) -> None:
    """Of a model of the user's: a random one has no fingerprint."""
    for model in bench["models"]:
        if "fingerprint" not in model["model"]:
            continue
        rounded = ROUNDED.get(model["model"].get("weights"), BITS16)
        by_kind = {DENSE: rounded, DENSE_FP8: BITS8, TWELL: FAST}
        for form in _of_one(model):
            row = rows[by_kind[form["kind"]]]
            if row.steps is None:
                row.steps = form["tokens_per_second"]
                row.weights = row.weights or form.get("weight_bytes")


def _add_fits(rows: list[Rival], folder: Path, evaluations: dict[str, dict[str, Any]]) -> None:
    """How long fits took. One that keeps its activation is the original in 4 bits, of which an
    evaluation may be there, too."""
    for path in sorted(folder.glob(f"*/{FIT_FILE}")):
        fit = read_json(path)
        is_original = fit["settings"]["keep_activation"]
        took = ui.duration(fit["seconds"])
        took = f"more than {took}" if fit["kept"] else took
        for number in (BITS4,) if is_original else (FAST, EXACTLY):
            rows[number].set_up = took
        for evaluation in evaluations.values() if is_original else ():
            if short_name(evaluation["model"]) == path.parent.name:
                _add_evaluation(rows[BITS4], evaluation)


def _add_evaluation(row: Rival, evaluation: dict[str, Any]) -> None:
    row.kept = share_kept(evaluation) or UNKNOWN
    if answers := evaluation["answers"]:
        row.same = _share(answers["agree"], answers["answers"])


def _share(same: int, of: int) -> str:
    return f"{'yes' if same == of else 'no'}: {same} of {of}"


def _table(rows: list[Rival], benches: Sequence[dict[str, Any]]) -> Table:
    speeds = {"tokens/s, steps": [row.steps for row in rows]}
    speeds |= {"tokens/s, answers": [row.answers for row in rows]}
    measured = {name: found for name, found in speeds.items() if any(found)}
    shown = measured or {"tokens/s": [None] * len(rows)}
    columns = [*shown, "same answers", "tasks kept", "set-up", "weights in memory"]
    cells = [
        [
            row.name,
            *(_speed(found[number], found[BITS16]) for found in shown.values()),
            *(row.same, row.kept, row.set_up),
            UNKNOWN if row.weights is None else f"{row.weights / 1e9:.3g} GB",
        ]
        for number, row in enumerate(rows)
    ]
    where = ", ".join(dict.fromkeys(bench["device"] for bench in benches))
    note = f"One sequence on {where}. " if where else ""
    note += (
        "Steps: bench decode, whose dense forms have the original's size. Answers: bench exact. "
        "Set-up: the fit alone. To fill a gap, let eval, bench decode or bench exact write --json "
        "into this folder, then repeat twellctl report."
    )
    return Table(TITLE, ["model", *columns], cells, note)


def _speed(rate: float | None, of_original: float | None) -> str:
    if rate is None:
        return UNKNOWN
    said = f"{rate:.{0 if rate >= 100 else 1}f}"
    return f"{said} ({rate / of_original:.2f}x)" if of_original else said
