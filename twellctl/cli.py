"""The commands and their options. Nothing heavy is imported before a command runs."""

import dataclasses
import inspect
import signal
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl import __version__, ui
from twellctl.errors import TwellError, UsageError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Make pretrained language models sparse, and fast because they are sparse.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder or a hub id.")]
LocalModel = Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]


def _version(wanted: bool) -> None:
    if wanted:
        ui.say(f"twellctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    pass


@app.command()
def convert(
    model: Model, out: Out, revision: Revision = None, overwrite: Overwrite = False
) -> None:
    """Make a SiLU model ReLU: config.json is edited, the weights are linked or copied."""
    from twellctl.convert import convert as run

    done = run(model, out, revision=revision, overwrite=overwrite)
    ui.say(
        f"{done.out}: {done.num_layers} gated FFNs, {done.hidden_size} x {done.intermediate_size}, "
        f"{done.source_act} -> relu"
    )
    ui.say(f"next: twellctl finetune {done.out} OUT --data FILE")


def main() -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(standalone_mode=False)
    except TwellError as error:
        ui.fail(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        ui.fail("interrupted")
        code = 130
    except BrokenPipeError:
        code = 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of the parser's own
            raise
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "twellctl"
        ui.fail(f"{error.format_message()} (see '{where} --help')")
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + signum)
