"""A run is put together: what the recipe leaves open, the models, the penalty, the trainer."""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from twellctl.bundle.twell_config import stays_silu
from twellctl.bundle.twell_model import gated_ffns
from twellctl.errors import TwellError, UsageError
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.layers import ffn_layers
from twellctl.models.loading import (
    checkpoint_activations,
    default_device,
    in_autocast_dtype,
    load_model,
    without_mask,
)
from twellctl.text.blocks import Blocks
from twellctl.training.l1_schedule import L1Schedule
from twellctl.training.layer_states import LayerStates, comparable
from twellctl.training.memory import is_to_be_sharded
from twellctl.training.optimizer import default_rate, make_optimizer
from twellctl.training.priced_gates import PricedGates
from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe
from twellctl.training.sharded_trainer import ShardedTrainer
from twellctl.training.sharded_weights import load_sharded
from twellctl.training.sparsity import FfnPenalty
from twellctl.training.teacher import Teacher
from twellctl.training.trainer import SparseTrainer


def micro_batch(recipe: Recipe, num_processes: int) -> tuple[int, int]:
    """(blocks a process holds at once, how many times it does so in a step).

    As many at once as divide its share of a step, at most `micro_batch_size`.
    """
    per_process = recipe.batch_size // num_processes
    if recipe.batch_size % num_processes:
        raise UsageError(
            f"batch-size must be a multiple of {num_processes} processes, got {recipe.batch_size}"
        )
    most = min(recipe.micro_batch_size, per_process)
    micro = max(n for n in range(1, most + 1) if per_process % n == 0)
    return micro, per_process // micro


def steps_of(recipe: Recipe, num_blocks: float) -> int:
    """How many steps a run on a text of `num_blocks` takes."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    if recipe.max_tokens is not None:
        return max(1, round(recipe.max_tokens / recipe.step_tokens))
    return max(1, math.floor(recipe.epochs * num_blocks / recipe.batch_size))


def trainer_arguments(
    recipe: Recipe, run: Path, num_blocks: int, has_eval: bool
) -> TrainingArguments:
    """`run` is where checkpoints go; `num_blocks` is how many there are to train on."""
    micro, accumulation = micro_batch(recipe, PartialState().num_processes)
    num_steps = steps_of(recipe, num_blocks)
    on_gpu = torch.cuda.is_available()
    warmup = recipe.warmup_steps if recipe.warmup_steps >= 1 else recipe.warmup_steps * num_steps
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=num_steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,  # a batch is small, and one more copy of it is one more wait
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_scheduler.replace("constant", "constant_with_warmup"),
        warmup_steps=round(warmup),
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        bf16=on_gpu and recipe.param_dtype == "float32",
        use_cpu=not on_gpu,
        save_strategy="steps" if recipe.save_steps else "no",
        save_steps=recipe.save_steps or 500,
        eval_strategy="steps" if has_eval and recipe.eval_steps else "no",
        eval_steps=recipe.eval_steps or None,
        logging_steps=recipe.logging_steps,
        logging_nan_inf_filter=False,  # it waits for the device in every step; ours looks once
        report_to=recipe.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        average_tokens_across_devices=False,
    )
    # else the Trainer cuts each batch over all GPUs that a lone process sees (DataParallel)
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def for_model(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """The recipe with what it leaves open: length of blocks, learning rate, penalty, compile."""
    if checkpoint.silu_form and any(map(stays_silu, checkpoint.silu_form["sharpness"])):
        raise TwellError(f"{checkpoint.name} has neurons that stay SiLU, which no recipe trains")
    longest = checkpoint.context
    if recipe.seq_len is not None and longest and recipe.seq_len > longest:
        raise UsageError(f"seq-len must be <= {longest}, the model's context, got {recipe.seq_len}")
    penalty = recipe.penalty or ("l1" if recipe.l1_schedule == "constant" else "count")
    if penalty == "l1" and checkpoint.map_neurons:
        raise UsageError(
            "--penalty l1 would price the map of a fitted model, too: give --penalty count, or a "
            "model that was converted without --data"
        )
    return dataclasses.replace(
        recipe,
        compile=_compiles(recipe) if recipe.compile is None else recipe.compile,
        penalty=penalty,
        seq_len=recipe.seq_len or min(1024, longest or 1024),
        learning_rate=recipe.learning_rate or default_rate(checkpoint),
    )


def _compiles(recipe: Recipe) -> bool:
    return torch.cuda.is_available() and not recipe.lora_rank


def _captures(recipe: Recipe) -> bool:
    """Whether steps are replayed as CUDA graphs: what they do may not change from step to step."""
    fixed = recipe.penalty == "count" and not recipe.gradient_checkpointing
    return bool(recipe.compile) and fixed and _compiles(recipe)


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
    sharded = is_to_be_sharded(checkpoint, recipe)
    model = _student(checkpoint, recipe, sharded)
    progress.doing("looking at what the layers read")
    penalty = _penalty(model, recipe, train, checkpoint.map_neurons)
    if recipe.gradient_checkpointing:
        checkpoint_activations(model)
    model.get_input_embeddings().register_forward_hook(in_autocast_dtype)
    arguments = trainer_arguments(recipe, run, len(train), held_out is not None)
    _note_what_is_slow(recipe, arguments, progress)
    taught_by = _teacher(teacher, recipe, sharded)
    target = None if recipe.l1_schedule == "constant" else recipe.density
    trainer = (ShardedTrainer if sharded else SparseTrainer)(
        penalty=penalty,
        schedule=L1Schedule(recipe.l1, target, arguments.max_steps),
        teacher=taught_by,
        teacher_weight=recipe.teacher_weight,
        states=_states(model, taught_by, recipe),
        compiled=bool(recipe.compile),
        captures=_captures(recipe) and not sharded,
        note=progress.note,
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        optimizers=(make_optimizer(model, penalty.gates, arguments, recipe.optimizer), None),
    )
    if recipe.compile:
        # a compiled layer that is recomputed for the backward pass may not say what fired
        parts = penalty.ffns if recipe.gradient_checkpointing else ffn_layers(model)
        _compile([*parts, *(ffn_layers(taught_by) if taught_by else [])])
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(progress.callback(trainer, recipe, checkpoint.own_neurons))
    return trainer


def _teacher(teacher: Teacher | None, recipe: Recipe, sharded: bool) -> PreTrainedModel | None:
    """The teacher's model, loaded, if there is a teacher."""
    model = None if teacher is None else teacher.load(sharded)
    if model is not None:
        without_mask(model, recipe.block_tokens)
    return model


