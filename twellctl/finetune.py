"""twellctl finetune: trains a ReLU model to be sparse with the HF Trainer.

During the run, `OUT.run` holds the tokens, the resolved recipe and the checkpoints. OUT appears
when the run is complete.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch._dynamo.exc import TorchDynamoException

from twellctl.errors import TwellError, UsageError, bounded, reason
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
from twellctl.report.notebook import Shown
from twellctl.training import runs
from twellctl.training.build import build_trainer, for_model, micro_batch
from twellctl.training.history import History
from twellctl.training.launcher import as_launched
from twellctl.training.progress import Progress
from twellctl.training.recipe import (
    RECIPE_FILE,
    Recipe,
    check_report_to,
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
    if not recipe.data:
        raise UsageError("no text to train on: give --data FILE")
    recipe = as_launched(recipe)
    check_report_to(recipe.report_to)
    inputs = runs.run_inputs(model, recipe, recipe_file)
    world = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    progress = progress or Progress()
    progress = progress if world.is_main_process else progress.of_another()
    how = {"resume": resume, "overwrite": overwrite}
    asked = settings_of(public_recipe(recipe)) | how
    processes.check_same(asked, "start all with the same command")
    with contextlib.ExitStack() as held:
        claiming = claimed(out, overwrite=overwrite, inputs=inputs, run=run_folder(out))
        claim = processes.in_the_first(world, lambda: held.enter_context(claiming))
        checkpoint = processes.in_all(lambda: open_checkpoint(model))
        result = _finetune(checkpoint, out, claim, recipe, world, progress, **how)
        if world.is_main_process:
            runs.discard(run_folder(out), out, progress.note)
    return result


def _finetune(
    checkpoint: Checkpoint,
    out: Path,
    claim: Claim | None,
    recipe: Recipe,
    world: PartialState,
    progress: Progress,
    **how: bool,
) -> FineTuned:
    """What a process does while `out` is claimed; only the first one has the `claim`."""
    run = run_folder(out)
    checkpoint.require_unquantised()
    checkpoint.require_relu()
    recipe = processes.in_all(lambda: for_model(recipe, checkpoint))
    if how["resume"]:
        processes.in_all(lambda: runs.check_began_with(run, checkpoint.origin))
    teacher = choose_teacher(checkpoint, recipe)
    _beware(checkpoint, teacher, progress)
    tokenizer = load_tokenizer(checkpoint)
    micro_batch(recipe, world.num_processes)
    runs.check_alike(checkpoint, recipe)
    progress.doing("reading and tokenising the text")
    processes.in_the_first(
        world, lambda: runs.prepare_run(run, recipe, checkpoint, tokenizer, **how)
    )
    blocks = processes.in_all(lambda: runs.run_blocks(run, recipe))
    world.wait_for_everyone()  # from here on a process that fails may remove the folder
    together, tell = world.num_processes > 1, partial(_tell_of_the_lost, run, progress)
    with quiet_transformers(), quiet_compiler(), processes.reported_once():
        try:
            progress.doing("loading the model")
            trainer = build_trainer(checkpoint, teacher, recipe, run, blocks, progress)
            with answered(tell) if together else contextlib.nullcontext():
                result = _train(trainer, out, run, recipe, progress)
                progress.doing(f"writing {out}")
                result = _save(trainer, checkpoint, teacher, recipe, run, result, claim, progress)
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
            raise LostProcess(_LOST + _kept(run)) from error
        finally:
            if world.is_main_process and runs.last_checkpoint(run) is None:
                runs.discard(run, out, progress.note)
    return result


def _beware(checkpoint: Checkpoint, teacher: Teacher | None, progress: Progress) -> None:
    """Say, before text is tokenised and steps are taken, what may make them useless."""
    if why := why_unexportable(checkpoint, skeleton(checkpoint)):
        progress.note(f"beware: {why}")
    taught_by = teacher.checkpoint if teacher else checkpoint
    if taught_by is not checkpoint and not may_be_source(checkpoint, taught_by):
        progress.note(
            f"beware: the teacher {taught_by.name} is not the model that {checkpoint.name} was "
            "made from, and what it answers is what is learnt"
        )


def _train(
    trainer: SparseTrainer, out: Path, run: Path, recipe: Recipe, progress: Progress
) -> FineTuned:
    sparsity = SparsityCallback(trainer, progress.stopping)
    trainer.tell_first(sparsity)  # a step is reported before it is shown
    resume_from = runs.last_checkpoint(run)
    if resume_from is not None:
        trainer.restore(runs.checkpoint_state(resume_from))
    resumed_at = int(resume_from.name.split("-")[1]) if resume_from else 0
    history = History(trainer, run, recipe.step_tokens)
    history.go_on(resumed_at)
    trainer.add_callback(history)
    has_eval = trainer.eval_dataset is not None
    try:
        taught = trainer.teacher is not None
        blocks = len(trainer.train_dataset)
        progress.first_line(recipe, trainer.args.max_steps, blocks, resumed_at, taught)
        progress.doing("evaluating the teacher")
        teacher_loss = trainer.evaluate_teacher()
        compiling = ", for which layers are compiled" if recipe.compile else ""
        progress.doing(f"evaluating, and taking the first step{compiling}")
        trainer.args.eval_on_start = has_eval and not resumed_at
        with contextlib.suppress(NoStepLeft):
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        last = (
            _last_evaluation(trainer, progress) if has_eval and sparsity.stopped_at is None else {}
        )
    except (OSError, SafetensorError) as error:
        raise TwellError(f"{run} could not be written: {reason(error)}; {_kept(run)}") from error
    except BaseException as error:
        if not sparsity.in_a_hurry:
            raise
        raise Interrupted(f"interrupted in the middle of a step; {_kept(run)}") from error
    finally:
        trainer.drop_captured()
        sparsity.restore_signals()
        progress.stop()
    if sparsity.stopped_at is not None:
        raise Interrupted(
            f"interrupted at step {sparsity.stopped_at} of {trainer.state.max_steps}; the "
            f"checkpoint is in {run}: continue with the same command and --resume"
        )
    num_steps, logged = trainer.state.global_step, trainer.state.log_history
    first: dict[str, float] = next((e for e in logged if "eval_loss" in e), {})
    _refuse_diverged(
        first.get("eval_loss"), last.get("eval_loss"), trainer.model.config.vocab_size, run
    )
    return FineTuned(
        out=out,
        num_steps=num_steps,
        num_tokens=num_steps * recipe.step_tokens,
        l1=trainer.schedule.l1,
        teacher_cross_entropy=teacher_loss,
        first_cross_entropy=first.get("eval_loss"),
        first_density=first.get("eval_density"),
        cross_entropy=last.get("eval_loss"),
        teacher_kl=last.get("eval_teacher_kl"),
        density=last.get("eval_density", trainer.report.density),
        density_by_layer=trainer.held_out_by_layer if last else trainer.report.density_by_layer,
        target_density=recipe.density if recipe.l1_schedule == "target" else None,
    )


def _refuse_diverged(first: float | None, last: float | None, vocabulary: int, run: Path) -> None:
    """`TwellError` where the last held-out loss is worse than the first, and than guessing."""
    guessing = math.log(vocabulary)
    if first is not None and last is not None and last > max(first + WORSE, guessing):
        raise TwellError(
            f"the run diverged: the held-out cross-entropy went from {first:.2f} to {last:.2f}, "
            f"guessing has {guessing:.2f}: start again with --overwrite and a lower "
            f"--learning-rate (the checkpoints are in {run})"
        )


def _tell_of_the_lost(run: Path, progress: Progress) -> None:
    """Of a process that waits for one that is gone, and will be killed."""
    if processes.is_first_to_report():
        progress.fail(_LOST + _kept(run))


def _kept(run: Path) -> str:
    """From where an interrupted run can be resumed."""
    kept = runs.last_checkpoint(run)
    return f"--resume continues from {kept.name}" if kept else "no checkpoint was complete"


def _last_evaluation(trainer: SparseTrainer, progress: Progress) -> dict[str, float]:
    """The figures of the last step; evaluated now unless this process did so after it."""
    for entry in trainer.state.log_history if trainer.held_out_by_layer else []:
        if "eval_loss" in entry and entry["step"] == trainer.state.global_step:
            return entry
    progress.doing("evaluating")
    return trainer.evaluate()


def _save(
    trainer: SparseTrainer,
    checkpoint: Checkpoint,
    teacher: Teacher | None,
    recipe: Recipe,
    run: Path,
    result: FineTuned,
    claim: Claim | None,
    progress: Progress,
) -> FineTuned:
    """Write OUT: the weights in the source's dtype, adapters merged, config.json as it was.

    What the run ended with, its answers compared to the teacher's.
    """
    trainer.head.remove()
    write = _weight_writer(trainer, checkpoint, recipe)
    if not trainer.accelerator.is_main_process:
        write(None)
        return result
    config = {k: v for k, v in checkpoint.config.items() if k != "auto_map"}
    config["twell"] = checkpoint.twell
    try:
        with claim.staged() as stage:
            write(stage)
            copy_side_files(checkpoint, stage)
            if (run / "runs").is_dir():  # where tensorboard writes
                shutil.copytree(run / "runs", stage / "runs")
            shutil.copy(run / METRICS_FILE, stage)
            write_config(stage, config)
            if teacher is not None and trainer.eval_dataset is not None:
                score = answers_of_run(stage, teacher, trainer.eval_dataset, progress)
                result = dataclasses.replace(result, answers=score)
            public = public_recipe(recipe)
            save_recipe(public, stage / RECIPE_FILE)
            told = settings_of(public)
            report = dataclasses.asdict(result) | {"out": result.out.name, "recipe": told}
            (stage / REPORT_FILE).write_text(json_text(report), encoding="utf-8")
            write_card(stage, result.out.name, checkpoint.path)
    except SafetensorError as error:
        raise TwellError(f"{result.out} could not be written: {error}; nothing was left") from error
    return result


def _weight_writer(
    trainer: SparseTrainer, checkpoint: Checkpoint, recipe: Recipe
) -> Callable[[Path | None], None]:
    """What writes a model folder's weights and configs; all processes call it, the others on None.

    The penalty is taken out of the model.
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
