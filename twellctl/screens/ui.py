"""The screen: tables and results to stdout, errors and progress to stderr. No torch."""

import contextlib
import io
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table

from twellctl.errors import TwellError, printable


class _Console(Console):
    """rich ends the process by itself, and without a word, once the reader has left."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Activity:
    """What lasts: a spinner on a terminal, elsewhere a line for each."""

    def __init__(self, console: Console):
        self.console = console
        self._lock = threading.RLock()
        self._text = ""
        self._timer: threading.Timer | None = None
        self._status: Status | None = None

    def now(self, text: str) -> None:
        """From now on the command does `text`."""
        with self._lock:
            self._text = text
            if self._status is not None:
                self._status.update(text)
                return
            self._cancel()
            self._timer = threading.Timer(PATIENCE, self._show, [text])
            self._timer.daemon = True
            self._timer.start()

    def over(self) -> None:
        """Nothing lasts any more, or what follows speaks for itself."""
        with self._lock:
            self._text = ""
            self._cancel()
            if self._status is not None:
                self._status.stop()
                self._status = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _show(self, text: str) -> None:
        with self._lock:
            if text != self._text:  # it ended while the timer waited for the lock
                return
            if self.console.is_terminal:
                self._status = Status(text, console=self.console)
                self._status.start()
            else:
                self.console.print(f"{text} ...", markup=False, soft_wrap=True)


PATIENCE = 0.7  # seconds: what takes less needs no word
stdout = _Console(highlight=False)
stderr = Console(stderr=True, highlight=False)
activity = Activity(stderr)
_ANY_WIDTH = 100_000
LONGEST_SILENCE = 30  # seconds from line to line off a terminal


def be_quiet() -> None:
    """From now on stderr has errors only: no notes, no progress."""
    stderr.quiet = True


def leave_it_to_the_first() -> None:
    """From now on this process says what ends it and no more: another one says the rest."""
    stdout.quiet = stderr.quiet = True


def write_any_text() -> None:
    """From now on stdout has a ? for what its encoding lacks, as stderr has an escape of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where it was closed
        sys.stdout.reconfigure(errors="replace")


def doing(text: str) -> None:
    """What the command does from now on, until it says something on stdout or does another."""
    activity.now(printable(text))


def say(text: str) -> None:
    """One line of result."""
    activity.over()
    stdout.print(printable(text), markup=False, soft_wrap=True)


def word(name: object) -> str:
    """A name as a word of a command line that is to be copied."""
    return shlex.quote(str(name))


def note(text: str) -> None:
    """One line on stderr, which is no part of the result."""
    stderr.print(printable(text), markup=False, soft_wrap=True)


def fail(text: str) -> None:
    """The one line of an error, also with --quiet."""
    activity.over()
    stderr.quiet = False
    note(f"error: {text}")


def duration(seconds: float) -> str:
    """As people say it: "45 s", "3 min 20 s", "1 h 03 min", "10 d 2 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def read_line(prompt: str) -> str | None:
    """The next line of stdin, asked for on a terminal; None at its end. `TwellError` as below."""
    activity.over()
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return _decoded(line) if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, from here on lines can be edited and come again
    try:
        return input(prompt)
    except EOFError:
        sys.stdout.write("\n")
        return None


def read_stdin() -> str:
    """All of stdin, less the newline at its end. `TwellError` if it is no text."""
    return _decoded(sys.stdin.buffer.read())


def _decoded(given: bytes) -> str:
    try:
        return given.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise TwellError(f"stdin is not UTF-8 (byte {error.start}): convert it") from error


def stream(pieces: Iterable[str]) -> None:
    """Text as it comes, to stdout, nothing added but a newline at the end."""
    some = False
    try:
        for piece in pieces:
            activity.over()
            some = True
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        if some:
            sys.stdout.write("\n")
            sys.stdout.flush()


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table whose first column is text, which folds, and whose others are numbers, kept whole."""
    made = Table(
        title=escape(printable(title)), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    rows = [list(map(printable, row)) for row in rows]
    for number, column in enumerate(columns):
        figures = [row[number] for row in rows]
        longest_word = max(map(cell_len, [*column.split(), *figures]), default=0)
        if number:
            made.add_column(column, overflow="fold", justify="right", min_width=longest_word)
        else:
            made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    activity.over()
    if not stdout.is_terminal:  # there a line may be of any length
        options = stdout.options.update(max_width=_ANY_WIDTH)
        made.width = Measurement.get(stdout, options, made).maximum
    stdout.print(made, crop=False)


class Stage:
    """What a command does now and how far it has come: on a terminal each, else a line at times."""

    _what, _said = "", 0.0
    _first: tuple[float, int] | None = None

    def begin(self, what: str) -> None:
        """`what` comes next."""
        self._what, self._said, self._first = what, time.monotonic(), None
        doing(what)

    def show(self, done: int, total: int) -> None:
        """The time to go is reckoned from the first call on: what is set up before is no pace."""
        now = time.monotonic()
        self._first = self._first or (now, done)
        seconds, some = now - self._first[0], done - self._first[1]
        left = seconds / some * (total - done) if some and seconds > 1 else None
        self.report(f"{done} of {total}", left)

    def report(self, how_far: str, left: float | None) -> None:
        """And how many seconds are `left`, if that is known."""
        text = f"{self._what}: {how_far}"
        if left is not None:
            text += f", {duration(left)} left"
        if stderr.is_terminal:
            doing(text)
        elif time.monotonic() - self._said >= LONGEST_SILENCE:
            self._said = time.monotonic()
            note(text)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `show(done, total)` of `what`, which is over at the end."""
    stage = Stage()
    stage.begin(what)
    try:
        yield stage.show
    finally:
        activity.over()
