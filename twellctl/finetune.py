"""twellctl finetune: sparsification of a ReLU model through the HF Trainer.

While it runs, everything lies in `OUT.run`: the tokens, the resolved recipe and the checkpoints.
OUT appears when the run is complete.
"""

import collections
import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.trainer_callback import PrinterCallback

from twellctl.errors import TwellError, UsageError, bounded, reason
from twellctl.files.outputs import Claim, check_inputs, claimed
from twellctl.files.strict_json import to_json
from twellctl.models.card import write_card
from twellctl.models.carried import REPORT_FILE, copy_side_files, write_config
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import (
    checkpoint_activations,
    in_autocast_dtype,
    load_model,
    load_tokenizer,
    quiet_compiler,
    quiet_transformers,
    without_mask,
)
from twellctl.text.data import Blocks
from twellctl.training.arguments import micro_batch, trainer_arguments
from twellctl.training.from_scratch import check_from_scratch
from twellctl.training.history import METRICS_FILE, History
from twellctl.training.l1_schedule import MAX_L1, ConstantL1, TargetL1
from twellctl.training.layer_routes import LayerRoutes
from twellctl.training.layer_states import LayerStates, comparable, ffn_layers
from twellctl.training.lora import with_lora
from twellctl.training.optimizer import make_optimizer, slow_on_cpu
from twellctl.training.priced_gates import PricedGates
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
from twellctl.training.runs import (
    checkpoint_state,
    discard_unstarted,
    last_checkpoint,
    prepare_run,
    run_blocks,
    run_inputs,
)
from twellctl.training.sparsity import FfnPenalty
from twellctl.training.teacher import Teacher, choose_teacher, is_fresh
from twellctl.training.trackers import check_report_to
from twellctl.training.trainer import NoStepLeft, SparseTrainer, SparsityCallback

PATIENCE = timedelta(days=1)  # the other processes wait while the first one tokenises
LEEWAY = 0.5  # nats that a model may lose which was ReLU before: it begins at its best
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class FineTuned:
    """What a run ended with. Cross-entropies are held-out nats a token, None without such text."""

    out: Path
    num_steps: int
    num_tokens: int
    l1: float
    teacher_cross_entropy: float | None
    first_cross_entropy: float | None
    cross_entropy: float | None
    density: float
    density_by_layer: list[float]
    target_density: float | None


