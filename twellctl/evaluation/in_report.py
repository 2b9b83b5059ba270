"""What a report says of evaluations, from their JSON: a table of what is kept, and answers."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from twellctl.errors import bounded, counted
from twellctl.evaluation.kept import kept_of
from twellctl.evaluation.pairs import common_words
from twellctl.report.charts import short_name
from twellctl.report.page import Answers, Table

MOST_ANSWERS = 12
LONGEST = 6000  # characters of a question, and of an answer
NOTHING = "-"


def table_of(evaluations: Sequence[dict[str, Any]]) -> Table:
    """What is kept: the original, as the first evaluation has it, then each model."""
    tasks = dict.fromkeys(task["task"] for one in evaluations for task in one["tasks"])
    columns = ["model", *tasks, "kept", "bytes read", "KL, answers"]
    rows = [_original(evaluations[0], tasks)] if evaluations[0]["reference"] else []
    note = (
        "Kept: tasks solved, over those that the original solves, ± one standard error. Bytes: of "
        "linear layers that a token reads."
    )
    rows += [_model(one, tasks) for one in evaluations]
    return Table("What it keeps", columns, rows, note)


def _original(evaluation: dict[str, Any], tasks: dict[str, None]) -> list[str]:
    by_name = {task["task"]: task for task in evaluation["tasks"]}
    cells = [_score(by_name.get(name), "reference") for name in tasks]
    read = evaluation["reference_bytes_read"]
    name = f"{short_name(evaluation['reference'])}, the original"
    return [name, *cells, "100%", _megabytes(read) if read else NOTHING, NOTHING]


def _model(evaluation: dict[str, Any], tasks: dict[str, None]) -> list[str]:
    by_name = {task["task"]: task for task in evaluation["tasks"]}
    cells = [_score(by_name.get(name), "accuracy") for name in tasks]
    read, whole = evaluation["bytes_read"], evaluation["reference_bytes_read"]
    share = f" ({read / whole:.1%})" if read and whole else ""
    answers = evaluation["answers"]
    return [
        short_name(evaluation["model"]),
        *cells,
        share_kept(evaluation) or NOTHING,
        f"{_megabytes(read)}{share}" if read else NOTHING,
        f"{answers['kl']['mean']:.4f}" if answers else NOTHING,
    ]


def share_kept(evaluation: dict[str, Any]) -> str | None:
    """What is kept of the reference's tasks; None without any that it solves in its own words."""
    tasks = [task for task in evaluation["tasks"] if task["reference_right"]]
    kept = kept_of([(task["right"], task["reference_right"]) for task in tasks])
    return None if kept is None else f"{kept.share:.1%} ± {kept.stderr:.1%}"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.4g} MB"


def _score(task: dict[str, Any] | None, whose: str) -> str:
    """Answers in its own words by number, choices by their share."""
    if task is None or task[whose] is None:
        return NOTHING
    share = task[whose]["acc"]["mean"]
    if task["kind"] == "choices":
        return f"{share:.1%}"
    return f"{share * task['questions']:.0f} of {task['questions']}"


def answers_of(evaluation: dict[str, Any]) -> list[Answers]:
    """At most `MOST_ANSWERS` beside the reference's: lost ones first, then those that differ."""
    if not evaluation["reference"]:
        return []
    names = f"{short_name(evaluation['reference'])}, the original", short_name(evaluation["model"])
    return list(islice(_answers(evaluation, names), MOST_ANSWERS))


def _answers(evaluation: dict[str, Any], names: tuple[str, str]) -> Iterator[Answers]:
    for task in evaluation["tasks"]:
        for lost in task["lost_ones"]:
            common = common_words(lost["reference"], lost["answer"])
            rest = tuple(lost[of][len(common) :] for of in ("reference", "answer"))
            yield _shown(f"Lost, of {task['task']}", lost["question"], common, names, rest)
    for pair in sorted(evaluation["pairs"], key=lambda pair: pair["agrees"]):
        if pair["agrees"]:
            what = f"The same to the end: {counted(pair['tokens'], 'token')}"
        else:
            what = f"The same for {counted(pair['tokens'], 'token')}"
        yield _shown(what, pair["prompt"], pair["common"], names, pair["rest"])


def _shown(
    what: str, question: str, common: str, names: tuple[str, str], rest: Sequence[str]
) -> Answers:
    one, other = (bounded(text, LONGEST) for text in rest)
    question, common = bounded(question, LONGEST), bounded(common, LONGEST)
    return Answers(what, question, common, names, (one, other))
