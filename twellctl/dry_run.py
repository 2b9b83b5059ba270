"""twellctl finetune --dry-run: what a run would take, measured on a few of its steps.

Nothing is written. The steps are real ones on the first of the run's own text, with the teacher and
the optimizer; of a step that accumulates, two parts, the second of which has the gradients of the
first beside it. What does not fit is tried again in less memory until something does, and that is
said; where weights, gradients and optimizer alone are too much, nothing is loaded for it.
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

import numpy as np
import psutil
import torch
from accelerate import PartialState
from transformers import TrainerCallback

from twellctl.bench.ffn import FfnSettings, bench_ffn
from twellctl.errors import TwellError, UsageError
from twellctl.finetune import build_trainer, for_model
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import load_tokenizer, quiet_compiler, quiet_transformers
from twellctl.models.shards import TensorInfo
from twellctl.text.data import (
    Blocks,
    read_blocks,
    read_texts,
    text_files,
    token_stream,
    write_tokens,
)
from twellctl.training.optimizer import slow_on_cpu
from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe, flag_name
from twellctl.training.teacher import choose_teacher
from twellctl.training.trackers import check_report_to
from twellctl.training.trainer import SparseTrainer

STEPS = 5
PROBED_TOKENS = 2048
FFN_WEIGHTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class DryRun:
    """What a run would take, and of what `memory`. Without a CUDA device there is no `speedup`.

    `peak_bytes` is the most that was allocated, on a CPU by the whole process; `total_bytes` is
    what the GPU has, or the system could give a process. `changes` are the settings without which
    it does not fit, `speedup` is how many times as fast as dense an FFN of the model's shape is at
    the target's density and `PROBED_TOKENS` tokens.
    """

    num_steps: int
    num_tokens: int
    num_trained: int
    tokens_per_second: float
    peak_bytes: int
    total_bytes: int
    memory: str
    speedup: float | None
    changes: dict[str, object]

    @property
    def seconds(self) -> float:
        return self.num_tokens / self.tokens_per_second


def dry_run(
    model: str | Path | Checkpoint,
    recipe: Recipe,
    note: Callable[[str], None] = lambda text: None,
    doing: Callable[[str], None] = lambda text: None,
) -> DryRun:
    """Measure some steps of `finetune(model, OUT, recipe)`. Raises `TwellError` as it would.

    `note` is told what does not fit, as it is found; `doing` what lasts.
    """
    if not recipe.data:
        raise UsageError("no text to train on: give --data FILE")
    check_report_to(recipe.report_to)
    text_files([*recipe.data, *recipe.eval_data])
    checkpoint = open_checkpoint(model)
    checkpoint.require_relu()
    recipe = for_model(recipe, checkpoint)
    PartialState(cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder, quiet_transformers(), quiet_compiler():
        doing("reading the first of the text")
        blocks, per_byte = _first_blocks(checkpoint, recipe, Path(folder))
        changes, measured = _measure_what_fits(
            checkpoint, recipe, blocks, Path(folder), note, doing
        )
    _free()
    num_steps = _num_steps(recipe, per_byte)
    return DryRun(
        num_steps=num_steps,
        num_tokens=num_steps * recipe.batch_size * recipe.seq_len,
        total_bytes=_total_bytes(),
        memory=_memory(),
        speedup=_speedup(checkpoint, 1 - recipe.target_sparsity),
        changes=changes,
        **measured,
    )


def _first_blocks(checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> tuple[np.ndarray, float]:
    """(blocks of the first text, again and again if it is short; tokens a byte of text)."""
    path, num_bytes = folder / "tokens.bin", 0
    tokenizer = load_tokenizer(checkpoint)

    def texts() -> Iterator[str]:
        nonlocal num_bytes
        for text in read_texts(recipe.data, recipe.text_column, tokenizer):
            num_bytes += len(text.encode())
            yield text

    count = 2 * STEPS * recipe.micro_batch_size
    stream = token_stream(texts(), tokenizer, checkpoint.config.get("vocab_size"))
    write_tokens(stream, path, count * recipe.seq_len)
    blocks = np.array(read_blocks(path, recipe.seq_len))
    if not len(blocks):
        raise TwellError(f"the text makes no block of {recipe.seq_len} tokens: give more text")
    return np.resize(blocks, (count, recipe.seq_len)), path.stat().st_size / 4 / num_bytes


def _num_steps(recipe: Recipe, tokens_per_byte: float) -> int:
    """Of the run; with --epochs from the size of the text files, so about."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    tokens = recipe.max_tokens
    if tokens is None:
        size = sum(path.stat().st_size for path in text_files(recipe.data))
        tokens = recipe.epochs * size * tokens_per_byte * (1 - recipe.eval_fraction)
    return max(1, round(tokens / (recipe.batch_size * recipe.seq_len)))


