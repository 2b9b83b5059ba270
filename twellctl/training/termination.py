"""An answer to SIGTERM also where the main thread waits for a process that is gone.

A launcher that sees a process end sends SIGTERM to the others, and 30 s later SIGKILL. Python
answers a signal between two bytecodes, which a thread that waits for the GPU does not reach.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

SECONDS = 25.0  # less than launchers wait before they kill
_LOOKS = 25  # in that time, whether the main thread has answered
_heard = threading.Event()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _ask(_: None) -> int:
    _heard.set()
    return 0


@contextlib.contextmanager
def answered(report: Callable[[], None], seconds: float = SECONDS) -> Iterator[None]:
    """If after a SIGTERM the block stands still for `seconds`, `report` and end the process with 1.

    A block that goes on, to a checkpoint say, is left alone. Does nothing where this is not the
    main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(read_end, left, report, seconds), daemon=True)
    watch.start()
    before = signal.set_wakeup_fd(write_end)  # written to by the system's handler, not Python's
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        left.set()
        os.close(write_end)  # which ends the watch
        watch.join()
        os.close(read_end)


def _watch(
    read_end: int, left: threading.Event, report: Callable[[], None], seconds: float
) -> None:
    while came := os.read(read_end, 1):
        if came[0] == signal.SIGTERM and _stands_still(left, seconds):
            report()
            os._exit(1)


def _stands_still(left: threading.Event, seconds: float) -> bool:
    """Wait until the main thread has not answered for `seconds`; False once it `left`."""
    step = seconds / _LOOKS
    while True:
        _heard.clear()
        ctypes.pythonapi.Py_AddPendingCall(_ask, None)  # to be run between two bytecodes
        waited = 0.0
        while not _heard.is_set():
            if left.wait(step):
                return False
            waited += step
            if waited >= seconds:
                return True
        if left.wait(step):
            return False
