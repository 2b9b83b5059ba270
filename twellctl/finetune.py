"""twellctl finetune: trains a ReLU model to be sparse with the HF Trainer.

During the run, `OUT.run` holds the tokens, the resolved recipe and the checkpoints. OUT appears
when the run is complete.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch._dynamo.exc import TorchDynamoException

from twellctl.errors import TwellError, bounded, reason
from twellctl.evaluation.results import AnswerScore
from twellctl.files.home import from_home
from twellctl.files.outputs import Claim, claimed
from twellctl.files.strict_json import json_text
from twellctl.here import processes
from twellctl.models.card import write_card
from twellctl.models.carried import METRICS_FILE, copy_side_files, write_config
from twellctl.models.checkpoint import REPORT_FILE, Checkpoint, open_checkpoint
from twellctl.models.exportable import why_unexportable
from twellctl.models.loading import (
    as_stored,
    load_tokenizer,
    quiet_compiler,
    quiet_transformers,
    skeleton,
)
from twellctl.report.charts import Curves
from twellctl.report.notebook import Shown
from twellctl.text.blocks import Blocks
from twellctl.training import runs
from twellctl.training.build import build_trainer, for_model, micro_batch
from twellctl.training.history import History, chart_of
from twellctl.training.launcher import checked_recipe
from twellctl.training.progress import Progress
from twellctl.training.recipe import (
    RECIPE_FILE,
    Recipe,
    file_of,
    public_recipe,
    recipe_to_resume,
    resolve_recipe,
    run_folder,
    save_recipe,
)
from twellctl.training.recipe import settings as settings_of
from twellctl.training.sharded_weights import write_sharded
from twellctl.training.sparsity_callback import NoStepLeft, SparsityCallback
from twellctl.training.teacher import Teacher, answers_of_run, choose_teacher, may_be_source
from twellctl.training.termination import answered
from twellctl.training.trainer import SparseTrainer

WORSE = 0.1  # nats that a run which ends worse than guessing may have lost
_LOST = "another process of this run has ended; "
DataBlocks: TypeAlias = tuple[Blocks, Blocks | None]  # training and held-out ones
PATIENCE = timedelta(days=1)  # the other processes wait while the first one tokenises


@dataclass(frozen=True)
class FineTuned(Shown):
    """Results of a run. Cross-entropies and `teacher_kl` are in nats per token of held-out text.

    They are None without such text; `teacher_kl` and `answers`, which compares the model's answers
    with the teacher's, also without a teacher.
    """

    out: Path
    num_steps: int
    num_tokens: int
    l1: float
    teacher_cross_entropy: float | None
    first_cross_entropy: float | None
    first_density: float | None
    cross_entropy: float | None
    teacher_kl: float | None
    density: float
    density_by_layer: list[float]
    target_density: float | None
    answers: AnswerScore | None = None

    def to_chart(self) -> Curves:
        """The history that is in `out`."""
        title = f"{self.out.name}: {self.num_steps} steps, {self.num_tokens} tokens"
        return chart_of(self.out / METRICS_FILE, title, self.target_density)


class Interrupted(TwellError):
    """The run was stopped by a signal and its checkpoint saved."""

    exit_code = 130


class LostProcess(TwellError):
    """Another process of the run has ended; one of those that are left says so."""

    of_one_process = True


def finetune(
    model: str | Path | Checkpoint,
    out: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    recipe_file: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> FineTuned:
    """Fine-tune the ReLU `model` into `out`. Under torchrun, call it in every process.

    `settings` are the fields of `Recipe`, such as `data=[...]` or `density=0.03`. They override
    `recipe`: a YAML file, the name of a shipped recipe, or a `Recipe`. With `resume`, None means
    the recipe that the run began with. `recipe_file`, from which a `Recipe` was read, is never
    overwritten, like all other inputs. `progress` receives what the run reports. Raises
    `TwellError`, or after Ctrl-C `Interrupted`, with a checkpoint from which `resume` continues.
    """
    out, recipe_file = from_home(out), recipe_file or file_of(recipe)
    recipe = resolve_recipe(recipe or recipe_to_resume(out, resume), settings)
    recipe = checked_recipe(recipe)
    inputs = runs.run_inputs(model, recipe, recipe_file)
    world = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    progress = progress or Progress()
    progress = progress if world.is_main_process else progress.of_another()
    how = {"resume": resume, "overwrite": overwrite}
    processes.check_same(
        settings_of(public_recipe(recipe)) | how, "start all with the same command"
    )
    with contextlib.ExitStack() as held:
        claiming = claimed(out, overwrite=overwrite, inputs=inputs, run=run_folder(out))
        claim = processes.in_the_first(world, lambda: held.enter_context(claiming))
        checkpoint = processes.in_all(lambda: open_checkpoint(model))
        run = _begin(checkpoint, out, recipe, progress)
        blocks = _read_blocks(run, world, **how)
        result = _finetune(run, claim, world, blocks)
        if world.is_main_process:
            runs.discard(run.folder, out, progress.note)
    return result


@dataclass(frozen=True)
class _Run:
    """What a process of a run trains, by which recipe; `folder` is `OUT.run`."""

    checkpoint: Checkpoint
    teacher: Teacher | None
    recipe: Recipe
    out: Path
    folder: Path
    progress: Progress


def _begin(checkpoint: Checkpoint, out: Path, recipe: Recipe, progress: Progress) -> _Run:
    """`TwellError` for a model or recipe that a run cannot begin with."""
    checkpoint.require_unquantised()
    checkpoint.require_relu()
    recipe = processes.in_all(lambda: for_model(recipe, checkpoint))
    teacher = choose_teacher(checkpoint, recipe)
    _beware(checkpoint, teacher, progress)
    return _Run(checkpoint, teacher, recipe, out, run_folder(out), progress)


def _read_blocks(run: _Run, world: PartialState, *, resume: bool, overwrite: bool) -> DataBlocks:
    """Tokenise the text, or find the tokens of a run that is resumed."""
    tokenizer = load_tokenizer(run.checkpoint)
    micro_batch(run.recipe, world.num_processes)
    runs.check_alike(run.checkpoint, run.recipe)
    run.progress.doing("reading and tokenising the text")
    how = {"resume": resume, "overwrite": overwrite}

    def prepare() -> None:
        teacher = run.teacher.checkpoint if run.teacher else None
        made_of = runs.made_of(run.checkpoint, teacher, run.recipe)
        runs.prepare_run(run.folder, run.recipe, made_of, run.checkpoint, tokenizer, **how)

    processes.in_the_first(world, prepare)
    blocks = processes.in_all(lambda: runs.run_blocks(run.folder, run.recipe))
    world.wait_for_everyone()  # from here on a process that fails may remove the folder
    return blocks


def _finetune(run: _Run, claim: Claim | None, world: PartialState, blocks: DataBlocks) -> FineTuned:
    """Train and write `run.out`. Only the first process has the `claim` on it."""
    report_lost = (
        answered(partial(_report_lost_process, run))
        if world.num_processes > 1
        else contextlib.nullcontext()
    )
    with quiet_transformers(), quiet_compiler(), processes.reported_once():
        try:
            with _failures_with_advice(run):
                run.progress.doing("loading the model")
                trainer = build_trainer(
                    run.checkpoint, run.teacher, run.recipe, run.folder, blocks, run.progress
                )
                with report_lost:
                    result = _train(run, trainer)
                    run.progress.doing(f"writing {run.out}")
                    return _save(run, trainer, result, claim)
        finally:
            if world.is_main_process and runs.last_checkpoint(run.folder) is None:
                runs.discard(run.folder, run.out, run.progress.note)


@contextlib.contextmanager
def _failures_with_advice(run: _Run) -> Iterator[None]:
    """Failures of PyTorch inside, as `TwellError`s that say what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TwellError(
            "out of GPU memory: lower --micro-batch-size, or add --gradient-checkpointing or "
            "--param-dtype bfloat16"
        ) from error
    except TorchDynamoException as error:
        said = bounded(reason(error), 300)
        raise TwellError(f"compiling failed: {said}; continue with --no-compile") from error
    except RuntimeError as error:
        if not processes.is_lost_process(error):
            raise
        if not processes.is_first_to_report():
            raise SystemExit(1) from error
        raise LostProcess(_LOST + _kept(run.folder)) from error