def _in_less_memory(recipe: Recipe) -> Iterator[dict[str, object]]:
    """Changes of the recipe, none first, each of less memory than the one before."""
    yield {}
    size = min(recipe.micro_batch_size, recipe.batch_size)
    while size > 1:  # a large model takes half a minute to load: about half as much each time
        size = max(n for n in range(1, size // 2 + 1) if recipe.batch_size % n == 0)
        yield {"micro_batch_size": size}
    so_far: dict[str, object] = {"micro_batch_size": 1}
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


def _total_bytes() -> int:
    """What the GPU has, or this process and what the system could still give it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().available + psutil.Process().memory_info().rss


def _peak_bytes() -> int:
    """Most that was allocated on the GPU since the count began, or by this process ever."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _least_bytes(checkpoint: Checkpoint, recipe: Recipe) -> int:
    """What weights, gradients, optimizer and teacher take, however small the batch is."""
    size, total = getattr(torch, recipe.param_dtype).itemsize, 0
    for tensor in _weights(checkpoint):
        num, copies = math.prod(tensor.shape), 1
        in_layer = len(tensor.shape) == 2 and ".layers." in tensor.name
        in_ffn = tensor.name.rpartition(".")[0].rpartition(".")[2] in FFN_WEIGHTS
        if not recipe.lora_rank or (in_ffn and not recipe.lora_ffn):
            copies = 3 if in_layer and recipe.optimizer == "muon" else 4
        total += num * copies * size
    teacher = choose_teacher(checkpoint, recipe)
    taught_by = _weights(teacher.checkpoint) if teacher else []
    return total + sum(2 * math.prod(tensor.shape) for tensor in taught_by)  # bfloat16


def _weights(checkpoint: Checkpoint) -> list[TensorInfo]:
    """The tensors of a checkpoint, a tied head's once."""
    tied = checkpoint.config.get("tie_word_embeddings")
    named = checkpoint.tensors.items()
    return [tensor for name, tensor in named if not (tied and name == "lm_head.weight")]


def _measure_what_fits(
    checkpoint: Checkpoint,
    recipe: Recipe,
    blocks: np.ndarray,
    folder: Path,
    note: Callable[[str], None],
    doing: Callable[[str], None],
) -> tuple[dict[str, object], dict[str, object]]:
    """(the changes without which it does not fit, what `_measure` found with them).

    A model is loaded once for all sizes of its batch, a large one takes half a minute.
    """
    total, trainer, loaded, least = _total_bytes(), None, None, 0
    for changes in _in_less_memory(recipe):
        changed = dataclasses.replace(recipe, **changes)
        least = _least_bytes(checkpoint, changed)
        if least > total:
            continue
        how = dataclasses.replace(changed, micro_batch_size=1)
        if how == loaded and trainer is None:
            continue  # not even its model fitted
        try:
            if how != loaded:
                trainer, loaded = None, how
                _free()
                doing("loading the model")
                trainer = _build(checkpoint, changed, blocks, folder)
                step_tokens = recipe.batch_size * recipe.seq_len
                if said := slow_on_cpu(trainer.model, recipe.optimizer, step_tokens):
                    note(said)
            return changes, _measure(trainer, changed, blocks, doing)
        except torch.OutOfMemoryError:
            pass  # the error holds the tensors of its frames
        note(f"out of {_memory()} {f'with {as_flags(changes)}' if changes else 'as asked'}")
        if trainer is not None:
            trainer.drop_parts()
        _free()
    raise TwellError(
        f"out of {_memory()} even with {as_flags(changes)}: that takes {least / 2**30:.1f} GiB "
        "before the first block; take a machine with more of it, or a smaller model"
    )


def _build(
    checkpoint: Checkpoint, recipe: Recipe, blocks: np.ndarray, folder: Path
) -> SparseTrainer:
    short = {"max_steps": STEPS, "max_tokens": None, "batch_size": recipe.micro_batch_size}
    short |= {"save_steps": 0, "eval_steps": 0, "report_to": "none"}
    probe = dataclasses.replace(recipe, **short)
    teacher, data = choose_teacher(checkpoint, recipe), (Blocks(blocks), None)
    return build_trainer(checkpoint, teacher, probe, folder, data, Progress(silent=True))


def _measure(
    trainer: SparseTrainer, recipe: Recipe, blocks: np.ndarray, doing: Callable[[str], None]
) -> dict[str, object]:
    """Of some steps of a trainer that may have taken steps of other sizes before."""
    micro = min(recipe.micro_batch_size, recipe.batch_size)
    parts = recipe.batch_size // micro
    probed = min(2, parts)
    trainer.take_batches(Blocks(blocks[: STEPS * probed * micro]), micro, probed)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    clock = _Clock(trainer, doing)
    trainer.remove_callback(_Clock)
    trainer.callback_handler.callbacks.insert(0, clock)
    trainer.train()
    seconds = clock.step_seconds() + (parts - probed) * clock.part_seconds()
    return {
        "num_trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "tokens_per_second": recipe.batch_size * recipe.seq_len / seconds,
        "peak_bytes": _peak_bytes(),
    }


class _Clock(TrainerCallback):
    """When steps ended, and their last parts began and ended; it ends steps as a run does."""

    def __init__(self, trainer: SparseTrainer, doing: Callable[[str], None]):
        self.trainer, self.doing, self.ends, self.parts = trainer, doing, [], []
        self._part_began: float | None = None

    def step_seconds(self) -> float:
        """Of a step with its one or two parts, the first step left out."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends))

    def part_seconds(self) -> float:
        """Of the second part, forward and backward; 0 where a step has one part."""
        return statistics.median(self.parts[1:] or [0.0])

    def on_step_begin(self, args, state, control, **kwargs):
        self.doing(f"taking step {len(self.ends) + 1} of {STEPS} to measure")

    def on_substep_end(self, args, state, control, **kwargs):
        self._part_began = _now()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self._part_began is not None:
            self.parts.append(_now() - self._part_began)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.finish_step(False)  # reads what the step found, so it waits for the device
        self.ends.append(_now())
        control.should_save = False


def _now() -> float:
    """Seconds, with nothing left to do on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def _speedup(checkpoint: Checkpoint, density: float) -> float | None:
    """Of one FFN over dense, where the kernels run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    shape = (checkpoint.ffn.hidden_size, checkpoint.ffn.intermediate_size)
    how = {"tokens": (PROBED_TOKENS,), "densities": (density,), "max_autotune": False, "rounds": 5}
    try:
        ((_, (point,)),) = bench_ffn(FfnSettings(*shape, **how)).groups
    except TwellError:
        return None
    return point.over_dense(point.twell)


def _free() -> None:
    torch._dynamo.reset()  # code compiled for too many sizes is not compiled for one more
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def as_flags(changes: dict[str, object]) -> str:
    """Settings as they are written on a command line."""
    flags = ((f"--{flag_name(name)}", value) for name, value in changes.items())
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags)