def _states(
    model: PreTrainedModel, taught_by: PreTrainedModel | None, recipe: Recipe
) -> LayerStates | None:
    """What holds the states of layers to the teacher's, where that is wanted and they compare."""
    if taught_by is None or not recipe.state_weight or not comparable(model, taught_by):
        return None
    return LayerStates(model, taught_by, recipe.state_weight)


def _compile(parts: list[torch.nn.Module]) -> None:
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False)


def _student(checkpoint: Checkpoint, recipe: Recipe, sharded: bool) -> PreTrainedModel:
    """The model to train, and what of it is trained."""
    torch.manual_seed(recipe.seed)
    dtype = getattr(torch, recipe.param_dtype)
    if sharded:
        model = load_sharded(checkpoint, default_device(), dtype)
    else:
        model = load_model(checkpoint, dtype=dtype)
    without_mask(model, recipe.block_tokens)
    model.config.use_cache = False
    return _with_lora(model, recipe) if recipe.lora_rank else model.requires_grad_(True)


def _with_lora(model: PreTrainedModel, recipe: Recipe) -> Any:
    """Adapters on the layers' attention; on the FFN too, or the FFN in full.

    `merge_and_unload` takes them in again.
    """
    from peft import LoraConfig, get_peft_model

    inside_ffn = {id(module) for ffn in gated_ffns(model) for module in ffn.modules()}
    ffn_linears: set[str] = set()
    others: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            (ffn_linears if id(module) in inside_ffn else others).add(name.rpartition(".")[2])
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        target_modules=sorted(others | ffn_linears if recipe.lora_ffn else others),
        modules_to_save=None if recipe.lora_ffn else sorted(ffn_linears),
        task_type="CAUSAL_LM",
    )
    if recipe.gradient_checkpointing:
        model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own calls of transformers
        return get_peft_model(model, config)


def _note_what_is_slow(recipe: Recipe, arguments: TrainingArguments, progress: Progress) -> None:
    num_gpus = torch.cuda.device_count()
    if arguments.world_size == 1 < num_gpus:
        progress.note(
            f"on one of {num_gpus} GPUs; on all: torchrun --nproc-per-node {num_gpus} -m twellctl "
            "finetune ..."
        )
    micro, parts = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if micro < min(recipe.micro_batch_size, micro * parts):
        progress.note(
            f"{micro} blocks at once, for micro-batch-size {recipe.micro_batch_size}: they must "
            f"divide the {micro * parts} that a process takes in a step"
        )


def _penalty(
    model: PreTrainedModel, recipe: Recipe, train: Blocks, map_neurons: int
) -> PricedGates | FfnPenalty:
    """The price of what fires; prices by count look at what the layers read of `train`."""
    if recipe.penalty == "count":
        gates = PricedGates(model, map_neurons)
        device = model.device
        batches = (train[i]["input_ids"][None].to(device) for i in range(len(train)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            gates.find_directions(model.train(), batches)
        return gates
    return FfnPenalty(model, compiled=bool(recipe.compile))
