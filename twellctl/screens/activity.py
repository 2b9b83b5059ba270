"""What a command is doing, said on stderr once it has taken a moment. No torch."""

import threading

from rich.console import Console
from rich.status import Status

PATIENCE = 0.7  # seconds: what takes less needs no word


class Activity:
    """One line at a time: a spinner on a terminal, elsewhere a line for each thing that lasts."""

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
