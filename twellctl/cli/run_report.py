"""twellctl report: a page on what lies in the folder of a run, which `run` writes at its end, too,
and `quickstart`.

Read are run.json, what the steps made, and what else was measured and written there: any JSON of
`eval` is a row of a table, and any of `bench decode` a plot.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from twellctl.bench.decode_chart import chart_of as chart_of_bench
from twellctl.cli.rivals import check_figures, rivals_of
from twellctl.errors import TwellError, counted
from twellctl.evaluation import kept
from twellctl.evaluation.in_report import answers_of, table_of
from twellctl.evaluation.results import VERSION_KEY
from twellctl.files.made_of import RECORD
from twellctl.files.outputs import check_file, write_file
from twellctl.files.strict_json import read_json
from twellctl.firing.profiled import read_profile
from twellctl.fitting.chart import chart_of as chart_of_fit
from twellctl.heads.folder import FACTS as HEAD_FILE
from twellctl.models.carried import METRICS_FILE
from twellctl.models.checkpoint import FIT_FILE, REPORT_FILE
from twellctl.report.charts import Chart
from twellctl.report.page import KEY, Page, Picture, Table, html_of, pictures_of
from twellctl.screens import ui

PAGE = "report.html"
RECIPE = "recipe"  # in run.json: the file of the run
_OWN = (RECORD, "eval.json", "profile.json")  # what `run` itself writes there
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The out of a run.")],
) -> None:
    """Write a page on a run.

    FOLDER/report.html has the verdict, what the model keeps, plots, and answers beside the
    original's. It is one file, which loads nothing. Other evaluations in FOLDER, such as one of
    the original in 4 bits, become rows of a table, what 'bench decode --json' wrote there becomes a
    plot, and both it and 'bench exact --json' fill a table of what you would pick instead.
    """
    ui.doing("drawing")
    ui.say(str(write_report(folder)))


def check_report(folder: Path) -> None:
    """Refuse a folder whose report would replace something else."""
    check_file(folder / PAGE, "the report", "report of twellctl", _is_report)


def write_report(folder: Path) -> Path:
    """Write the page, unless it says the same already; `TwellError` for a folder of no run."""
    path = folder / PAGE
    if not any((folder / name).is_file() for name in _OWN):
        raise TwellError(f"{folder} holds nothing of a run: give the out of 'twellctl run'")
    check_report(folder)
    content = html_of(_page(folder))
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        write_file(path, content, lambda: check_report(folder))
    return path


def _is_report(path: Path) -> bool:
    return KEY in path.read_text(encoding="utf-8", errors="replace")[:2000]


def _page(folder: Path) -> Page:
    evaluations, benches = _measured(folder)
    with _complete(folder):
        own = evaluations.get("eval.json")
        kept_tables = [table_of(list(evaluations.values()))] if evaluations else []
        rivals = rivals_of(folder, evaluations, benches)
        verdict = own["verdict"] if own and own["verdict"] else {}
        return Page(
            title=folder.resolve().name,
            verdict=verdict.get("words", ""),
            because=verdict.get("because", ""),
            is_bad=verdict.get("step") in (3, 4),
            sentences=[said for bench in benches for said in _said(bench)],
            tables=[*filter(None, [rivals, *kept_tables, _trained(folder)])],
            pictures=_pictures(list(_charts(folder, evaluations, benches))),
            answers=answers_of(own) if own else [],
            facts=list(_facts(folder, own)),
            recipe=_recipe(folder),
        )


def _said(bench: dict[str, Any]) -> list[str]:
    """The sentences of a bench; that of exact answers names the draft."""
    if bench["command"] == "bench decode":
        return bench["sentences"]
    drafter = f"{'draft head ' if bench['is_head'] else ''}{bench['models']['draft']}"
    return [f"{said}, with drafts by {drafter}" for said in bench["sentences"]]


def _measured(folder: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The evaluations in a folder by the names of their files, the run's first; and benches.

    A note names a JSON that cannot be read, or is no object, which may be someone else's; and a
    bench that lacks a figure, as one of another version does.
    """
    evaluations, benches = {}, []
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.name != "eval.json", path)):
        try:
            content = read_json(path)
        except TwellError as error:
            if path.name in _OWN:
                raise
            ui.note(f"not in {PAGE}: {error}")
            continue
        if VERSION_KEY in content:
            evaluations[path.name] = content
        elif (command := content.get("command")) in ("bench decode", "bench exact"):
            try:
                _check_bench(content)
            except _BROKEN as error:
                again = f"it is broken or of another version: repeat '{command} --json'"
                ui.note(f"not in {PAGE}: {path} lacks a figure ({error!r}), {again}")
                continue
            benches.append(content)
    return evaluations, benches


