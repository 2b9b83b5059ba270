"""Programs in limited processes: what does harm ends as failed, and nothing is left behind."""

import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from twellctl.evaluation import limited, within

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes can be limited on Linux alone"
)


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Where folders of programs are made; none, and no process, is there afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))  # of other tests: a browser, say
    yield tmp_path
    assert not list(tmp_path.iterdir())
    assert not set(psutil.Process().children(recursive=True)) - before


def outcome(program: str, seconds: float = 10) -> limited.Outcome:
    found = limited.run(program, seconds)
    assert found.guards is not None, found.why
    return found


def test_sound_programs_pass(nothing_left):
    found = limited.run_all(
        [
            "import threading\nmade = []\nt = threading.Thread(target=made.append, args=[3])\n"
            "t.start(); t.join()\nassert made == [3]",
            "import asyncio\nasync def f(): return 3\nassert asyncio.run(f()) == 3",
            "import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'x')"
            if limited.guards().files
            else "pass",
            "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n"
            "@dataclass\nclass A:\n    x: int\nassert pickle.loads(pickle.dumps(A(3))).x == 3",
            "import sys\nsys.setrecursionlimit(10**6)\nassert __name__ == '__main__'",
            "import sys\nfor _ in range(20): print('w' * 10**6, file=sys.stderr)",
            "assert 1 == 2, 'no'",
        ],
        seconds=20,
    )
    assert [(o.passed, o.why) for o in found] == [(True, "")] * 6 + [(False, "AssertionError: no")]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
        (
            "n = 0\nwhile True:\n    n += 1\n    try: open(str(n), 'wb').write(bytes(1 << 24))\n"
            "    except OSError: pass",
            "it wrote more than 64 MiB",
        ),
        ("open('x', 'wb').write(bytes(1 << 25))", "OSError: [Errno 27] File too large"),
        ("open('/tmp/x-of-a-program', 'w')", "PermissionError"),
        ("import os\nos.mkdir('deep')", "PermissionError"),
        ("import os\nos.chmod('program.py', 0)", "PermissionError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 2)", "PermissionError"),
        ("import time\ntime.sleep(100)", "it ran for more than 1 s"),
        ("while True: pass", "it computed for more than 1 s"),
        (
            "import threading\ndef f():\n    while True: pass\n"
            "for _ in range(3): threading.Thread(target=f).start()\nf()",
            "it computed for more than 1 s",
        ),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("import os\nos._exit(0)", "it ended by itself"),
        ("raise SystemExit", "it ended by itself"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "PermissionError"),
        ("import os, signal\nos.killpg(os.getpgid(os.getppid()), 9)", "PermissionError"),
        (
            "import os, resource as r\nr.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
            "PermissionError",
        ),
        (  # a pipe whose owner gets signals
            "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
            "PermissionError",
        ),
        ("import os\nos.sched_setaffinity(os.getppid(), {0})", "PermissionError"),
        (  # one of these can send to others' sockets
            "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)",
            "PermissionError",
        ),
        (
            "import threading\nthreading.stack_size(1 << 16)\n"
            "while True: threading.Thread(target=threading.Event().wait).start()",
            "it ran more than 500 threads",
        ),
        ("import os\n[os.unlink(name) for name in os.listdir()]\n1 / 0", "ZeroDivisionError"),
        ("import sys\nwhile True: print('x' * 9999, file=sys.stderr)", "it wrote more than 64 MiB"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_what_does_harm_ends_as_failed(nothing_left, program, said):
    if "open(" in program and not limited.guards().files and said != "PermissionError":
        said = "it computed for more than" if "while" in program else "PermissionError"
    seconds = 0.25 if said.startswith("it ran for") else 1 if "computed" in said else 2
    found = outcome(program, seconds)
    assert not found.passed
    assert found.why.startswith(said)


def test_only_what_a_program_computes_counts_while_others_compute():
    """It waits twice as long as it may compute."""
    assert outcome("import time\ntime.sleep(1)", seconds=0.5).passed


def test_bytes_that_are_no_text_fail_their_program_alone(nothing_left):
    write = (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'\\xff')\n    except OSError: 0"
    )
    assert not outcome(write).passed


def test_calls_that_are_newer_than_the_list_are_not_there(nothing_left):
    call = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for number in (463, 466, 469, 500, 0x40000000 + 1):
        call += f"assert libc.syscall({number}, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 38\n"
    assert outcome(call).passed


