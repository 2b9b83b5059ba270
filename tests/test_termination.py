"""Who is answered after a SIGTERM: a process that stands still, and no other."""

import subprocess
import sys

import pytest

RUN = """
import os, signal, threading, time
from twellctl.training.termination import answered

signal.signal(signal.SIGTERM, lambda *given: print("asked", flush=True))
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
with answered(lambda: print("told", flush=True), seconds=1.0):
    end = time.time() + 2.5
    while time.time() < end:
        WAIT
print("left", flush=True)
"""
IN_C = "import ctypes; ctypes.CDLL(None).sleep(1); ctypes.CDLL(None).sleep(3)"


@pytest.mark.parametrize(
    ("waiting", "said", "code"),
    [("time.sleep(0.05)", ["asked", "left"], 0), (IN_C, ["asked", "told"], 1)],
    ids=["it goes on", "it stands still"],
)
def test_who_is_told(waiting, said, code):
    run = RUN.replace("WAIT", waiting)
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=30)
    assert (done.stdout.split(), done.returncode) == (said, code), done.stderr
