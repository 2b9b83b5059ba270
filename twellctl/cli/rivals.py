"""What a user would pick instead of a model: a table, of what lies in the folder of its run.

The original in 16, 8 and 4 bits; this model by itself (fast); the original with drafts (exact), one
row for each draft that was timed. Speeds are those of one sequence, of steps by `bench decode` and
of answers by `bench exact`. The dense forms of `bench decode` have the size of the original, and so
its speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.bench.exact_results import EXACT, FIT, ORIGINAL
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.evaluation.in_report import share_kept
from twellctl.files.strict_json import read_json
from twellctl.heads.folder import FACTS as HEAD_FILE
from twellctl.models.checkpoint import FIT_FILE
from twellctl.report.charts import short_name
from twellctl.report.page import Table
from twellctl.screens import ui

UNKNOWN = "not measured"
TITLE = "What you would pick instead"
BITS16, BITS8, BITS4, FAST = range(4)  # rows; then each measured draft has one
ROUNDED = {"fp8": BITS8, "int4": BITS4}  # of dense forms


@dataclass
class Rival:
    """A row of the table; what is None was not measured. Speeds are tokens a second;
    `over_original`: how many times as fast answers came as the original's of the same bench."""

    name: str
    steps: float | None = None
    answers: float | None = None
    over_original: float | None = None
    same: str = UNKNOWN
    kept: str = UNKNOWN
    set_up: str = UNKNOWN
    weights: int | None = None


def rivals_of(
    folder: Path, evaluations: dict[str, dict[str, Any]], benches: Sequence[dict[str, Any]]
) -> Table | None:
    """The table; None where nothing of it was measured. `evaluations` by their files' names."""
    if "eval.json" not in evaluations and not benches:
        return None
    fits, heads = (_by_folder(folder, name) for name in (FIT_FILE, HEAD_FILE))
    return _table(_rows(evaluations, benches, fits, heads), benches)


def check_figures(bench: dict[str, Any]) -> None:
    """Raise what reading it raises, such as `KeyError`, if `bench` lacks what the table says."""
    _table(_rows({}, [bench], {}, {}), [bench])


def _rows(
    evaluations: dict[str, dict[str, Any]],
    benches: Sequence[dict[str, Any]],
    fits: dict[str, dict[str, Any]],
    heads: dict[str, dict[str, Any]],
) -> list[Rival]:
    own = evaluations.get("eval.json")
    exact = [bench for bench in benches if bench["command"] == "bench exact"]
    rows, own_fit = _named(own, exact), _own_fit(own, exact, fits)
    for bench in exact:
        rows.append(_exact(rows, bench, fits, heads, own_fit))
    if not exact:
        rows.append(Rival(f"{rows[BITS16].name.removesuffix(', 16 bits')}, exact"))
    for bench in benches:
        if bench["command"] == "bench decode":
            _add_steps(rows, bench, own)
    _add_fits(rows, fits, own_fit, evaluations)
    is_rounded = own is not None and _is_original(fits.get(short_name(own["model"])))
    if own:
        _add_evaluation(rows[BITS4 if is_rounded else FAST], own)
    rows[BITS16].set_up, rows[BITS16].kept, rows[BITS16].same = "none", "100%", "yes"
    if is_rounded:  # this model is the original in 4 bits
        del rows[FAST]
    return rows


