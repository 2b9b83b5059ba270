"""The folder `OUT.run` of a fine-tuning run: its recipe, its tokens and its checkpoints."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from twellctl.data import Blocks, hold_out, read_blocks, read_texts, token_stream, write_tokens
from twellctl.errors import TwellError, UsageError
from twellctl.l1_schedule import ConstantL1, TargetL1
from twellctl.recipe import RECIPE_FILE, Recipe, flag_name, resolve_recipe, save_recipe

STATE_FILE = "twell_state.json"  # written last: a checkpoint without it is not complete


def open_run(run: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """Make the run folder, or check that it holds what is to be resumed."""
    saved = run / RECIPE_FILE
    if resume:
        if not saved.is_file():
            raise TwellError(f"{run} does not exist: there is no run to resume, leave --resume out")
        free = ("save_steps", "logging_steps", "report_to")  # these change nothing of the result
        before, now = (dataclasses.asdict(r) for r in (resolve_recipe(saved), recipe))
        changed = [flag_name(k) for k in now if k not in free and now[k] != before[k]]
        if changed:
            raise UsageError(
                f"--resume goes on with the recipe of {run}, but {', '.join(changed)} differ: "
                "leave them out"
            )
        return
    if run.exists() and not overwrite:
        step = last_checkpoint(run)
        what = f"a run stopped at {step.name}" if step else "a run without a checkpoint"
        raise TwellError(f"{run} holds {what}: go on with --resume, or start anew with --overwrite")
    try:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        save_recipe(recipe, saved)
    except OSError as error:
        raise TwellError(f"{run} cannot be written: {error.strerror or error}") from error


def write_run_tokens(run: Path, recipe: Recipe, tokenizer: Any) -> None:
    """Tokenise what the run needs: all text for epochs, else enough for its steps."""
    wanted = recipe.max_tokens
    if recipe.max_steps is not None:
        wanted = recipe.max_steps * recipe.batch_size * recipe.seq_len
    if wanted is not None:
        held_out = 0 if recipe.eval_data else recipe.eval_fraction
        wanted = (
            int((wanted + recipe.batch_size * recipe.seq_len) / (1 - held_out)) + recipe.seq_len
        )
    try:
        for name, paths, limit in (
            ("eval.bin", recipe.eval_data, None),
            ("tokens.bin", recipe.data, wanted),
        ):
            if paths:
                texts = read_texts(paths, recipe.text_column, tokenizer)
                write_tokens(token_stream(texts, tokenizer), run / name, limit)
    except BaseException as error:
        shutil.rmtree(run, ignore_errors=True)
        if isinstance(error, OSError):
            raise TwellError(f"{run} could not be written: {error.strerror or error}") from error
        raise


def run_blocks(run: Path, recipe: Recipe) -> tuple[Blocks, Blocks | None]:
    """(training, held-out) blocks of a run folder."""
    blocks = read_blocks(run / "tokens.bin", recipe.seq_len)
    if recipe.eval_data:
        held_out = read_blocks(run / "eval.bin", recipe.seq_len)
    else:
        blocks, held_out = hold_out(blocks, recipe.eval_fraction)
    if len(blocks) < recipe.batch_size:
        raise TwellError(
            f"the text makes {len(blocks)} blocks of {recipe.seq_len} tokens, fewer than one batch "
            f"of {recipe.batch_size}: give more text, or lower --seq-len or --batch-size"
        )
    count = min(len(held_out), recipe.eval_blocks)
    if not count:
        return Blocks(blocks), None
    picked = [i * len(held_out) // count for i in range(count)]
    return Blocks(blocks), Blocks(held_out[picked])


def mark_complete(checkpoint: Path, schedule: ConstantL1 | TargetL1) -> None:
    """Write the schedule's state into a checkpoint: from now on it counts."""
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(json.dumps(schedule.state()), encoding="utf-8")
    part.rename(checkpoint / STATE_FILE)


def last_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    complete = [path.parent for path in run.glob(f"checkpoint-*/{STATE_FILE}")]
    return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)


def restore_schedule(schedule: ConstantL1 | TargetL1, checkpoint: Path) -> None:
    """Go on with the coefficient where the checkpoint left it."""
    schedule.load(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