def _beware(checkpoint: Checkpoint, teacher: Teacher | None, progress: Progress) -> None:
    """Note, before text is tokenised and steps are taken, what may make them useless."""
    if why := why_unexportable(checkpoint, skeleton(checkpoint)):
        progress.note(f"beware: {why}")
    taught_by = teacher.checkpoint if teacher else checkpoint
    if taught_by is not checkpoint and not may_be_source(checkpoint, taught_by):
        progress.note(
            f"beware: the teacher {taught_by.name} is not the model that {checkpoint.name} was "
            "made from, and what it answers is what is learnt"
        )


def _train(run: _Run, trainer: SparseTrainer) -> FineTuned:
    """Take all steps that are left, and evaluate before and after. `Interrupted` after Ctrl-C."""
    sparsity = SparsityCallback(trainer, run.progress.stopping)
    trainer.tell_first(sparsity)  # a step is reported before it is shown
    resume_from = runs.last_checkpoint(run.folder)
    if resume_from is not None:
        trainer.restore(runs.checkpoint_state(resume_from))
    resumed_at = int(resume_from.name.split("-")[1]) if resume_from else 0
    history = History(trainer, run.folder, run.recipe.step_tokens)
    history.go_on(resumed_at)
    trainer.add_callback(history)
    with _interrupts_and_failures(run, trainer, sparsity):
        teacher_loss = _evaluate_teacher(run, trainer, resumed_at)
        _take_steps(run, trainer, resume_from)
        has_eval = trainer.eval_dataset is not None and sparsity.stopped_at is None
        last = _last_evaluation(trainer, run.progress) if has_eval else {}
    if sparsity.stopped_at is not None:
        raise Interrupted(
            f"interrupted at step {sparsity.stopped_at} of {trainer.state.max_steps}; the "
            f"checkpoint is in {run.folder}: continue with the same command and --resume"
        )
    return _result(run, trainer, teacher_loss, last)


