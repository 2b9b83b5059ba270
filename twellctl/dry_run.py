"""twellctl finetune --dry-run: what a run would take, before it begins.

Nothing is written. Time and memory are measured on a few real steps, on the beginning of the run's
text, with the teacher and the optimizer. Of a step that accumulates gradients, two parts run: the
second one needs memory for the gradients of the first, too. On a CPU, where these steps can take
hours, they are not taken if that is to be expected, and the result is a guess by their products.

In one process, settings that do not fit are reduced and tried again until they do, and the result
says so. If weights, gradients and optimizer alone are too large, nothing is loaded. What several
GPUs would hold is computed. In several processes, all take the steps, and nothing is tried again:
if one runs out of memory, all end.
"""

import dataclasses
import gc
import itertools
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import TrainerCallback

from twellctl.errors import TwellError
from twellctl.here.processes import check_same, from_all, in_all
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import load_tokenizer, quiet_compiler, quiet_transformers
from twellctl.settings import flag_name
from twellctl.text.blocks import Blocks, read_blocks, token_stream, write_tokens
from twellctl.text.reading import estimated_text_bytes, read_texts, text_files
from twellctl.training.build import build_trainer, for_model, micro_batch, steps_of
from twellctl.training.launcher import checked_recipe
from twellctl.training.memory import least_bytes, shards_on_several, total_bytes
from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe, public_recipe, settings
from twellctl.training.runs import check_alike, held_out_fraction, split_blocks
from twellctl.training.step_cost import Measured, guessed, product_rate, step_seconds
from twellctl.training.teacher import choose_teacher
from twellctl.training.trainer import SparseTrainer

STEPS = 5
PATIENCE = 20.0  # seconds that they may take on a CPU, by a guess


@dataclass(frozen=True)
class Probe:
    """What some steps are taken on: `blocks` of tokens, in a `folder` that is removed afterwards.

    `doing` receives what takes time.
    """

    blocks: np.ndarray
    folder: Path
    doing: Callable[[str], None]


@dataclass(frozen=True)
class OnSeveral:
    """What each of `num_gpus` holds before the first block: some rows of all weights, or all."""

    num_gpus: int
    least_bytes: int
    is_sharded: bool


@dataclass(frozen=True)
class DryRun:
    """What a run would take, and which kind of `memory`.

    `passes` over the text, and `num_steps` if epochs are given, are estimated from file sizes.
    `peak_bytes` is the most memory that one process allocated (on a CPU, its whole memory); if no
    step was taken (`is_guess`), the least that it needs. `total_bytes` is what the GPU has, or what
    the system could give a process. `checkpoint_bytes` is the size of one checkpoint on disk, 0
    without any. `is_sharded`: over `num_processes`.
    `on_several`: what several GPUs would hold, for a run of one process. `changes` are the settings
    without which the run does not fit. `config` is the model's config.json or a folder with it.
    `density` is the target, None without one.
    """

    num_steps: int
    num_tokens: int
    passes: float
    num_trained: int
    checkpoint_bytes: int
    tokens_per_second: float
    peak_bytes: int
    total_bytes: int
    memory: str
    config: str
    density: float | None
    changes: dict[str, object]
    num_processes: int = 1
    is_sharded: bool = False
    is_guess: bool = False
    on_several: tuple[OnSeveral, ...] = ()

    @property
    def seconds(self) -> float:
        return self.num_tokens / self.tokens_per_second


def dry_run(
    model: str | Path | Checkpoint,
    recipe: Recipe,
    note: Callable[[str], None] = lambda text: None,
    doing: Callable[[str], None] = lambda text: None,
) -> DryRun:
    """Measure some steps of `finetune(model, OUT, recipe)`. Raises the same `TwellError`s.

    `note` receives what does not fit, as it is found; `doing` receives what takes time.
    """
    world = PartialState(cpu=not torch.cuda.is_available())
    checkpoint, recipe = _checked(model, recipe)
    if not world.is_main_process:
        note = doing = lambda text: None
    with tempfile.TemporaryDirectory() as folder, quiet_transformers(), quiet_compiler():
        doing("reading the first of the text")
        blocks, text_tokens = _first_blocks(checkpoint, recipe, Path(folder))
        probe = Probe(blocks, Path(folder), doing)
        changes, measured = _measure_what_fits(checkpoint, recipe, probe, note)
    _free()
    num_steps = steps_of(recipe, text_tokens / recipe.block_tokens)
    num_tokens = num_steps * recipe.step_tokens
    return DryRun(
        num_steps=num_steps,
        num_tokens=num_tokens,
        passes=num_tokens / text_tokens,
        num_trained=measured.num_trained,
        checkpoint_bytes=measured.checkpoint_bytes,
        tokens_per_second=measured.tokens_per_second,
        peak_bytes=measured.peak_bytes,
        total_bytes=total_bytes(),
        memory=_memory(),
        config=str(checkpoint.path),
        density=None if recipe.l1_schedule == "constant" else recipe.density,
        changes=changes,
        num_processes=world.num_processes,
        is_sharded=measured.is_sharded,
        is_guess=measured.is_guess,
        on_several=_on_several(checkpoint, recipe) if world.num_processes == 1 else (),
    )