def _check_bench(bench: dict[str, Any]) -> None:
    """Raise one of `_BROKEN` if a page cannot say what is in it."""
    _said(bench)
    check_figures(bench)
    if bench["command"] == "bench decode":
        chart_of_bench(bench)


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[None]:
    """`TwellError` if something inside is not as a command wrote it."""
    try:
        yield
    except _BROKEN as error:
        raise TwellError(
            f"{path}: a figure is missing or broken ({error!r}): make again what is there"
        ) from error


def _charts(
    folder: Path, evaluations: dict[str, dict[str, Any]], benches: list[dict[str, Any]]
) -> Iterator[Chart]:
    """Of all that was measured; an evaluation without tasks or bytes has no point."""
    points = []
    for name, evaluation in evaluations.items():
        with contextlib.suppress(TwellError):
            points.append(kept.point_of(evaluation, name))
    if points:
        yield kept.chart_of(points)
    yield from (chart_of_bench(one) for one in benches if one["command"] == "bench decode")
    if (profile := folder / "profile.json").is_file():
        yield read_profile(profile).to_chart()
    if (fit := folder / "relu" / FIT_FILE).is_file():
        yield chart_of_fit(read_json(fit), "relu")
    if (history := folder / "sparse" / METRICS_FILE).is_file():
        from twellctl.training.history import chart_of  # brings torch

        found = read_json(folder / "sparse" / REPORT_FILE)
        yield chart_of(history, "sparse: fine-tuning", found["target_density"])


def _trained(folder: Path) -> Table | None:
    """What fine-tuning changed, on held-out text; None without any, or without such text."""
    if not (path := folder / "sparse" / REPORT_FILE).is_file():
        return None
    found = read_json(path)
    models = (
        ("teacher", found["teacher_cross_entropy"], 1.0),
        ("before", found["first_cross_entropy"], found["first_density"]),
        ("after", found["cross_entropy"], found["density"]),
    )
    rows = [
        [name, f"{loss:.4f}", f"{density:.2%}"]
        for name, loss, density in models
        if loss is not None and density is not None
    ]
    note = "On held-out text: cross-entropy, nats a token; the share of neurons that fire."
    columns = ["model", "loss", "neurons that fire"]
    return Table("What fine-tuning changed", columns, rows, note) if rows else None


def _pictures(charts: list[Chart]) -> list[Picture]:
    if charts and importlib.util.find_spec("matplotlib") is None:
        ui.note(f"{PAGE} has no plots: pip install matplotlib, then twellctl report")
        return []
    return pictures_of(charts) if charts else []


def _facts(folder: Path, evaluation: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if evaluation:
        yield "measured on", f"{evaluation['device']}, {evaluation['dtype']}"
        yield "versions", ", ".join(f"{k} {v}" for k, v in evaluation["versions"].items())
        yield "fingerprint of the weights", evaluation["fingerprint"]
    weights = list((folder / "exported").rglob("*.safetensors"))  # an original's, too
    if weights:
        size = sum(path.stat().st_size for path in weights)
        yield "weights on disk", f"{size / 1e9:.3g} GB in exported/"
    if (fit := folder / "relu" / FIT_FILE).is_file():
        found = read_json(fit)
        took = f"{ui.duration(found['seconds'])} for {found['tokens']} tokens"
        if found["kept"]:
            took += f", {counted(found['kept'], 'layer')} kept from before"
        yield "fit", took
    if (head := folder / "head" / HEAD_FILE).is_file():
        found = read_json(head)
        if "seconds" in found:  # else an earlier version trained it
            tokens = counted(found["tokens"], "token")
            yield "draft head", f"{ui.duration(found['seconds'])} for {tokens}"


def _recipe(folder: Path) -> str:
    """The file of the run, as YAML."""
    if not (folder / RECORD).is_file():
        return ""
    recipe = read_json(folder / RECORD).get(RECIPE)
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True) if recipe else ""