@contextlib.contextmanager
def _interrupts_and_failures(
    run: _Run, trainer: SparseTrainer, sparsity: SparsityCallback
) -> Iterator[None]:
    """A full disk, or a second Ctrl-C, inside is a `TwellError`; then signals are as before."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = _kept(run.folder)
        raise TwellError(f"{run.folder} could not be written: {reason(error)}; {kept}") from error
    except BaseException as error:
        if not sparsity.in_a_hurry:
            raise
        kept = _kept(run.folder)
        raise Interrupted(f"interrupted in the middle of a step; {kept}") from error
    finally:
        trainer.drop_captured()
        sparsity.restore_signals()
        run.progress.stop()


def _evaluate_teacher(run: _Run, trainer: SparseTrainer, resumed_at: int) -> float | None:
    """The teacher's loss on held-out text. Shows first what the run is."""
    taught = trainer.teacher is not None
    blocks = len(trainer.train_dataset)
    run.progress.first_line(run.recipe, trainer.args.max_steps, blocks, resumed_at, taught)
    run.progress.doing("evaluating the teacher")
    return trainer.evaluate_teacher()


def _take_steps(run: _Run, trainer: SparseTrainer, resume_from: Path | None) -> None:
    compiling = ", for which layers are compiled" if run.recipe.compile else ""
    run.progress.doing(f"evaluating, and taking the first step{compiling}")
    trainer.args.eval_on_start = trainer.eval_dataset is not None and resume_from is None
    with contextlib.suppress(NoStepLeft):
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)


def _result(
    run: _Run, trainer: SparseTrainer, teacher_loss: float | None, last: dict[str, float]
) -> FineTuned:
    """`last`: the figures of the last evaluation. `TwellError` if the run diverged."""
    num_steps, logged = trainer.state.global_step, trainer.state.log_history
    first: dict[str, float] = next((e for e in logged if "eval_loss" in e), {})
    vocabulary = trainer.model.config.vocab_size
    _refuse_diverged(first.get("eval_loss"), last.get("eval_loss"), vocabulary, run.folder)
    by_layer = _last_densities(trainer, is_evaluated=bool(last))
    return FineTuned(
        out=run.out,
        num_steps=num_steps,
        num_tokens=num_steps * run.recipe.step_tokens,
        l1=trainer.schedule.l1,
        teacher_cross_entropy=teacher_loss,
        first_cross_entropy=first.get("eval_loss"),
        first_density=first.get("eval_density"),
        cross_entropy=last.get("eval_loss"),
        teacher_kl=last.get("eval_teacher_kl"),
        density=sum(by_layer) / len(by_layer),
        density_by_layer=by_layer,
        target_density=run.recipe.density if run.recipe.l1_schedule == "target" else None,
    )


def _last_densities(trainer: SparseTrainer, is_evaluated: bool) -> list[float]:
    """By layer: on held-out text if the last step was evaluated, else of the last step itself."""
    if is_evaluated and trainer.held_out_by_layer is not None:
        return trainer.held_out_by_layer
    if trainer.report is None:
        raise RuntimeError("no step was taken")
    return trainer.report.density_by_layer


