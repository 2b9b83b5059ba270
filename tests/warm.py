"""A warm process that forks others: what they import, it has imported.

It reads a line for each: the name of a way, and what that is given; it writes what the way returns.
It never runs a backward pass itself, since torch would then refuse one in what it forks.
"""

import gc
import json
import os
import signal
import sys
import time

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import kill_jobs
import sharded_jobs

from twellctl import serve_local
from twellctl.__main__ import main

assert serve_local  # imported for those that serve


def begin(words: list[str], code: str, environment: dict[str, str], streams: list[str]) -> int:
    """`twellctl WORDS` behind some `code`, over the files at `streams`; its process."""
    if child := os.fork():
        return child
    os.setsid()  # a terminal that it opens is its own
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR if path.startswith("/dev/") else os.O_WRONLY), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests may have it ignored
    os.environ.update(environment)
    sys.argv = ["twellctl", *words]
    exec(code)
    main()
    raise AssertionError("a command exits")


def end(process: int, seconds: float) -> int | None:
    """The exit code of such a process; None if it goes on for longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


WAYS = (begin, end, kill_jobs.fork_and_kill, kill_jobs.fork_and_kill_at, sharded_jobs.fork)
WAYS = {way.__name__: way for way in WAYS}

if __name__ == "__main__":
    gc.freeze()  # else the garbage collections of each process copy all that was imported
    for line in sys.stdin:
        way, *given = json.loads(line)
        print(json.dumps(WAYS[way](*given)), flush=True)
