"""Ctrl-C at any moment: one line, exit code 130, no traceback."""

import atexit
import os
import signal
import subprocess
import sys

import pytest

from twellctl import __main__ as entry
from twellctl.cli import interrupts
from twellctl.cli import main as cli

HEEDS = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
TOLD = "error: interrupted\n"


@pytest.fixture
def heeded(monkeypatch):
    """Ctrl-C as the command line has it; what was before comes back after."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)}
    hook = sys.unraisablehook
    monkeypatch.setattr(interrupts, "_came", False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.heed()
    yield
    atexit.unregister(interrupts._last)
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def run_with(monkeypatch, capfd, command) -> tuple[int, list[str]]:
    monkeypatch.setattr(cli, "app", lambda **_: command())
    with pytest.raises(SystemExit) as stop:
        entry.main()
    return stop.value.code, capfd.readouterr().err.splitlines()


def test_an_error_that_a_library_makes_of_ctrl_c_is_reported_as_ctrl_c(heeded, monkeypatch, capfd):
    """Libraries turn it into their own: torch's C code looks for a length, and finds none."""

    def command():
        try:
            press()
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type") from None

    assert run_with(monkeypatch, capfd, command) == (130, ["error: interrupted"])


def test_in_a_finalizer_it_comes_right_after(heeded, monkeypatch, capfd):
    class Finalized:
        def __del__(self):
            press()

    def command():
        Finalized()  # and gone
        signal.pause()  # until it comes again

    assert run_with(monkeypatch, capfd, command) == (130, ["error: interrupted"])


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_while_modules_are_imported(module, relu_llama, tmp_path):
    """The signal comes in the middle of the import, on the line that a finder stands in for."""
    start = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {'torch._C' if module == 'torch' else 'typer'!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv[1:] = ['export', '-q', {str(relu_llama)!r}, {str(tmp_path / 'out')!r}]\n"
        "from twellctl.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, **HEEDS)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", TOLD)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("exec('press()')", 130, TOLD),  # Python remembers it there, and would end by the signal
        ("atexit.register(press)", 130, TOLD),  # all is done
        ("os.close(2) or atexit.register(press)", 130, ""),  # it ended who reads stderr, too
        ("early.append(press)", 0, ""),  # nothing but the memory is left
    ],
)
def test_the_exit_code_is_no_signal(command, code, said, tmp_path):
    (tmp_path / "start.py").write_text(
        "import atexit, os, signal\n"
        "early = []\n"
        "press = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "atexit.register(lambda: [act() for act in early])\n"
        "from twellctl import __main__ as entry\n"
        "from twellctl.cli import main as cli\n"
        f"cli.app = lambda **_: {command} and 0\n"
        "entry.main()\n"
    )
    words = [sys.executable, "-m", "start"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, **HEEDS)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_who_ignores_it_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.heed()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupts.heed_no_more()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# ---- SIGTERM


RUN = """
import os, signal, threading, time
from twellctl.training.termination import answered

signal.signal(signal.SIGTERM, lambda *given: print("asked", flush=True))
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
with answered(lambda: print("told", flush=True), seconds=1.0):
    end = time.time() + 1.8
    while time.time() < end:
        WAIT
print("left", flush=True)
"""
IN_C = "import ctypes; ctypes.CDLL(None).sleep(1); ctypes.CDLL(None).sleep(3)"
# where no signal ends the wait, so that no handler in Python runs
LOCKED = "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; "
LOCKED += "mutex = ctypes.create_string_buffer(64); lock(mutex); lock(mutex)"


@pytest.mark.parametrize(
    ("waiting", "said", "code"),
    [
        ("time.sleep(0.05)", ["asked", "left"], 0),
        (IN_C, ["asked", "told"], 1),
        (LOCKED, ["told"], 1),
    ],
    ids=["it goes on", "it stands still", "it hears nothing"],
)
def test_a_process_that_cannot_answer_sigterm_is_ended(waiting, said, code):
    run = RUN.replace("WAIT", waiting)
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=30)
    assert (done.stdout.split(), done.returncode) == (said, code), done.stderr
