"""twellctl run: the pipeline in one file, step by step, each by the command of its name.

    model: Qwen/Qwen2.5-Coder-1.5B-Instruct
    out: coder
    write: {prompts: prompts.json, temperature: 0}
    draft: {}
    convert: {density: 0.12}
    eval: {tasks: HumanEval.jsonl, run-code: true}
    export: {}

Keys of a step are the flags of its command. true and false are for switches, a list is for flags
that may be repeated, and a mapping for those that take JSON.

What a step makes in OUT is whole or not there, but for answers, whose command continues. `run.json`
there says with which settings and of which files it was made, and what came of it: so what is there
is not made again, and nothing else passes for it.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.cli.run_report import RECIPE, check_report, write_report
from twellctl.errors import TwellError, UsageError, encodable, shown
from twellctl.files.home import from_home
from twellctl.files.made_of import RECORD, as_json, contents_of, digest_of, refuse_other
from twellctl.files.outputs import write_file
from twellctl.files.strict_json import read_json
from twellctl.heads.folder import head_files, is_head
from twellctl.models.carried import model_files
from twellctl.models.checkpoint import checkpoint_in, located
from twellctl.models.verdict import Verdict
from twellctl.screens import ui
from twellctl.text.files import kind_and_path, text_files
from twellctl.text.written import hold_out, is_unfinished
from twellctl.training.recipe import RECIPE_FILE, resolve_recipe, run_folder
from twellctl.training.recipe import settings as settings_of

_MADE = {
    "write": "answers.jsonl",
    "draft": "head",
    "convert": "relu",
    "finetune": "sparse",
    "eval": "eval.json",
    "profile": "profile.json",
    "export": "exported",
}
_HELD_OUT = "held-out.jsonl"  # answers that no model is made from
_NOT_HERE = ("help", "help-all", "dry-run", "plot", "json", "resume")  # the last two are run's own
_CHANGING = ("write", "convert", "finetune")  # later steps read what these made
_MEASURING = ("eval", "profile")  # export reads what these made
_MODELS = ("teacher", "reference", "original")  # flags that name what a step reads
_FILES = ("data", "eval-data", "prompts", "tasks", "recipe", "profile", "eval", "bench")
_REMEDY = "remove it, or name another out"

Settings = dict[str, Any]


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of steps.")],
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Continue even if the verdict of eval is bad.")
    ] = False,
) -> None:
    """Run the whole pipeline from one file.

    The file holds model, out and any of the steps write, draft, convert, finetune, eval, profile
    and export, each with the flags of its command. A step reads what earlier steps made in out,
    unless it says otherwise. To continue after an interruption, repeat the command. It stops if the
    verdict of eval is bad. It ends with a page on all of it, report.html in out.
    """
    from twellctl.training.recipe_file import read_settings

    content = read_settings(file, str(file))
    model, out = (content.pop(key, None) for key in ("model", "out"))
    if not isinstance(model, str) or not isinstance(out, str):
        raise UsageError(f"{file} must have model and out, got {shown(model)} and {shown(out)}")
    _check_steps(file, content)
    steps = {name: content[name] or {} for name in _MADE if name in content}
    recipe = {"model": model, "out": out, **content}
    _Pipeline(context.find_root(), model, from_home(out), steps).take(keep_going, recipe)


def _check_steps(file: Path, content: dict[str, Any]) -> None:
    """`UsageError` for a step that does not exist, or a flag whose value no flag can have."""
    for name, given in content.items():
        if name not in _MADE:
            raise UsageError(f"{file}: {shown(name)} is not one of model, out, {', '.join(_MADE)}")
        if not isinstance(given, dict | None):
            raise UsageError(f"{file}: {name} must hold flags of its command, got {shown(given)}")
        for key, value in (given or {}).items():
            if key in _NOT_HERE:
                raise UsageError(f"{file}: {key} of {name} is not for a file of run: remove it")
            if not all(map(_is_plain, _each(value))):
                raise UsageError(f"{file}: {_must_be(name, key, value)}")
    _check_rounded(file, content)
    _check_original(file, content)


def _check_rounded(file: Path, content: dict[str, Any]) -> None:
    """`UsageError` for a step that refuses the model in 4 bits which convert makes before it."""
    made = content.get("convert") or {}
    keeps = bool(made.get("keep-activation"))
    refusing = ("finetune", "profile") if keeps else ("finetune",)
    for name in refusing if made.get("bits") else ():
        if name in content:
            flag = "keep-activation" if keeps else "bits"
            raise UsageError(
                f"{file}: {name} does not take what convert makes with {flag}: remove one of them"
            )


def _check_original(file: Path, content: dict[str, Any]) -> None:
    """`UsageError` for an export with the original of what finetune makes, which is no draft."""
    if "finetune" in content and (content.get("export") or {}).get("with-original"):
        raise UsageError(
            f"{file}: export does not take what finetune makes with-original: remove one of them"
        )


def _free_unused() -> None:
    """Let no memory of a GPU stay with this process after a step: others may need it."""
    if "torch" in sys.modules:
        from twellctl.here.gpu_memory import free_unused

        free_unused()


class _Pipeline:
    """The steps of one file over `model`, and what of them is in the folder `out` already."""

    def __init__(self, root: Any, model: str, out: Path, steps: dict[str, Settings]):
        self._root, self._commands = root, root.command.commands
        self._model, self._out, self._steps = model, out, steps
        path = out / RECORD
        self._begun: dict[str, Any] = read_json(path, "remove it") if path.exists() else {}

    def take(self, keep_going: bool, recipe: Settings) -> None:
        """Take all steps that are not done; `TwellError`, before any, if one of them cannot be.

        The report, with the `recipe`, is written at the end, and before a bad verdict stops it.
        """
        for name in self._steps:
            self._check(name)
        if self._out.exists() and not self._out.is_dir():
            raise TwellError(f"{self._out} exists and is not a folder: name another out")
        self._out.mkdir(parents=True, exist_ok=True)
        check_report(self._out)
        self._save(RECIPE, recipe)
        for name in self._steps:
            made = self._out / _MADE[name]
            is_begun = made.exists()
            if is_begun:
                self._check_files(name, made)
            if is_begun and not (name == "write" and is_unfinished(made)):
                ui.note(f"{name}: {made} is there")
                if name == "write":
                    self._finish_answers(made)
            else:
                self._take_one(name, made)
            if name == "eval" and not keep_going:
                self._check_verdict(made)
        self._report()

    def _check(self, name: str) -> None:
        """Refuse wrong flags of a step, and what was made with other settings."""
        self._commands[name].make_context(name, self._words(name), parent=self._root)
        made = self._out / _MADE[name]
        begun = self._begun.get(name)
        parts = begun if isinstance(begun, dict) else {}
        if not made.exists():
            run = run_folder(made)
            if name == "finetune" and run.exists() and "settings" in parts:  # it goes on by these
                refuse_other(run, parts["settings"], _record(name, self._steps), _REMEDY)
            return
        if not all(isinstance(parts.get(part), dict) for part in ("settings", "files")):
            raise TwellError(
                f"{self._out / RECORD} does not say with which settings {made} was made: move it "
                "elsewhere, or name another out"
            )
        refuse_other(made, parts["settings"], _record(name, self._steps), _REMEDY)

    def _check_files(self, name: str, made: Path) -> None:
        """Refuse what was made of other files, or is not what the step made."""
        begun, result = self._begun[name], None
        refuse_other(made, begun["files"], self._files(name), _REMEDY)
        with contextlib.suppress(TwellError):
            result = _digest(made)
        if result is None or begun.get("result", result) != result:
            raise TwellError(f"{made} is not what {name} made, or damaged: {_REMEDY}")

    def _take_one(self, name: str, made: Path) -> None:
        words = self._words(name)
        ui.note(f"{name}: twellctl {' '.join(map(ui.word, [name, *words]))}")
        begun = {"settings": _record(name, self._steps), "files": self._files(name)}
        self._save(name, begun)
        if name == "write":
            (self._out / _HELD_OUT).unlink(missing_ok=True)
        if name == "eval":
            self._note_fitted_text()
        with self._commands[name].make_context(name, words, parent=self._root) as step:
            self._commands[name].invoke(step)
        _free_unused()
        if name == "write":
            hold_out(made, self._out / _HELD_OUT)
        self._save(name, begun | {"result": _digest(made)})

    def _finish_answers(self, made: Path) -> None:
        """Hold out what an interruption left among the answers; once, for later steps read them."""
        held_out, begun = self._out / _HELD_OUT, self._begun["write"]
        if "result" not in begun:
            hold_out(made, held_out)
            self._save("write", begun | {"result": _digest(made)})
        elif not held_out.exists():
            raise TwellError(f"{held_out} is missing: put it back, or remove {made}, too")

    def _check_verdict(self, made: Path) -> None:
        try:
            _check_verdict(made)
        except TwellError:
            self._report()
            raise

    def _report(self) -> None:
        ui.doing("drawing the report")
        ui.note(f"report: {write_report(self._out)}")

    def _save(self, name: str, begun: dict[str, Any]) -> None:
        before = dict(self._begun)
        self._begun[name] = as_json(begun)
        if self._begun != before:
            write_file(self._out / RECORD, json.dumps(self._begun, indent=1))

    def _words(self, name: str) -> list[str]:
        """The command line of a step without its name."""
        words, settings = _words(name, self._model, self._out, self._steps)
        return [*words, *_flags(name, settings, self._commands[name])]

    def _files(self, name: str) -> dict[str, Any]:
        """Digests of all that a step reads, by the flags that name it; else what these name."""
        words, settings = self._given(name)
        found: dict[str, Any] = {"model": _model_digest(words[0], settings.get("revision"))}
        for flag, value in settings.items():
            if flag in _MODELS:
                found[flag] = _model_digest(value)
            elif flag in _FILES:
                found[flag] = [_file_digest(one) for one in _each(value)]
        return found

    def _given(self, name: str) -> tuple[list[str], Settings]:
        """As `_words`, with what a recipe says, which may name files, too."""
        words, settings = _words(name, self._model, self._out, self._steps)
        if "recipe" in settings:
            settings = settings_of(resolve_recipe(settings["recipe"])) | settings
        return words, settings

    def _note_fitted_text(self) -> None:
        """Note what eval reads that the model was made from, whatever its name."""
        made_from = [one for one in _before("eval", self._steps) if one in ("convert", "finetune")]
        read = [path for one in made_from for path in _each(self._given(one)[1].get("data"))]
        if str(self._out / _MADE["write"]) in read:  # the answers to these prompts
            made_from.append("write")
        fitted = {one for name in made_from for one in self._contents(name)}
        for content, path in self._contents("eval").items():
            if content in fitted:
                ui.note(f"eval: the model was made from {path}, so figures on it are too kind")

    def _contents(self, name: str) -> dict[str, Path]:
        """The files of text and prompts that a step reads, by digests of what they hold."""
        settings = self._given(name)[1]
        named = [one for flag in ("data", "prompts") for one in _each(settings.get(flag, []))]
        files = text_files([_path(one) for one in named])
        return dict(zip(contents_of(files), files, strict=True))


def _model_digest(model: str, revision: str | None = None) -> str:
    if model in ("auto", "none"):  # teachers
        return model
    name, path = located(model, revision)
    if is_head(path):
        return digest_of(head_files(path))
    return digest_of(model_files(checkpoint_in(name, path)))


def _file_digest(name: str) -> str:
    """Of a file, or the files of a folder; the name of a recipe itself."""
    path = from_home(_path(name))
    if not path.exists():
        return name
    return digest_of(text_files([str(path)]) if path.is_dir() else [path])


def _path(name: str) -> str:
    """FILE of FILE and of NAME=FILE."""
    return kind_and_path(name)[1]


def _digest(made: Path) -> str:
    return _model_digest(str(made)) if made.is_dir() else digest_of([made])


def _check_verdict(made: Path) -> None:
    """`TwellError` if the evaluation in `made` says that users would notice too much."""
    found = read_json(made, "remove it").get("verdict")
    if found is None:
        return
    if (verdict := Verdict(**found)).step is None:
        ui.note(f"eval: {verdict}: whether the model is good enough is not known")
    if verdict.is_bad:
        raise TwellError(
            f"{verdict}: convert at a higher density or on more text, or continue with --keep-going"
        )


def _record(name: str, steps: dict[str, Settings]) -> Settings:
    """All settings that the result of step `name` depends on, but for names of what is read."""
    read_by = (*_CHANGING, *_MEASURING) if name == "export" else _CHANGING
    used = [one for one in _before(name, steps) if one in read_by]
    read = {*_MODELS, *_FILES}
    return {one: {k: steps[one][k] for k in steps[one] if k not in read} for one in (*used, name)}


def _before(name: str, steps: dict[str, Settings]) -> list[str]:
    return list(steps)[: list(steps).index(name)]


def _words(
    name: str, model: str, out: Path, steps: dict[str, Settings]
) -> tuple[list[str], Settings]:
    """How the command line of a step begins, and its flags: those given, and run's defaults.

    By default a step reads the newest model of the steps before it, and the answers that `write`
    made; one that measures reads those that were held out.
    """
    before = _before(name, steps)
    made = {one: str(out / file) for one, file in _MADE.items()}
    newest = next((made[one] for one in ("finetune", "convert") if one in before), model)
    given: Settings = {}
    if "write" in before and name != "export" and not {"tasks", "prompts"} & {*steps[name]}:
        given["data"] = str(out / _HELD_OUT) if name in _MEASURING else made["write"]
    match name:
        case "write" | "draft" | "convert":
            words = [model, made[name]]
        case "finetune":
            words, given["teacher"] = [newest, made[name]], model
            is_begun = (run_folder(Path(made[name])) / RECIPE_FILE).is_file()
            words += ["--resume"] if is_begun else []
        case "eval":
            words, given["reference"] = [newest, f"--json={made[name]}"], model
        case "profile":
            words = [newest, f"--json={made[name]}"]
        case "export":
            words = [newest, made[name]]
            given = {one: made[one] for one in _MEASURING if one in before}
            if "convert" in before and steps[name].get("with-original"):
                given["original"] = model
    return words, given | steps[name]


def _flags(name: str, settings: Settings, command: Any) -> Iterator[str]:
    """`settings` as flags of `command`; `UsageError` for a value that its flag cannot have."""
    options = {flag.removeprefix("--"): one for one in command.params for flag in one.opts}
    for key, value in settings.items():
        option = options.get(key)
        for one in _each(value):
            if isinstance(one, bool):
                yield from _switch(name, key, one, option)
            elif isinstance(one, dict):
                if option is not None and option.metavar != "JSON":
                    raise UsageError(_must_be(name, key, one))
                yield f"--{key}={json.dumps(one)}"
            else:
                yield f"--{key}={one}"


def _switch(name: str, key: str, is_on: bool, option: Any) -> Iterator[str]:
    """The flag of a switch; false leaves one without an opposite out."""
    if option is not None and not option.is_flag:
        raise UsageError(f"{key} of {name} takes a value, got {str(is_on).lower()}: give one")
    if is_on:
        yield f"--{key}"
    elif option is None or option.secondary_opts:
        yield f"--no-{key}"


def _must_be(name: str, key: str, value: Any) -> str:
    return (
        f"{key} of {name} must be text, a number, true, false, a mapping where JSON is asked for, "
        f"or a list of these, got {shown(value)}"
    )


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_plain(value: Any) -> bool:
    """Whether `RECORD` can hold it as JSON: lone surrogates and infinite numbers it cannot."""
    if isinstance(value, str):
        return value == encodable(value)
    if isinstance(value, dict):
        try:
            return _is_plain(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError):  # dates, NaN, what holds itself
            return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
