"""The folder `OUT.run` of a fine-tuning run: what it is made of, its tokens and its checkpoints."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twellctl.errors import TwellError
from twellctl.files.made_of import ANEW, Record, as_json, check_whole, digest_of, digests_in
from twellctl.files.outputs import NOT_OURS, staged
from twellctl.files.strict_json import read_json, to_json
from twellctl.files.workspace import remove, workspace_of
from twellctl.here.processes import check_same
from twellctl.models.carried import model_files
from twellctl.models.checkpoint import Checkpoint
from twellctl.text.blocks import Blocks, hold_out, in_turn, read_blocks, token_stream, write_tokens
from twellctl.text.reading import read_texts, text_files
from twellctl.training.recipe import NO_RUN, RECIPE_FILE, Recipe, save_recipe, settings

STATE_FILE = "twell_state.json"  # written last: a checkpoint without it is not complete
RUN_FORMAT = 3  # of what a checkpoint means: those of another one are not resumed
ANOTHER = "remove that checkpoint, and --resume from another"
OF_OTHERS = "rng_state_*"  # what other processes than the first write into a checkpoint
LONGEST_TEXT = 16384  # tokens in a row of one of several --data
FREE = {  # a resumed run may change these, because the result does not depend on them
    "save-steps",
    "logging-steps",
    "report-to",
    "compile",
    "shard",
    "micro-batch-size",
    "gradient-checkpointing",
}
READ = {"data", "eval-data", "teacher"}  # known by their content


def prepare_run(
    run: Path,
    recipe: Recipe,
    made_of: dict[str, Any],
    checkpoint: Checkpoint,
    tokenizer: Any,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """The run folder with all that training reads: as it was left, or else a new, whole one.

    One without a checkpoint holds nothing that could be lost, and is made again.
    """

    def write(folder: Path) -> None:
        _write_run_tokens(folder, recipe, tokenizer, checkpoint.config.get("vocab_size"))

    if resume and not (run / RECIPE_FILE).is_file():
        raise TwellError(f"{run} {NO_RUN}")
    last = last_checkpoint(run)
    if resume and last is not None:
        _check_resumable(run, last, made_of, write)
        return
    _check_new(run, last, overwrite)
    with staged(run, overwrite=True, not_ours=_not_ours) as stage:
        save_recipe(recipe, stage / RECIPE_FILE)
        write(stage)
        run_blocks(stage, recipe)
        Record.begin(stage, made_of, *(path.name for path in stage.glob("*.bin")))


def made_of(checkpoint: Checkpoint, teacher: Checkpoint | None, recipe: Recipe) -> dict[str, Any]:
    """What the result of a run depends on."""
    models = {"model": checkpoint, "teacher": teacher}
    texts = {"data": recipe.data, "eval-data": recipe.eval_data}
    parts: dict[str, Any] = {k: v and digest_of(model_files(v)) for k, v in models.items()}
    parts |= {k: [digest_of(text_files([path])) for path in paths] for k, paths in texts.items()}
    return parts | {k: v for k, v in settings(recipe).items() if k not in FREE | READ}


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


def _check_resumable(
    run: Path, last: Path, made_of: dict[str, Any], write: Callable[[Path], None]
) -> None:
    """`TwellError` if the run is made of something else, or damaged; `write` tokens that are gone.

    What was left of a checkpoint that is not complete is removed.
    """
    record = Record.read(run)
    record.refuse_other(made_of)
    check_whole(last, checkpoint_state(last)["files"], ANOTHER)
    if not all(map(record.has, record.files)):
        write(run)
    record.leave(*record.files)
    for folder in run.glob("checkpoint-*"):
        if not (folder / STATE_FILE).is_file():  # its writing was cut short, or its removal
            shutil.rmtree(folder, ignore_errors=True)


def _not_ours(run: Path) -> str | None:
    return None if (run / RECIPE_FILE).is_file() else NOT_OURS


def _check_new(run: Path, last: Path | None, overwrite: bool) -> None:
    if run.exists() and _not_ours(run):
        raise TwellError(
            f"{run} is not a run of twellctl (no {RECIPE_FILE} in it): remove it, or choose "
            "another OUT"
        )
    if last is not None and not overwrite:
        raise TwellError(
            f"{run} holds a run stopped at {last.name}: continue with --resume, or {ANEW}"
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
    paths = {path for path in checkpoint.rglob("*") if path.is_file()}
    names = [str(path.relative_to(checkpoint)) for path in paths - {*checkpoint.glob(OF_OTHERS)}]
    content = as_json({"run_format": RUN_FORMAT, "files": digests_in(checkpoint, names)} | state)
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(to_json(content | {"seal": _seal(checkpoint, content)}), encoding="utf-8")
    part.rename(checkpoint / STATE_FILE)


def _seal(checkpoint: Path, content: dict[str, Any]) -> str:
    """A digest of the content of its `STATE_FILE`, and of which run and step it is."""
    made_of = Record.read(checkpoint.parent).made_of
    sealed = to_json([checkpoint.name, made_of, content], sort_keys=True)
    return hashlib.sha256(sealed.encode()).hexdigest()


def last_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    return next(reversed(_complete_checkpoints(run)), None)


def _complete_checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    found = (path.parent for path in run.glob(f"checkpoint-*/{STATE_FILE}"))
    numbered = {path: path.name.removeprefix("checkpoint-") for path in found}
    own = [path for path, number in numbered.items() if number.isdecimal()]
    return sorted(own, key=lambda path: int(numbered[path]))


def drop_old_checkpoints(run: Path) -> None:
    """Leave the two newest complete checkpoints.

    The others stop to count before they go, so that one which is half gone is never resumed.
    """
    for folder in _complete_checkpoints(run)[:-2]:
        (folder / STATE_FILE).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_state(checkpoint: Path) -> dict[str, Any]:
    """What `mark_complete` wrote; `TwellError` for what another version or run did, or damage."""
    state = read_json(checkpoint / STATE_FILE, ANOTHER)
    if state.get("run_format") != RUN_FORMAT:
        raise TwellError(
            f"{checkpoint.parent} was begun by another version of twellctl, which trains "
            f"differently: continue with that version, or {ANEW}"
        )
    if state.pop("seal", None) != _seal(checkpoint, state):
        raise TwellError(f"{checkpoint / STATE_FILE} is damaged, or of another run: {ANOTHER}")
    return state