def _by_folder(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """What lies under this `name` in the folders of `folder`, by their names."""
    return {path.parent.name: read_json(path) for path in sorted(folder.glob(f"*/{name}"))}


def _named(own: dict[str, Any] | None, exact: Sequence[dict[str, Any]]) -> list[Rival]:
    model, original = "this model", "the original"
    if exact:
        original = exact[0]["models"]["original"]
    if own:
        model, original = own["model"], own["reference"] or original
    names = [f"{short_name(original)}, {bits} bits" for bits in (16, 8, 4)]
    return [Rival(name) for name in (*names, f"{short_name(model)}, fast")]


def _own_fit(
    own: dict[str, Any] | None, exact: Sequence[dict[str, Any]], fits: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """How this model was fitted, which is what was evaluated, else the first draft; None: it is not
    known. An export says the same as what it was made from."""
    models = [own["model"]] if own else [bench["models"]["draft"] for bench in exact]
    found = (fits[name] for name in map(short_name, models) if name in fits)
    return next((fit for fit in found if not _is_original(fit)), None)


def _row_of(
    rows: list[Rival], fit: dict[str, Any] | None, own_fit: dict[str, Any] | None
) -> Rival | None:
    """That of a fit by itself; None of another one than this model."""
    if _is_original(fit):
        return rows[BITS4]
    return rows[FAST] if fit is None or own_fit in (None, fit) else None


def _of_one(bench: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The forms of one sequence in JSON of a bench."""
    for point in bench["points"]:
        if point["batch"] == 1:
            yield from ({"name": name} | form for name, form in point["forms"].items())


def _exact(
    rows: list[Rival],
    bench: dict[str, Any],
    fits: dict[str, dict[str, Any]],
    heads: dict[str, dict[str, Any]],
    own_fit: dict[str, Any] | None,
) -> Rival:
    """The row of a draft; the original and the draft by itself get what they lack.

    A draft may be the original in 4 bits, or a draft head, which is nothing by itself.
    """
    name, original = (short_name(bench["models"][one]) for one in ("draft", "original"))
    fit = None if bench["is_head"] else fits.get(name)
    made = Rival(f"{original}, exact, drafts by {name}")
    if bench["is_head"]:
        made.name += " (draft head)"
        seconds = heads.get(name, {}).get("seconds")
        made.set_up = UNKNOWN if seconds is None else ui.duration(seconds)
    elif fit:
        made.name += " (original in 4 bits)" if _is_original(fit) else ""
        made.set_up = _took(fit)
    alone = _row_of(rows, fit, own_fit)
    by_form = {ORIGINAL: rows[BITS16], FIT: alone, EXACT: made}
    for form in _of_one(bench):
        if (row := by_form.get(form["name"])) and row.answers is None:
            row.answers, row.over_original = form["tokens_per_second"], form["over_original"]
            row.weights = form.get("weight_bytes")
    prompts = next((point["prompts"] for point in bench["points"] if point["batch"] == 1), None)
    differing = next((f["differing"] for f in _of_one(bench) if f["name"] == EXACT), None)
    if prompts is not None and differing is not None:
        made.same = _share(prompts - differing, prompts)
        made.kept = UNKNOWN if differing else "100%"
    return made


def _add_steps(rows: list[Rival], bench: dict[str, Any], own: dict[str, Any] | None) -> None:
    """Of a model of the user's: a random one has no fingerprint. What fires is this model's, which
    was evaluated as its `own`."""
    for model in bench["models"]:
        if (fingerprint := model["model"].get("fingerprint")) is None:
            continue
        rounded = ROUNDED.get(model["model"].get("weights"), BITS16)
        by_kind = {DENSE: rounded, DENSE_FP8: BITS8, TWELL: FAST}
        for form in _of_one(model):
            if form["kind"] == TWELL and own and own["fingerprint"] != fingerprint:
                continue
            row = rows[by_kind[form["kind"]]]
            if row.steps is None:
                row.steps = form["tokens_per_second"]
                row.weights = row.weights or form.get("weight_bytes")


def _add_fits(
    rows: list[Rival],
    fits: dict[str, dict[str, Any]],
    own_fit: dict[str, Any] | None,
    evaluations: dict[str, dict[str, Any]],
) -> None:
    """How long fits took, and what the evaluation of the original in 4 bits found."""
    for name, fit in fits.items():
        if (row := _row_of(rows, fit, own_fit)) is None:
            continue
        row.set_up = _took(fit)
        for evaluation in evaluations.values() if _is_original(fit) else ():
            if short_name(evaluation["model"]) == name:
                _add_evaluation(row, evaluation)


def _is_original(fit: dict[str, Any] | None) -> bool:
    """Whether there is a fit that only rounded, and so is the original in 4 bits."""
    return fit is not None and fit["settings"]["keep_activation"]


def _took(fit: dict[str, Any]) -> str:
    return f"{'more than ' if fit['kept'] else ''}{ui.duration(fit['seconds'])}"


def _add_evaluation(row: Rival, evaluation: dict[str, Any]) -> None:
    row.kept = share_kept(evaluation) or UNKNOWN
    if answers := evaluation["answers"]:
        row.same = _share(answers["agree"], answers["answers"])


def _share(same: int, of: int) -> str:
    return f"{'yes' if same == of else 'no'}: {same} of {of}"


def _table(rows: list[Rival], benches: Sequence[dict[str, Any]]) -> Table:
    original = rows[BITS16].steps
    over = [row.steps / original if row.steps and original else None for row in rows]
    speeds = {
        "tokens/s, steps": [_speed(row.steps, each) for row, each in zip(rows, over, strict=True)],
        "tokens/s, answers": [_speed(row.answers, row.over_original) for row in rows],
    }
    measured = {name: column for name, column in speeds.items() if {*column} != {UNKNOWN}}
    shown = measured or {"tokens/s": [UNKNOWN] * len(rows)}
    columns = [*shown, "same answers", "tasks kept", "set-up", "weights"]
    cells = [
        [
            row.name,
            *speed,
            *(row.same, row.kept, row.set_up),
            UNKNOWN if row.weights is None else f"{row.weights / 1e9:.3g} GB",
        ]
        for row, speed in zip(rows, zip(*shown.values(), strict=True), strict=True)
    ]
    where = ", ".join(dict.fromkeys(bench["device"] for bench in benches))
    note = f"One sequence on {where}. " if where else ""
    note += (
        "Steps: bench decode, whose dense forms have the original's size. Answers: bench exact, "
        "each beside the original's of the same bench. Set-up: the fit, or the training of "
        "the draft head, alone. Weights: in memory. To fill a gap, let eval, bench "
        "decode or bench exact write --json into this folder, then repeat twellctl report."
    )
    return Table(TITLE, ["model", *columns], cells, note)


def _speed(rate: float | None, over_original: float | None) -> str:
    if rate is None:
        return UNKNOWN
    said = f"{rate:.{0 if rate >= 100 else 1}f}"
    return f"{said} ({over_original:.2f}x)" if over_original else said
