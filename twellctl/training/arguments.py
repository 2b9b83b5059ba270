"""A recipe in the words of the Hugging Face Trainer."""

import math
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from twellctl.errors import UsageError
from twellctl.training.recipe import Recipe


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
