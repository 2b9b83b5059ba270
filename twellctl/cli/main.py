"""The command line as a process: its signals, and one line and an exit code for what failed."""

import os
import signal
import sys
import time
import types

from twellctl.cli import interrupts
from twellctl.cli.app import app
from twellctl.cli.command import ReaderLeft, process_rank
from twellctl.errors import TwellError, shown
from twellctl.screens import ui

SECONDS_TO_SPEAK = 10  # of the first process


def main() -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    ui.write_any_text()
    try:
        code = app(standalone_mode=False)
        if code == 130:  # how typer passes on Ctrl-C
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        code = _report(error)
    finally:
        ui.activity.over()
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: BaseException) -> int:
    """Say in one line what failed; the exit code. What nobody foresaw is raised again."""
    if not getattr(error, "of_one_process", False):
        _let_the_first_speak()
    if isinstance(error, KeyboardInterrupt) or interrupts.came():
        ui.fail("interrupted")
        return 130
    if isinstance(error, TwellError):
        ui.fail(str(error))
        return error.exit_code
    if isinstance(error, ReaderLeft | BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, what is left in the old one is dropped
        return 128 + signal.SIGPIPE
    if isinstance(error, MemoryError):
        ui.fail("out of memory: give less text at a time, or a machine with more")
        return 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        ui.fail(f"{where}{error.strerror or error}")
        return 1
    if not hasattr(error, "format_message"):  # not one of the parser's own
        raise error
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "twellctl"
    said = " ".join(error.format_message().split()).replace("Value error, ", "")
    cause = error.__cause__
    if cause is not None and hasattr(cause, "errors"):  # pydantic's message names no value
        said += f", got {shown(cause.errors()[0]['input'])}"
    ui.fail(f"{said} (see '{where} --help')")
    return getattr(error, "exit_code", 2)


def _let_the_first_speak() -> None:
    """Wait where a launcher has started several processes, which mostly fail for one reason.

    It ends the others soon after the first one has.
    """
    rank = process_rank()
    time.sleep(SECONDS_TO_SPEAK + 2 * min(rank, 8) if rank else 0)


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + signum)