class Interrupted(TwellError):
    """The run was stopped by a signal and its checkpoint saved."""

    exit_code = 130


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

    `settings` are the fields of `Recipe`, like `data=[...]` or `target_sparsity=0.97`; they win
    over `recipe`: a YAML file, the name of a shipped recipe, or a `Recipe`; with `resume`, None is
    what the run began with. Weights are drawn for what `from_scratch.open_config` returns.
    `recipe_file`, where a `Recipe` was read, is spared like all other inputs. Raises `TwellError`;
    `Interrupted` after Ctrl-C, with a checkpoint that `resume` goes on from.
    """
    out, recipe_file = Path(out), recipe_file or file_of(recipe)
    recipe = resolve_recipe(recipe or recipe_to_resume(out, resume), settings)
    if not recipe.data:
        raise UsageError("no text to train on: give --data FILE")
    check_report_to(recipe.report_to)
    inputs = run_inputs(model, recipe, recipe_file)
    world = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    progress = (progress or Progress()) if world.is_main_process else Progress(silent=True)
    how = {"resume": resume, "overwrite": overwrite}
    with contextlib.ExitStack() as held:
        claim = _in_the_first(world, lambda: held.enter_context(_claimed(out, inputs, overwrite)))
        result = _finetune(open_checkpoint(model), out, claim, recipe, world, progress, **how)
        if world.is_main_process:
            shutil.rmtree(run_folder(out), ignore_errors=True)
    return result


@contextlib.contextmanager
def _claimed(out: Path, inputs: list[Path], overwrite: bool) -> Iterator[Claim]:
    """`out`, and with it `OUT.run`, for this process alone; neither holds any of `inputs`."""
    with claimed(out, overwrite=overwrite, inputs=inputs) as claim:
        check_inputs(run_folder(out), inputs)
        yield claim


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
    checkpoint.require_relu()
    recipe = for_model(recipe, checkpoint)
    teacher = choose_teacher(checkpoint, recipe)
    tokenizer = load_tokenizer(checkpoint)
    micro_batch(recipe, world.num_processes)
    progress.doing("reading and tokenising the text")
    _in_the_first(world, lambda: prepare_run(run, recipe, checkpoint, tokenizer, **how))
    blocks = run_blocks(run, recipe)
    world.wait_for_everyone()  # from here on a process that fails may remove the folder
    with quiet_transformers(), quiet_compiler():
        try:
            progress.doing("loading the model")
            trainer = build_trainer(checkpoint, teacher, recipe, run, blocks, progress)
            result = _train(trainer, out, run, recipe, progress)
            progress.doing(f"writing {out}")
            _save(trainer, checkpoint, recipe, run, result, claim)
        except torch.OutOfMemoryError as error:
            raise TwellError(
                "out of GPU memory: lower --micro-batch-size, or add --gradient-checkpointing or "
                "--param-dtype bfloat16"
            ) from error
        except TorchDynamoException as error:
            said = bounded(reason(error), 300)
            raise TwellError(f"compiling failed: {said}; go on with --no-compile") from error
        finally:
            if world.is_main_process:
                discard_unstarted(run)
    return result


def for_model(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """The recipe with what it leaves open: length of blocks, learning rate, penalty, compile."""
    if not checkpoint.shards:
        check_from_scratch(recipe)
    longest = checkpoint.config.get("max_position_embeddings") or math.inf
    if recipe.seq_len is not None and recipe.seq_len > longest:
        raise UsageError(f"seq-len must be <= {longest}, the model's context, got {recipe.seq_len}")
    penalty = recipe.penalty or ("l1" if recipe.l1_schedule == "constant" else "count")
    return dataclasses.replace(
        recipe,
        compile=_compiles(recipe) if recipe.compile is None else recipe.compile,
        penalty=penalty,
        seq_len=recipe.seq_len or min(1024, longest),
        learning_rate=recipe.learning_rate or 0.5 / checkpoint.ffn.hidden_size,
    )


def _compiles(recipe: Recipe) -> bool:
    one_process = os.environ.get("WORLD_SIZE", "1") == "1"
    return torch.cuda.is_available() and one_process and not recipe.lora_rank


def _in_the_first(world: PartialState, prepare: Callable[[], Any]) -> Any:
    """Call `prepare` in the first process while the others wait; what it raises, all raise.

    What it returns only the first process gets.
    """
    failure: list[BaseException | None] = [None]
    made = None
    if world.is_main_process:
        try:
            made = prepare()
        except (TwellError, KeyboardInterrupt, SystemExit) as error:
            failure = [error]
    broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
    return made


def build_trainer(
    checkpoint: Checkpoint,
    teacher: Teacher | None,
    recipe: Recipe,
    run: Path,
    blocks: tuple[Blocks, Blocks | None],
    progress: Progress,
) -> SparseTrainer:
    """All that a run trains with, loaded; `recipe` is one that `for_model` has completed."""
    train, held_out = blocks
    dtype = getattr(torch, recipe.param_dtype)
    torch.manual_seed(recipe.seed)
    model = load_model(checkpoint, dtype=dtype)
    without_mask(model, recipe.seq_len)
    model.config.use_cache = False
    if recipe.lora_rank:
        model = with_lora(model, recipe)
    else:
        model.requires_grad_(True)
    soften = recipe.soften if is_fresh(checkpoint) and recipe.penalty == "count" else 0.0
    progress.doing("looking at what the layers read")
    penalty = _penalty(model, recipe, train, soften)
    if recipe.gradient_checkpointing:
        checkpoint_activations(model)
    model.get_input_embeddings().register_forward_hook(in_autocast_dtype)
    arguments = trainer_arguments(recipe, run, len(train), held_out is not None)
    num_gpus = torch.cuda.device_count()
    if arguments.world_size == 1 < num_gpus:
        progress.note(
            f"on one of {num_gpus} GPUs; on all: torchrun --nproc-per-node {num_gpus} -m twellctl "
            "finetune ..."
        )
    if said := slow_on_cpu(model, recipe.optimizer, recipe.batch_size * recipe.seq_len):
        progress.note(said)
    taught_by = teacher and teacher.load()
    if taught_by is not None:
        without_mask(taught_by, recipe.seq_len)
    states = None
    if taught_by is not None and recipe.state_weight and comparable(model, taught_by):
        states = LayerStates(model, taught_by, recipe.state_weight)
    trainer = SparseTrainer(
        penalty=penalty,
        schedule=_schedule(recipe, checkpoint.ffn.intermediate_size, arguments.max_steps),
        teacher=taught_by,
        teacher_weight=recipe.teacher_weight,
        states=states,
        routes=LayerRoutes(penalty.ffns, progress.note) if recipe.penalty == "l1" else None,
        soften=soften,
        leeway=0.0 if is_fresh(checkpoint) else LEEWAY,
        compiled=recipe.compile,
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        optimizers=(make_optimizer(model, penalty.gates, arguments, recipe.optimizer), None),
    )
    if recipe.compile:  # within a checkpoint a compiled layer may not say what fired
        parts = penalty.ffns if recipe.gradient_checkpointing else ffn_layers(model)
        for part in [*parts, *(ffn_layers(taught_by) if taught_by else [])]:
            part.forward = torch.compile(part.forward, dynamic=False)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(progress.callback(trainer, recipe, checkpoint.ffn.intermediate_size))
    return trainer


def _penalty(
    model: PreTrainedModel, recipe: Recipe, train: Blocks, soften: float
) -> PricedGates | FfnPenalty:
    if recipe.penalty == "count":
        gates = PricedGates(model, recipe.l1_normalizer)
        gates.width = 1.0 if soften else None
        device = model.device
        batches = (train[i]["input_ids"][None].to(device) for i in range(len(train)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            gates.find_directions(model.train(), batches)
        return gates
    return FfnPenalty(model, recipe.l1_normalizer, compiled=bool(recipe.compile))


def _schedule(recipe: Recipe, num_neurons: int, num_steps: int) -> ConstantL1 | TargetL1:
    if recipe.l1_schedule == "constant":
        return ConstantL1(recipe.l1)
    ceiling = MAX_L1 * (num_neurons if recipe.l1_normalizer == "mean" else 1)
    return TargetL1(recipe.l1, 1 - recipe.target_sparsity, num_steps, ceiling)


def _train(
    trainer: SparseTrainer, out: Path, run: Path, recipe: Recipe, progress: Progress
) -> FineTuned:
    sparsity = SparsityCallback(trainer, progress.stopping)
    trainer.callback_handler.callbacks.insert(0, sparsity)  # a step is reported before it is shown
    resume_from = last_checkpoint(run)
    if resume_from is not None:
        trainer.restore(checkpoint_state(resume_from))
    resumed_at = int(resume_from.name.split("-")[1]) if resume_from else 0
    history = History(trainer, run, recipe.batch_size * recipe.seq_len)
    history.go_on(resumed_at)
    trainer.add_callback(history)
    has_eval = trainer.eval_dataset is not None
    try:
        taught = trainer.teacher is not None
        progress.first_line(recipe, trainer.args.max_steps, resumed_at, taught)
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
        sparsity.restore_signals()
        progress.stop()
    if sparsity.stopped_at is not None:
        raise Interrupted(
            f"interrupted at step {sparsity.stopped_at} of {trainer.state.max_steps}; the "
            f"checkpoint is in {run}: go on with the same command and --resume"
        )
    num_steps, logged = trainer.state.global_step, trainer.state.log_history
    return FineTuned(
        out=out,
        num_steps=num_steps,
        num_tokens=num_steps * recipe.batch_size * recipe.seq_len,
        l1=trainer.schedule.l1,
        teacher_cross_entropy=teacher_loss,
        first_cross_entropy=next((e["eval_loss"] for e in logged if "eval_loss" in e), None),
        cross_entropy=last.get("eval_loss"),
        density=last.get("eval_density", trainer.report.density),
        density_by_layer=trainer.held_out_by_layer if last else trainer.report.density_by_layer,
        target_density=1 - recipe.target_sparsity if recipe.l1_schedule == "target" else None,
    )


def _kept(run: Path) -> str:
    """From where an interrupted run can be resumed."""
    kept = last_checkpoint(run)
    return f"--resume goes on from {kept.name}" if kept else "no checkpoint was complete"


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
    recipe: Recipe,
    run: Path,
    result: FineTuned,
    claim: Claim | None,
) -> None:
    """Write OUT: the weights in the source's dtype, adapters merged, config.json as it was."""
    trainer.head.remove()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if not trainer.accelerator.is_main_process:
        return
    if recipe.lora_rank:
        model = model.merge_and_unload()
        state = model.state_dict()
    trainer.penalty.fold(model, state)
    trainer.penalty.remove()
    state = _as_stored(state, checkpoint)
    config = {k: v for k, v in checkpoint.config.items() if k != "auto_map"}
    config["twell"] = checkpoint.twell
    try:
        with claim.staged() as stage:
            model.save_pretrained(stage, state_dict=state)
            if checkpoint.shards:
                copy_side_files(checkpoint, stage)
            else:
                load_tokenizer(checkpoint).save_pretrained(stage)
            if (run / "runs").is_dir():  # where tensorboard writes
                shutil.copytree(run / "runs", stage / "runs")
            shutil.copy(run / METRICS_FILE, stage)
            write_config(stage, config)
            did = _what_it_did(trainer, recipe, result)
            save_recipe(public_recipe(recipe), stage / RECIPE_FILE, did)
            report = dataclasses.asdict(result) | {"out": result.out.name}
            (stage / REPORT_FILE).write_text(to_json(report, indent=2) + "\n", encoding="utf-8")
            write_card(stage, result.out.name, checkpoint.path)
    except SafetensorError as error:
        raise TwellError(f"{result.out} could not be written: {error}; nothing was left") from error