def decided(rules: bytes, machine: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would answer to a call: 0, or the number of an error."""
    held = struct.pack("IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    place = value = 0
    while True:
        code, if_true, if_false, given = struct.unpack_from("HBBI", rules, 8 * place)
        place += 1
        if code == within.RETURN:
            assert given == within.ALLOW or given & 0xFFFF0000 == within.REFUSE
            return 0 if given == within.ALLOW else given & 0xFFFF
        if code == within.LOAD:
            (value,) = struct.unpack_from("I", held, given)
        elif code == within.AND:
            value &= given
        else:
            truth = {within.EQUAL: value == given, within.AT_LEAST: value >= given}[code]
            place += if_true if truth else if_false


@pytest.mark.parametrize("machine", within.ARCHITECTURES)
def test_calls_that_are_not_listed_are_refused(machine):
    audit, column = within.ARCHITECTURES[machine]
    rules = within.filter_of(audit, column, files=True)
    listed = {numbers[column] for numbers in (within.ALLOWED | within.CHANGES).values()}
    asked = {numbers[column] for numbers, _ in (within.ASKED | within.OPENS).values()}
    for number in [*range(600), 0x40000001, 0xFFFFFFFF]:
        expected = 1 if number < 424 else 38
        if number not in asked:
            assert decided(rules, audit, number) == (0 if number in listed else expected)
        assert decided(rules, audit ^ 1, number) == 38


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("clone", (0x3D0F00,), (17,)),  # a thread, a process
        ("prlimit64", (0,), (1,)),
        ("fcntl", (0, 1030), (0, 10)),  # F_DUPFD_CLOEXEC, F_SETSIG
        ("ioctl", (0, 0x5401), (0, 0x5412)),  # TCGETS, TIOCSTI
        ("socketpair", (1, 0x80001), (1, 2)),
        ("socketpair", (1, 1), (2, 1)),
        ("openat", (0, 0, os.O_CREAT | os.O_RDWR | os.O_TRUNC), (0, 0, os.O_TRUNC)),
        ("openat", (0, 0, os.O_CLOEXEC), (0, 0, os.O_TRUNC)),
    ],
)
def test_calls_are_refused_by_their_arguments(name, taken, refused):
    for audit, column in within.ARCHITECTURES.values():
        rules = within.filter_of(audit, column, files=True)
        number = (within.ASKED | within.OPENS)[name][0][column]
        assert decided(rules, audit, number, taken) == 0
        assert decided(rules, audit, number, refused) == 1


def test_only_python_s_own_files_are_read(nothing_left):
    if not limited.guards().files:
        pytest.skip("no Landlock here: what a program reads is not limited")
    for path in ("/etc/passwd", __file__, "/proc/self/environ"):
        assert outcome(f"open({path!r})").why.startswith("PermissionError")
    assert outcome("import os\nos.listdir('/home')").why.startswith("PermissionError")


def test_nothing_is_reached(nothing_left):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.5)
        program = (
            "import socket\nfor kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
            f"    try: socket.socket(kind).connect(('127.0.0.1', {port}))\n"
            "    except PermissionError: continue\n    raise SystemExit\n"
        )
        assert outcome(program).passed  # each was refused
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_program_goes_with_the_one_that_began_it(tmp_path, monkeypatch):
    """Who is killed cannot end it, nor remove its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began = (
        "from twellctl.evaluation import limited\n"
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        'limited.run(\'import time; open("on", "w"); time.sleep(60)\', 60)'
    )
    parent = subprocess.Popen([sys.executable, "-c", began])
    try:
        while not (children := psutil.Process(parent.pid).children()):
            assert parent.poll() is None
        while not (list(tmp_path.glob("*/on")) or parent.poll() is not None):
            pass
        limited.run_all([])
        assert list(tmp_path.iterdir())  # it is in use
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert gone
    assert not alive
    limited.run_all([])
    assert not list(tmp_path.iterdir())


def test_programs_end_with_what_waits_for_them(nothing_left):
    def interrupted(done, total):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        limited.run_all(["", "import time; time.sleep(60)"], interrupted, seconds=60)
    assert time.monotonic() - start < 30


def test_without_landlock_no_file_is_changed(tmp_path):
    """Reading is not limited then."""
    jobs = {
        "open('/etc/passwd').read()": True,
        f"open({str(tmp_path / 'x')!r}, 'w')": False,
        f"import os; os.unlink({str(tmp_path / 'there')!r})": False,
        f"import os; os.rename({str(tmp_path / 'there')!r}, {str(tmp_path / 'x')!r})": False,
    }
    (tmp_path / "there").touch()
    for job, passes in jobs.items():
        program = (
            f"import runpy, sys; w = runpy.run_path({within.__file__!r})\n"
            "w['limit'].__globals__['keep_to'] = lambda folder: False\n"
            f"assert w['limit']({str(tmp_path)!r}, 5, 1 << 20, 1 << 32) == b'some'\n" + job
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode == 0) == passes, (job, done.stderr)
        assert passes or "PermissionError" in done.stderr
    assert os.listdir(tmp_path) == ["there"]


def test_where_processes_cannot_be_limited_it_is_said(monkeypatch, tmp_path):
    source = Path(within.__file__).read_text()
    broken = source.replace("libc.prctl(SECCOMP, FILTER", "libc.prctl(999, FILTER")
    assert broken != source
    (tmp_path / "within.py").write_text(broken)
    monkeypatch.setattr(limited, "_WITHIN", tmp_path / "within.py")
    found = limited.guards()
    assert found.why_not.startswith("a process cannot be limited here (seccomp: Invalid argument")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "no Linux" in limited.guards().why_not


def test_a_lower_limit_that_is_set_already_is_kept():
    assert within.at_most(64, resource.RLIM_INFINITY) == 64
    assert within.at_most(64, 32) == 32
    assert within.at_most(64, 128) == 64
    limits = "ulimit -v 3000000; ulimit -n 32; ulimit -t 100"
    tried = "from twellctl.evaluation.limited import guards; assert guards().why_not is None"
    drop = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"]
    run = ["bash", "-c", f'{limits}; "$0" -c "$1"', sys.executable, tried]
    subprocess.run([*(drop if shutil.which("setpriv") else []), *run], check=True)
