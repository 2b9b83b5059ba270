"""A warm process that forks others: what they import, it has imported. All of a session share one.

It takes connections until its stdin ends: a fork for each reads lines, each with the name of a way
and what that is given, and writes what the way returns. None of these runs a backward pass itself,
since torch would then refuse one in what it forks.
"""

import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TextIO

os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
    from twellctl.__main__ import main

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


def run_without(code: str, hidden: list[str], modules: str, names: dict) -> None:
    """Some `code` about `names`, where the packages `hidden` are not installed.

    It must be the first way that a connection asks for: others import twellctl. `modules` is where
    transformers keeps the code of exports.
    """

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in hidden:
                raise ImportError(f"{name} is not installed here")

    assert not {name.split(".")[0] for name in sys.modules} & {*hidden}
    sys.meta_path.insert(0, Missing())
    sys.modules["transformers"].dynamic_module_utils.HF_MODULES_CACHE = modules
    exec(code, names)


@functools.cache
def imported() -> dict[str, Callable]:
    """The other ways by name, once all that they want is imported."""
    import kill_jobs
    import pydantic.type_adapter
    import sharded_jobs
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from twellctl import __main__, serve_local
    from twellctl.fitting import plan

    assert __main__, serve_local  # for those that serve
    assert pydantic.type_adapter  # typer imports it for the values of each command
    # 0.4 s, for each that loads a model
    get_checkpoint_conversion_mapping("llama")
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1, **tiny))
    plan.PROBE["cpu"] = 64  # else each that fits multiplies for 0.8 s to say how long it will take
    gc.freeze()  # else the garbage collections of each process copy all that was imported
    ways = (begin, end, kill_jobs.fork_and_kill, kill_jobs.fork_and_kill_at, sharded_jobs.fork)
    return {way.__name__: way for way in ways}


def connection_to(listener: socket.socket) -> TextIO | None:
    """The lines of a connection, in a fork; None, in this process, once its stdin has ended."""
    with listener:
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            import transformers.models.auto.modeling_auto

            assert transformers
            if not os.fork():
                (errors,) = socket.recv_fds(connection, 1, 1)[1]
                os.dup2(errors, 2)
                return connection.makefile("rw")
            connection.close()
    return None


if __name__ == "__main__":
    for line in (lines := connection_to(socket.socket(fileno=int(sys.argv[1])))) or ():
        name, *given = json.loads(line)
        way = run_without if name == "run_without" else imported()[name]
        print(json.dumps(way(*given)), file=lines, flush=True)
