"""What all commands have in common: --quiet, an example, help as wide as the terminal. No torch."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from twellctl.screens import ui

CONTEXT = {"help_option_names": ["-h", "--help"]}
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Errors only on stderr: no progress, no notes, no advice."),
]


class ReaderLeft(Exception):
    """Whoever read stdout has had enough, as `head` has."""


class _Command(TyperCommand):
    """A command whose texts are plain: brackets are no markup, lines as long as there is room."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        paragraphs = (self.help or "").split("\n\n")
        self.help = escape("\n\n".join(" ".join(part.split()) for part in paragraphs))
        self.epilog = escape(self.epilog or "")
        for parameter in self.params:
            parameter.help = escape(getattr(parameter, "help", None) or "")


def command(
    app: typer.Typer, example: str, *, group: str | None = None, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of `app`; `example` is shown below its help."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(
            name, cls=_Command, epilog=f"Example: twellctl {example}", rich_help_panel=group
        )(_with_quiet(function))
        return function

    return register


def _with_quiet(function: Callable[..., None]) -> Callable[..., None]:
    own = list(inspect.signature(function).parameters.values())
    option = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet
    )

    def run(*, quiet: bool, **given: Any) -> None:
        if quiet:
            ui.be_quiet()
        try:
            function(**given)
        except BrokenPipeError as error:  # the parser would make it a failure
            raise ReaderLeft from error

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature([*own, option])
    run.__annotations__ = {p.name: p.annotation for p in (*own, option)}
    return run


def show_help(context: typer.Context) -> None:
    """What a group of commands shows without one."""
    if context.invoked_subcommand is None:
        if text := context.get_help():  # rich prints by itself
            ui.say(text)
        raise typer.Exit