def _checked(model: str | Path | Checkpoint, recipe: Recipe) -> tuple[Checkpoint, Recipe]:
    """The model, and the recipe completed for it; `TwellError` for what `finetune` refuses."""
    recipe = checked_recipe(recipe)
    text_files([*recipe.data, *recipe.eval_data])
    check_same(settings(public_recipe(recipe)), "start all with the same command")
    checkpoint = in_all(lambda: open_checkpoint(model))
    checkpoint.require_unquantised()
    checkpoint.require_relu()
    recipe = in_all(lambda: for_model(recipe, checkpoint))
    check_alike(checkpoint, recipe)
    return checkpoint, recipe


def _first_blocks(checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> tuple[np.ndarray, float]:
    """(blocks of the first text, again and again if it is short; tokens to train on, about)."""
    path, num_texts = folder / "tokens.bin", 0
    sizes: list[int] = []
    tokenizer = load_tokenizer(checkpoint)

    def texts() -> Iterator[str]:  # more of them than are written: they are encoded together
        for text in read_texts(recipe.data, recipe.text_column, tokenizer):
            sizes.append(len(text.encode()))
            yield text

    def taken(stream: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        nonlocal num_texts
        for tokens in stream:
            num_texts += 1
            yield tokens

    count = 2 * STEPS * recipe.micro_batch_size * PartialState().num_processes
    batch = math.ceil((recipe.batch_size + 1) / (1 - held_out_fraction(recipe))) + 1
    stream = token_stream(texts(), tokenizer, checkpoint.config.get("vocab_size"))
    write_tokens(taken(stream), path, max(count, batch) * recipe.block_tokens)
    blocks = np.array(read_blocks(path, recipe.block_tokens))
    if len(blocks) < batch:  # that is all of the text
        split_blocks(len(blocks), recipe)
    num_bytes = sum(sizes[:num_texts])
    per_byte = path.stat().st_size / 4 / num_bytes
    all_bytes = estimated_text_bytes(recipe.data, recipe.text_column, tokenizer)
    text_tokens = max(1.0, per_byte * all_bytes * (1 - held_out_fraction(recipe)))
    return np.resize(blocks, (count, recipe.block_tokens)), text_tokens


def _in_less_memory(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Changes of the recipe, each of which needs less memory than the one before; first none."""
    yield {}
    size = min(recipe.micro_batch_size, recipe.batch_size)
    while size > 1:  # a large model takes half a minute to load: about half as much each time
        size = max(n for n in range(1, size // 2 + 1) if recipe.batch_size % n == 0)
        yield {"micro_batch_size": size}
    so_far: dict[str, Any] = {"micro_batch_size": 1}
    for name, value in (
        ("gradient_checkpointing", True),
        ("param_dtype", "bfloat16"),
        ("lora_rank", 16),
    ):
        if not getattr(recipe, name) or name == "param_dtype":
            so_far = so_far | {name: value}
            yield so_far


def _memory() -> str:
    return "GPU memory" if torch.cuda.is_available() else "memory"


def _peak_bytes() -> int:
    """The most that was allocated on the GPU since the count began, or by this process ever."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure_what_fits(
    checkpoint: Checkpoint, recipe: Recipe, probe: Probe, note: Callable[[str], None]
) -> tuple[dict[str, Any], Measured]:
    """(the changes without which it does not fit, what `_measure` found with them)."""
    num_processes, least = PartialState().num_processes, 0
    changes: dict[str, Any] = {}
    for changes in _in_less_memory(recipe) if num_processes == 1 else [{}]:
        changed = dataclasses.replace(recipe, **changes)
        least = least_bytes(checkpoint, changed)
        if num_processes == 1 and least > total_bytes():
            continue
        try:
            return changes, _measure(checkpoint, changed, probe)
        except torch.OutOfMemoryError:
            pass  # the error holds the tensors of its frames
        note(f"out of {_memory()} {f'with {as_flags(changes)}' if changes else 'as asked'}")
        _free()
    if num_processes > 1:
        raise TwellError(
            f"out of {_memory()} in {num_processes} processes as asked: take more GPUs, lower "
            "--micro-batch-size, or add --gradient-checkpointing"
        )
    raise TwellError(
        f"out of {_memory()} even with {as_flags(changes)}: that takes {least / 2**30:.1f} GiB "
        "before the first block; take a machine with more of it, or a smaller model"
    )


def _on_several(checkpoint: Checkpoint, recipe: Recipe) -> tuple[OnSeveral, ...]:
    if not torch.cuda.is_available():
        return ()
    least = least_bytes(checkpoint, recipe)
    if not shards_on_several(checkpoint, recipe):
        return (OnSeveral(2, least, False),)
    return tuple(OnSeveral(count, least // count, True) for count in (2, 4, 8))


def _measure(checkpoint: Checkpoint, recipe: Recipe, probe: Probe) -> Measured:
    """Take some steps, of one or two parts, unless they would take too long."""
    num_processes = PartialState().num_processes
    micro, parts = micro_batch(recipe, num_processes)
    probed = min(2, parts)
    size = probed * micro * num_processes
    if not torch.cuda.is_available() and num_processes == 1:
        rate, tried = product_rate(), dataclasses.replace(recipe, batch_size=size)
        if STEPS * step_seconds(checkpoint, tried, rate) > PATIENCE:
            return guessed(checkpoint, recipe, rate)
    short: dict[str, Any] = {"max_steps": STEPS, "max_tokens": None, "batch_size": size}
    short |= {"micro_batch_size": micro, "save_steps": 0, "eval_steps": 0, "report_to": "none"}
    probe.doing("loading the model")
    teacher, data = choose_teacher(checkpoint, recipe), (Blocks(probe.blocks[: STEPS * size]), None)
    short_recipe = dataclasses.replace(recipe, **short)
    trainer = build_trainer(checkpoint, teacher, short_recipe, probe.folder, data, Progress())
    trainer.muon.allocate()  # else recorded parts would have gone before it, and not count again
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    clock = _Clock(trainer, probe.doing)
    trainer.tell_first(clock)
    try:
        trainer.train()
    finally:
        trainer.drop_captured()
    seconds = clock.step_seconds() + (parts - probed) * clock.part_seconds()
    return Measured(
        num_trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        checkpoint_bytes=_checkpoint_bytes(trainer) if recipe.save_steps else 0,
        tokens_per_second=recipe.step_tokens / seconds,
        peak_bytes=max(from_all(_peak_bytes())),
        is_sharded=trainer.is_sharded,
    )


def _checkpoint_bytes(trainer: SparseTrainer) -> int:
    """The size of the trained weights, with one state of Muon each or two of AdamW."""
    return sum(
        weight.numel() * weight.element_size() * (2 if group["matrices"] else 3)
        for group in trainer.muon.param_groups
        for weight in group["params"]
    )


class _Clock(TrainerCallback):
    """Records when steps ended and how long their first parts took; ends steps as a run does."""

    def __init__(self, trainer: SparseTrainer, doing: Callable[[str], None]):
        self.trainer, self.doing = trainer, doing
        self.ends: list[float] = []
        self.parts: list[float] = []
        self._began = 0.0

    def step_seconds(self) -> float:
        """The median time of a step with its one or two parts, without the first."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends))

    def part_seconds(self) -> float:
        """The median time of a part before the last, forward and backward; 0 with one part."""
        return statistics.median(self.parts[1:] or [0.0])

    def on_step_begin(self, args, state, control, **kwargs):
        self.doing(f"taking step {len(self.ends) + 1} of {STEPS} to measure")
        self._began = _now()

    def on_substep_end(self, args, state, control, **kwargs):
        self.parts.append(_now() - self._began)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.finish_step(False)  # reads what the step found, so it waits for the device
        self.ends.append(_now())
        control.should_save = False


def _now() -> float:
    """Seconds, with nothing left to do on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def _free() -> None:
    torch._dynamo.reset()  # code compiled for too many sizes is not compiled for one more
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def as_flags(changes: dict[str, Any]) -> str:
    """Settings as they are written on a command line."""
    flags = ((f"--{flag_name(name)}", value) for name, value in changes.items())
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags)
