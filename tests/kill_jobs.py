"""Commands with small settings, forked by warm.py and killed (for test_killed.py)."""

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from finetune_runs import small
from typer.main import get_command

from twellctl.cli.app import app
from twellctl.convert import convert
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.training import teacher
from twellctl.training.recipe import run_folder

PIPELINE = """
model: {model}
out: {out}
write: {{prompts: "{prompts}", max-tokens: 8, batch-size: 8}}
draft: {{data: "{text}", tokens: 1024, seq-len: 32, epochs: 1, ahead: 2, step-tokens: 512}}
convert: {{data: "{text}", tokens: 1024, seq-len: 32, steps: 2, step-tokens: 64, eval-windows: 2}}
finetune: {{data: ["{text}", "{out}/answers.jsonl"], max-steps: 3, seq-len: 32, batch-size: 4,
  eval-blocks: 2, save-steps: 1}}
eval: {{data: "{text}", windows: 2, seq-len: 32}}
profile: {{windows: 2, seq-len: 32}}
export: {{}}
"""


def converted(model, text, out, overwrite):
    convert(model, out, overwrite=overwrite)


def rounded(model, text, out, overwrite):
    how = {"tokens": 1024, "seq_len": 32, "steps": 2, "step_tokens": 64, "eval_windows": 2}
    convert(model, out, data=[str(text)], overwrite=overwrite, bits=4, **how)


def exported(model, text, out, overwrite):
    export(model, out, overwrite=overwrite)


def exported_both(model, text, out, overwrite):
    """`model` has its original in its folder."""
    export(model, out, overwrite=overwrite, with_original=True)


def finetuned(model, text, out, overwrite):
    recipe = small(text, max_steps=3, save_steps=1, eval_steps=2)
    resume = run_folder(Path(out)).exists()
    finetune(model, out, recipe, resume=resume, overwrite=overwrite)


def piped(model, text, out, overwrite):
    """`twellctl run`, all steps; no answers are compared, which would take as long as they do."""
    for module in (teacher, import_module("twellctl.evaluate")):
        module.prompts_in = lambda *given: []
    file, prompts = Path(f"{out}.yaml"), Path(text).parent / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "What is {i}?"}}\n' for i in range(8)))
    steps = PIPELINE.format(model=model, text=text, prompts=prompts, out=out)
    file.write_text(steps, encoding="utf-8")
    get_command(app)(["run", str(file), "--keep-going", "--quiet"], standalone_mode=False)


JOBS = {job.__name__: job for job in (converted, exported, exported_both, finetuned, rounded)}


def _forked(job, *words) -> int:
    """A process that exits with 0 when it has done `job`, with 1 if that failed."""
    if child := os.fork():
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = 1
    try:
        job(*words)
        code = 0
    finally:
        os._exit(code)


def fork_and_kill(job, model, text, out, overwrite, seconds) -> tuple[int, float]:
    """Kills it after so many seconds: its exit code, and how many it ran."""
    began = time.monotonic()
    child = _forked((JOBS | {"piped": piped})[job], model, text, out, overwrite)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        ran = time.monotonic() - began
        if ended:
            return os.waitstatus_to_exitcode(status), ran
        if ran >= seconds:
            os.kill(child, signal.SIGKILL)
            seconds = float("inf")
        time.sleep(min(1e-3, max(seconds - ran, 0)))


def fork_and_kill_at(number, model, out) -> int:
    """`convert --overwrite`, killed before the last of so many things that it does to the disk."""
    child = _forked(_converted_until, number, model, out)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _converted_until(number, model, out):
    left = number

    def count(event, args):
        nonlocal left
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "open"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    convert(model, out, overwrite=True)