def _refuse_diverged(
    first: float | None, last: float | None, vocabulary: int, folder: Path
) -> None:
    """`TwellError` where the last held-out loss is worse than the first, and than guessing."""
    guessing = math.log(vocabulary)
    if first is not None and last is not None and last > max(first + WORSE, guessing):
        raise TwellError(
            f"the run diverged: the held-out cross-entropy went from {first:.2f} to {last:.2f}, "
            f"guessing has {guessing:.2f}: start again with --overwrite and a lower "
            f"--learning-rate (the checkpoints are in {folder})"
        )


def _report_lost_process(run: _Run) -> None:
    """Called in a process that waits for one that is gone, before it is killed."""
    if processes.is_first_to_report():
        run.progress.fail(_LOST + _kept(run.folder))


def _kept(folder: Path) -> str:
    """From where an interrupted run can be resumed."""
    kept = runs.last_checkpoint(folder)
    return f"--resume continues from {kept.name}" if kept else "no checkpoint was complete"


def _last_evaluation(trainer: SparseTrainer, progress: Progress) -> dict[str, float]:
    """The figures of the last step; evaluated now unless this process did so after it."""
    for entry in trainer.state.log_history if trainer.held_out_by_layer else []:
        if "eval_loss" in entry and entry["step"] == trainer.state.global_step:
            return entry
    progress.doing("evaluating")
    return trainer.evaluate()


def _save(run: _Run, trainer: SparseTrainer, result: FineTuned, claim: Claim | None) -> FineTuned:
    """Write OUT: the weights in the source's dtype, adapters merged, config.json as it was.

    Returns `result` with the answers compared to the teacher's.
    """
    trainer.head.remove()
    write = _weight_writer(trainer, run.checkpoint, run.recipe)
    if claim is None:  # another process than the first
        write(None)
        return result
    try:
        with claim.staged() as stage:
            write(stage)
            _copy_what_belongs_to_weights(run, stage)
            if run.teacher is not None and trainer.eval_dataset is not None:
                score = answers_of_run(stage, run.teacher, trainer.eval_dataset, run.progress)
                result = dataclasses.replace(result, answers=score)
            _write_report(run, result, stage)
            write_card(stage, run.out.name, run.checkpoint.path)
    except SafetensorError as error:
        raise TwellError(f"{run.out} could not be written: {error}; nothing was left") from error
    return result


def _copy_what_belongs_to_weights(run: _Run, folder: Path) -> None:
    """Tokenizer and other files of the source, metrics, and config.json without remote code."""
    copy_side_files(run.checkpoint, folder)
    if (run.folder / "runs").is_dir():  # where tensorboard writes
        shutil.copytree(run.folder / "runs", folder / "runs")
    shutil.copy(run.folder / METRICS_FILE, folder)
    config = {k: v for k, v in run.checkpoint.config.items() if k != "auto_map"}
    write_config(folder, config | {"twell": run.checkpoint.twell})


def _write_report(run: _Run, result: FineTuned, folder: Path) -> None:
    """The recipe as a file, and what the run ended with. Neither has paths of this machine."""
    public = public_recipe(run.recipe)
    save_recipe(public, folder / RECIPE_FILE)
    report = dataclasses.asdict(result) | {"out": run.out.name, "recipe": settings_of(public)}
    (folder / REPORT_FILE).write_text(json_text(report), encoding="utf-8")


def _weight_writer(
    trainer: SparseTrainer, checkpoint: Checkpoint, recipe: Recipe
) -> Callable[[Path | None], None]:
    """A function that writes weights and configs into a folder; all processes must call it.

    All but the first call it with None. The penalty is taken out of the model.
    """
    if trainer.is_sharded:
        return partial(_write_sharded, trainer, checkpoint)
    model = trainer.model
    if not trainer.accelerator.is_main_process:
        return lambda folder: None
    if recipe.lora_rank:
        model = model.merge_and_unload()
    state = model.state_dict()
    trainer.penalty.fold(model, state)
    trainer.penalty.remove()
    return partial(model.save_pretrained, state_dict=as_stored(state, checkpoint))


def _write_sharded(trainer: SparseTrainer, checkpoint: Checkpoint, folder: Path | None) -> None:
    model = trainer.model
    write_sharded(folder, model, checkpoint, partial(trainer.penalty.fold, model))
    if folder is not None:
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