def _what_it_did(trainer: SparseTrainer, recipe: Recipe, result: FineTuned) -> str:
    """How the coefficient went, in a line."""
    ended = f"{result.density:.2%} of the neurons fire after {result.num_steps} steps"
    if recipe.l1_schedule == "constant":
        return f"{ended}, l1 held at {recipe.l1:g}"
    logged = [(e["l1"], e["step"]) for e in trainer.state.log_history if "l1" in e]
    most, step = max(logged, default=(result.l1, result.num_steps))
    way = (
        f"began at {recipe.l1:g}, was at most {most:.3g} (step {step}) and ended at {result.l1:.3g}"
    )
    return f"{ended}; the goal was {result.target_density:.2%}; l1 {way}"


def _as_stored(state: dict[str, torch.Tensor], checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """`state` in the source's dtypes, less what is another name of a tensor there (a tied head)."""
    stored = {name: DTYPES.get(tensor.dtype) for name, tensor in checkpoint.tensors.items()}
    usual = collections.Counter(stored.values()).most_common(1)[0][0]
    there = {state[name].data_ptr() for name in stored if name in state}
    return {
        name: tensor.to(dtype=stored.get(name, usual))
        for name, tensor in state.items()
        if name in stored or tensor.data_ptr() not in there
    }
