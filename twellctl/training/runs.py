"""The folder `OUT.run` of a fine-tuning run: its recipe, its tokens and its checkpoints."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import NOT_OURS, staged
from twellctl.files.strict_json import read_json, to_json
from twellctl.files.workspace import remove, workspace_of
from twellctl.here.processes import check_same
from twellctl.models.checkpoint import Checkpoint
from twellctl.settings import flag_name
from twellctl.text.blocks import Blocks, hold_out, in_turn, read_blocks, token_stream, write_tokens
from twellctl.text.reading import read_texts, text_files
from twellctl.training.recipe import NO_RUN, RECIPE_FILE, Recipe, resolve_recipe, save_recipe

STATE_FILE = "twell_state.json"  # written last: a checkpoint without it is not complete
MODEL_FILE = "model.txt"
RUN_FORMAT = 2  # of what a run folder means: runs of another one are not resumed
LONGEST_TEXT = 16384  # tokens in a row of one of several --data
FREE = (  # a resumed run may change these, because the result does not depend on them
    "save_steps",
    "logging_steps",
    "report_to",
    "compile",
    "shard",
    "micro_batch_size",
    "gradient_checkpointing",
)


def prepare_run(
    run: Path,
    recipe: Recipe,
    checkpoint: Checkpoint,
    tokenizer: Any,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """The run folder with all that training reads: as it was left, or else a new, whole one.

    With `resume` it is one that `check_began_with` has passed.
    """
    if resume:
        _check_resumable(run, recipe)
        return
    _check_new(run, overwrite)
    with staged(run, overwrite=overwrite, not_ours=_not_ours) as stage:
        save_recipe(recipe, stage / RECIPE_FILE)
        (stage / MODEL_FILE).write_text(checkpoint.origin, encoding="utf-8")
        _write_run_tokens(stage, recipe, tokenizer, checkpoint.config.get("vocab_size"))
        run_blocks(stage, recipe)


def run_inputs(
    model: str | Path | Checkpoint, recipe: Recipe, recipe_file: str | Path | None
) -> list[Path]:
    """All that a run reads."""
    model = model.path if isinstance(model, Checkpoint) else model
    given = [model, *recipe.data, *recipe.eval_data]
    given += [] if recipe.teacher in ("auto", "none") else [recipe.teacher]
    given += [] if recipe_file is None else [recipe_file]
    return [*map(Path, given), *text_files([*recipe.data, *recipe.eval_data])]


def check_alike(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """`TwellError`, in all processes, if one of them sees other files than the first does."""
    weights = {t.name: (t.dtype, t.shape) for t in checkpoint.tensors.values()}
    files = text_files([*recipe.data, *recipe.eval_data])
    text = [(path.name, path.stat().st_size) for path in files]
    seen = {"config.json": checkpoint.config, "set of weights": weights, "text": text}
    check_same(seen, "give all the same files")


def check_began_with(run: Path, model: str) -> None:
    """`TwellError` if there is no run to resume in `run`, or it is one of another model."""
    if not (run / RECIPE_FILE).is_file():
        raise TwellError(f"{run} {NO_RUN}")
    began = (run / MODEL_FILE).read_text(encoding="utf-8")
    if began != model:
        raise UsageError(f"{run} is a run of {began}, got {model}: resume it with that model")


def discard(run: Path, out: Path, note: Callable[[str], None]) -> None:
    """Remove the run folder of `out`, which is claimed; `note` says what could not be removed.

    It is moved into the workspace first: what is left there, if this process is killed, is in the
    way of no other run and goes with the next one.
    """
    gone = workspace_of(out.resolve()) / "run"
    try:
        run.rename(gone)
    except FileNotFoundError:
        return
    except OSError:  # of a file system that cannot: what makes it a run folder goes last
        gone = run
    for path in sorted(gone.iterdir(), key=lambda path: path.name == RECIPE_FILE):
        remove(path)
    remove(gone)
    if gone.exists():
        note(f"{gone} could not be removed: remove it, it may hold checkpoints of many GB")


def _check_resumable(run: Path, recipe: Recipe) -> None:
    saved = run / RECIPE_FILE
    before, now = (dataclasses.asdict(r) for r in (resolve_recipe(saved), recipe))
    changed = [flag_name(k) for k in now if k not in FREE and now[k] != before[k]]
    if changed:
        raise UsageError(
            f"--resume continues with the recipe of {run}, but these are others: "
            f"{', '.join(changed)}; leave them out"
        )
    for folder in run.glob("checkpoint-*"):
        if not (folder / STATE_FILE).is_file():  # its writing was cut short, or its removal
            shutil.rmtree(folder, ignore_errors=True)


def _not_ours(run: Path) -> str | None:
    return None if (run / RECIPE_FILE).is_file() else NOT_OURS


def _check_new(run: Path, overwrite: bool) -> None:
    if run.exists() and _not_ours(run):
        raise TwellError(
            f"{run} is not a run of twellctl (no {RECIPE_FILE} in it): choose another OUT"
        )
    if run.exists() and not overwrite:
        step = last_checkpoint(run)
        what = f"a run stopped at {step.name}" if step else "a run without a checkpoint"
        raise TwellError(
            f"{run} holds {what}: continue with --resume, or start again with --overwrite"
        )


def _write_run_tokens(run: Path, recipe: Recipe, tokenizer: Any, vocabulary: int | None) -> None:
    """Tokenise what the run needs: all text for epochs, else enough for its steps."""
    wanted = recipe.max_tokens
    if recipe.max_steps is not None:
        wanted = recipe.max_steps * recipe.step_tokens
    if wanted is not None:
        of_all = 1 / (1 - held_out_fraction(recipe))
        wanted = int((wanted + recipe.step_tokens) * of_all) + recipe.block_tokens

    def stream(paths: list[str]) -> Iterator[np.ndarray]:
        texts = read_texts(paths, recipe.text_column, tokenizer)
        return token_stream(texts, tokenizer, vocabulary)

    if recipe.eval_data:
        write_tokens(stream(recipe.eval_data), run / "eval.bin")
    longest, count = LONGEST_TEXT, len(recipe.data)
    if count > 1 and wanted is not None:
        longest = min(longest, wanted // (4 * count) + 1)
    streams = (stream([path]) for path in recipe.data)
    write_tokens(in_turn(streams, longest), run / "tokens.bin", wanted)


def split_blocks(num_blocks: int, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) blocks by number; training ones in whole batches, one at least."""
    train, held_out = hold_out(num_blocks, held_out_fraction(recipe))
    if len(train) < recipe.batch_size:
        raise TwellError(
            f"the text makes {len(train)} blocks of {recipe.seq_len} tokens, fewer than one batch "
            f"of {recipe.batch_size}: give more text, or lower --seq-len or --batch-size"
        )
    return train[: len(train) // recipe.batch_size * recipe.batch_size], held_out


def held_out_fraction(recipe: Recipe) -> float:
    """Of the training text, that is held out."""
    return 0.0 if recipe.eval_data else recipe.eval_fraction


def run_blocks(run: Path, recipe: Recipe) -> tuple[Blocks, Blocks | None]:
    """(training, held-out) blocks of a run folder; training ones in whole batches."""
    blocks = read_blocks(run / "tokens.bin", recipe.block_tokens)
    train, held_out = split_blocks(len(blocks), recipe)
    others = blocks
    if recipe.eval_data:
        others = read_blocks(run / "eval.bin", recipe.block_tokens)
        held_out = np.arange(len(others))
        if not len(others):
            raise TwellError(
                f"the text of --eval-data makes no block of {recipe.seq_len} tokens: give more"
            )
    count = min(len(held_out), recipe.eval_blocks)
    if not count:
        return Blocks(blocks, train), None
    picked = held_out[np.arange(count) * len(held_out) // count]
    return Blocks(blocks, train), Blocks(others, picked)


def mark_complete(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write what else a run needs into a checkpoint: from now on it counts."""
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(to_json({"run_format": RUN_FORMAT} | state), encoding="utf-8")
    part.rename(checkpoint / STATE_FILE)


def last_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    return next(reversed(_complete_checkpoints(run)), None)


def _complete_checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    found = (path.parent for path in run.glob(f"checkpoint-*/{STATE_FILE}"))
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def drop_old_checkpoints(run: Path) -> None:
    """Leave the two newest complete checkpoints.

    The others stop to count before they go, so that one which is half gone is never resumed.
    """
    for folder in _complete_checkpoints(run)[:-2]:
        (folder / STATE_FILE).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_state(checkpoint: Path) -> dict[str, Any]:
    """What `mark_complete` wrote; `TwellError` for what another version of it did."""
    state = read_json(checkpoint / STATE_FILE, "remove that checkpoint, and --resume from another")
    if state.get("run_format") != RUN_FORMAT:
        raise TwellError(
            f"{checkpoint.parent} was begun by another version of twellctl, which trains "
            "differently: continue with that version, or start again with --overwrite"
        )
    return state
