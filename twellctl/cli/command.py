"""What commands share: --quiet, --json, an example, help as wide as the terminal. No torch."""

import contextlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperOption

from twellctl.cli.flags import given_of, options_of
from twellctl.errors import UsageError
from twellctl.files.home import from_home
from twellctl.files.outputs import check_file, has_key, write_file
from twellctl.files.strict_json import json_text
from twellctl.screens import ui

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder or a hub id.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
STDOUT = Path("-")
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all figures here; - means stdout."),
]
CONTEXT = {"help_option_names": ["-h", "--help"]}
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show only errors on stderr: no progress, notes or advice."),
]


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        every: list[Any] = context.command.params
        for each in every:
            each.hidden = False
        if text := context.get_help():  # rich prints by itself
            ui.say(text)
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_show_all, help="Show all settings and exit."
    ),
]
_ALWAYS = ("quiet", "help_all")
_OF_FILES = {
    ("data",): "More files for --data: --data *.jsonl works.",
    ("data", "tasks"): "More files for --data or --tasks, if only one is given: --tasks *.jsonl "
    "works.",
}


class ReaderLeft(Exception):
    """Whoever read stdout has had enough, as `head` has."""


class _Command(TyperCommand):
    """A command whose texts are plain: brackets are no markup, lines as long as there is room.

    Of one with many options its help shows those that are `shown`, and --help-all the others, too.
    """

    shown: tuple[str, ...] = ()
    params: list[Any]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.shown:
            for parameter in self.params:
                is_option = isinstance(parameter, TyperOption)
                parameter.hidden = is_option and parameter.name not in (*self.shown, *_ALWAYS)
        paragraphs = (self.help or "").split("\n\n")
        self.help = escape("\n\n".join(" ".join(part.split()) for part in paragraphs))
        self.epilog = escape(self.epilog or "")
        for parameter in self.params:
            parameter.help = escape(getattr(parameter, "help", None) or "")

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """`UsageError` for an option with a value that is given twice: one would be lost."""
        if not context.resilient_parsing:
            _, _, order = self.make_parser(context).parse_args(args=list(args))
            _refuse_twice(order)
        return super().parse_args(context, args)

    def format_help(self, context: Any, formatter: Any) -> None:
        """In a column of their own names like --no-compile would be cut at 80 characters."""
        for parameter in self.params:
            if getattr(parameter, "secondary_opts", None):
                parameter.help = f"{parameter.help} Off: {parameter.secondary_opts[0]}."
                parameter.secondary_opts = []
        super().format_help(context, formatter)


def _refuse_twice(order: list[Any]) -> None:
    """`UsageError` for one of the options in `order`, as they were given, that is there twice.

    A switch that has no opposite may be: it says the same again.
    """
    for option in order:
        if not isinstance(option, TyperOption) or option.multiple or order.count(option) == 1:
            continue
        if option.is_flag and not option.secondary_opts:
            continue
        raise UsageError(f"{option.opts[-1]} is given twice: keep one")


def command(
    app: typer.Typer,
    example: str,
    *,
    group: str | None = None,
    name: str | None = None,
    shown: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of `app`; `example` is shown below its help.

    `shown`: the options, by their parameters, that its short help has; without any it has all.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        kind = type("_Command", (_Command,), {"shown": shown})
        app.command(name, cls=kind, epilog=f"Example: twellctl {example}", rich_help_panel=group)(
            _with_options(function, bool(shown))
        )
        return function

    return register


def _with_options(function: Callable[..., None], is_long: bool) -> Callable[..., None]:
    """`function` with --quiet, and with an option for each setting of KIND where its parameters
    have `flags: Annotated[dict, KIND]`; if one is `data`, more files may follow it."""
    own = inspect.signature(function).parameters
    parameters: list[inspect.Parameter] = []
    settings = options_of(get_args(own["flags"].annotation)[1]) if "flags" in own else {}
    for name, parameter in own.items():
        parameters += settings.values() if name == "flags" else [parameter]
    kinds: dict[str, Any] = {"quiet": Quiet} | ({"help_all": HelpAll} if is_long else {})
    if text := _OF_FILES.get(tuple(name for name in ("data", "tasks") if name in settings)):
        kinds["more"] = Annotated[list[str] | None, typer.Argument(metavar="FILE", help=text)]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    ]

    def run(
        *, quiet: bool, help_all: bool = False, more: list[str] | None = None, **given: Any
    ) -> None:
        if quiet:
            ui.be_quiet()
        flags = {"flags": given_of(settings, given)} if settings else {}
        if more:
            _add_files(more, flags["flags"])
        paths = {n: from_home(path) for n, path in given.items() if isinstance(path, Path)}
        try:
            function(**given | paths | flags)
        except BrokenPipeError as error:  # the parser would make it a failure
            raise ReaderLeft from error

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _add_files(more: list[str], flags: dict) -> None:
    """Add the files that follow the one of --data or --tasks, as a shell expands *.jsonl."""
    given = {"data", "eval_data", "tasks"} & flags.keys()
    if given not in ({"data"}, {"tasks"}):
        raise UsageError(f"{more[0]}: which flag is it for? repeat it: --data FILE --data FILE")
    flags[given.pop()] += tuple(more)


def process_rank() -> int:
    """Which of its processes torchrun or `accelerate launch` has made of this one; 0: the only one.

    What is no number is refused by `as_launched`.
    """
    rank, world = (os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE"))
    several = world.isdecimal() and int(world) > 1
    return int(rank) if several and rank.isdecimal() else 0


def be_quiet_unless_first() -> None:
    """For commands that several processes share: the others say what ends them and no more."""
    if process_rank():
        ui.leave_it_to_the_first()


def show_help(context: typer.Context) -> None:
    """What a group of commands shows without one."""
    if context.invoked_subcommand is None:
        if text := context.get_help():  # rich prints by itself
            ui.say(text)
        raise typer.Exit


def plot_option(what: str) -> Any:
    """--plot of a command, of which it draws `what`."""
    text = f"Where to draw {what}: svg, png or pdf, by the ending."
    return typer.Option("--plot", metavar="FILE", help=text)


def plot_writer(path: Path | None) -> Callable[[Any], None]:
    """Refuse a file that no plot could be written to; the function that is returned draws a
    result there."""
    if path is None:
        return lambda found: None
    from twellctl.report.plot_file import check_plot, write_plot

    check_plot(path)
    return lambda found: write_plot(found.to_chart(), path)


def result_writer(
    path: Path | None, key: str, kind: str, plot: Path | None = None
) -> Callable[..., None]:
    """Refuse a file that could not be written, or that is not a JSON of that `kind`, with `key`.

    The function that is returned shows a result on the screen and writes its JSON to `path`, or
    only its JSON to stdout, and draws it into `plot`. None is lost where another fails; `then` is
    called after all.
    """
    draw = plot_writer(plot)

    def check() -> None:
        if path is not None and path != STDOUT:
            check_file(path, "the JSON file", kind, lambda path: has_key(path, key))

    def write_result(
        found: Any, screen: Callable[[Any], None], then: Callable[[Any], None] = lambda found: None
    ) -> None:
        with contextlib.ExitStack() as left:
            left.callback(draw, found)
            if path == STDOUT:
                print(json_text(found.to_json()), end="")
                return
            if path is not None:
                left.callback(lambda: write_file(path, json_text(found.to_json()), check))
            screen(found)
        then(found)

    check()
    return write_result
