"""twellctl run: the pipeline in one file, step by step, each by the command of its name.

    model: Qwen/Qwen2.5-Coder-1.5B-Instruct
    out: coder
    write: {prompts: prompts.json, temperature: 0}
    convert: {density: 0.12}
    eval: {tasks: HumanEval.jsonl, run-code: true}
    export: {}

Keys of a step are the flags of its command. What a step makes in OUT is whole or not there, and
`run.json` there says with which settings it was begun: so what is there is not made again.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.errors import TwellError, UsageError, encodable, shown
from twellctl.files.home import from_home
from twellctl.files.outputs import write_file
from twellctl.files.strict_json import read_json
from twellctl.models.verdict import Verdict
from twellctl.screens import ui
from twellctl.training.recipe import run_folder

_MADE = {
    "write": "answers.jsonl", "convert": "relu", "finetune": "sparse", "eval": "eval.json",
    "profile": "profile.json", "export": "exported",
}  # fmt: skip
_CHANGING = ("write", "convert", "finetune")  # what all behind them is made from
RECORD = "run.json"
_WRITTEN = "answers are whole"  # in it, since they grow line by line

Settings = dict[str, Any]


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of steps.")],
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Continue even if the verdict of eval is bad.")
    ] = False,
) -> None:
    """Run the whole pipeline from one file.

    The file holds model, out and any of the steps write, convert, finetune, eval, profile and
    export, each with the flags of its command. A step reads what earlier steps made in out, unless
    it says otherwise. To continue after an interruption, repeat the command. It stops if the
    verdict of eval is bad.
    """
    from twellctl.training.recipe_file import read_settings

    content = read_settings(file, str(file))
    model, out = (content.pop(key, None) for key in ("model", "out"))
    if not isinstance(model, str) or not isinstance(out, str):
        raise UsageError(f"{file} must have model and out, got {shown(model)} and {shown(out)}")
    for name, given in content.items():
        if name not in _MADE:
            raise UsageError(f"{file}: {shown(name)} is not one of model, out, {', '.join(_MADE)}")
        if not isinstance(given, dict | None):
            raise UsageError(f"{file}: {name} must hold flags of its command, got {shown(given)}")
        for key, value in (given or {}).items():
            if key in ("help", "help-all"):
                raise UsageError(f"{file}: {name} has no flag {key}: remove it")
            if not all(map(_is_plain, _each(value))):
                raise UsageError(
                    f"{file}: {key} of {name} must be text, a number, true, false, or a list of "
                    f"these, got {shown(value)}"
                )
    steps = {name: content[name] or {} for name in _MADE if name in content}
    _take(context, model, from_home(out), steps, keep_going)


def _take(
    context: typer.Context, model: str, out: Path, steps: dict[str, Settings], keep_going: bool
) -> None:
    group: Any = context.parent.command
    commands = group.commands
    begun = read_json(out / RECORD, "remove it") if (out / RECORD).exists() else {}
    records = {name: _record(name, model, steps) for name in steps}
    for name in steps:
        words = _words(name, model, out, steps)
        commands[name].make_context(name, words, parent=context.parent)  # refuses wrong flags
        made = out / _MADE[name]
        if made.exists() and name not in begun:
            raise TwellError(
                f"{out / RECORD} does not say with which settings {made} was made: move it "
                "elsewhere, or name another out"
            )
        if made.exists() and begun[name] != records[name]:
            raise TwellError(f"{made} was made with other settings: remove it, or name another out")
    if out.exists() and not out.is_dir():
        raise TwellError(f"{out} exists and is not a folder: name another out")
    out.mkdir(parents=True, exist_ok=True)
    for name, made in ((name, out / _MADE[name]) for name in steps):
        if made.exists() and (name != "write" or begun.get(_WRITTEN)):
            ui.note(f"{name}: {made} is there")
        else:
            begun[name] = records[name]
            begun[_WRITTEN] = name != "write" and begun.get(_WRITTEN, False)
            write_file(out / RECORD, json.dumps(begun, indent=1))
            words = _words(name, model, out, steps)
            ui.note(f"{name}: twellctl {' '.join(map(ui.word, [name, *words]))}")
            with commands[name].make_context(name, words, parent=context.parent) as step:
                commands[name].invoke(step)
            begun[_WRITTEN] |= name == "write"
            write_file(out / RECORD, json.dumps(begun, indent=1))
        if name == "eval" and not keep_going:
            _check_verdict(made)


def _check_verdict(made: Path) -> None:
    found = read_json(made, "remove it").get("verdict")
    if found is None:
        return
    if (verdict := Verdict(**found)).step is None:
        ui.note(f"eval: {verdict}: whether the model is good enough is not known")
    if verdict.is_bad:
        raise TwellError(
            f"{verdict}: convert at a higher density or on more text, or continue with --keep-going"
        )


def _record(name: str, model: str, steps: dict[str, Settings]) -> Settings:
    """All that what `name` makes depends on."""
    before = _before(name, steps)
    used = [one for one in before if one in _CHANGING or name == "export"]
    return {"model": model} | {one: steps[one] for one in (*used, name)}


def _before(name: str, steps: dict[str, Settings]) -> list[str]:
    return list(steps)[: list(steps).index(name)]


def _words(name: str, model: str, out: Path, steps: dict[str, Settings]) -> list[str]:
    """The words behind the name of a step's command: its flags, and what stands for those left out.

    It reads the newest model of the steps before it, and the answers that were written.
    """
    before = _before(name, steps)
    made = {one: str(out / file) for one, file in _MADE.items()}
    newest = next((made[one] for one in ("finetune", "convert") if one in before), model)
    given: Settings = {}
    if "write" in before and name != "export" and not {"tasks", "prompts"} & {*steps[name]}:
        given["data"] = made["write"]
    match name:
        case "write":
            words = [model, made[name], "--overwrite"]
        case "convert":
            words = [model, made[name]]
        case "finetune":
            words = [newest, made[name], f"--teacher={model}"]
            words += ["--resume"] if run_folder(Path(made[name])).exists() else []
        case "eval":
            words = [newest, f"--reference={model}", f"--json={made[name]}"]
        case "profile":
            words = [newest, f"--json={made[name]}"]
        case "export":
            words = [newest, made[name]]
            given = {one: made[one] for one in ("profile", "eval") if one in before}
    return [*words, *_flags(given | steps[name])]


def _flags(settings: Settings) -> Iterator[str]:
    for key, value in settings.items():
        for one in _each(value):
            if isinstance(one, bool):
                yield f"--{key}" if one else f"--no-{key}"
            else:
                yield f"--{key}={one}"


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_plain(value: Any) -> bool:
    """Whether `RECORD` can hold it, as JSON: neither lone surrogates, nor what is not finite."""
    if isinstance(value, str):
        return value == encodable(value)
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
