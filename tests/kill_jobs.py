"""A warm process that forks commands with small settings and kills them (for test_killed.py).

It reads a line for each: [job, model, text, out, overwrite, seconds]. When the job has ended, or
was killed after so many seconds, it writes [exit code, seconds it ran]. It never runs a backward
pass itself, since torch would then refuse one in what it forks.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

from finetune_runs import small

from twellctl import quickstart as quickstart_module
from twellctl.convert import convert
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.quickstart import quickstart
from twellctl.training.progress import Progress
from twellctl.training.recipe import run_folder

QUICK = {"max_steps": 3, "eval_blocks": 2, "eval_steps": 2, "save_steps": 1, "batch_size": 4}


def converted(model, text, out, overwrite):
    convert(model, out, overwrite=overwrite)


def exported(model, text, out, overwrite):
    export(model, out, overwrite=overwrite)


def finetuned(model, text, out, overwrite):
    recipe = small(text, max_steps=6, save_steps=1, eval_steps=2)
    resume = run_folder(Path(out)).exists()
    quiet = Progress(silent=True)
    finetune(model, out, recipe, resume=resume, overwrite=overwrite, progress=quiet)


def whole(model, text, out, overwrite):
    """quickstart, with a few steps on a little text; `model` is its seed."""

    def write_corpus(folder):
        lines = Path(text).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(lines[1:6]))
        (folder / "val.jsonl").write_text(lines[0])

    resolve = quickstart_module.resolve_recipe
    quickstart_module.STEPS = 2
    quickstart_module._write_corpus = write_corpus
    quickstart_module.resolve_recipe = lambda name, flags: resolve(name, flags | QUICK)
    quickstart(out, overwrite=overwrite, seed=int(model))


JOBS = {job.__name__: job for job in (converted, exported, finetuned, whole)}


def fork_and_kill(job, model, text, out, overwrite, seconds) -> tuple[int, float]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
        try:
            JOBS[job](model, text, out, overwrite)
            code = 0
        finally:
            os._exit(code)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        ran = time.monotonic() - began
        if ended:
            return os.waitstatus_to_exitcode(status), ran
        if ran >= seconds:
            os.kill(child, signal.SIGKILL)
            seconds = float("inf")
        time.sleep(min(1e-3, max(seconds - ran, 0)))


if __name__ == "__main__":
    gc.freeze()  # else the garbage collections of each process copy all that was imported
    for line in sys.stdin:
        print(json.dumps(fork_and_kill(*json.loads(line))), flush=True)
