"""What torchrun or `accelerate launch` asks of a run, refused where it cannot work."""

import dataclasses
import os

import torch

from twellctl.errors import TwellError, UsageError, shown
from twellctl.training.recipe import Recipe, check_report_to


def checked_recipe(recipe: Recipe) -> Recipe:
    """`recipe` `as_launched`; `TwellError` for one that no run can follow here, of any model."""
    if not recipe.data:
        raise UsageError("no text to train on: give --data FILE")
    recipe = as_launched(recipe)
    check_report_to(recipe.report_to)
    return recipe


def as_launched(recipe: Recipe) -> Recipe:
    """`recipe` with what the launcher asks for; `TwellError` before any process has met another.

    An accelerate config with FSDP2 is `--shard always`.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        _check_number(name)
    _check_num_processes()
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        _check_fsdp()
        del os.environ["ACCELERATE_USE_FSDP"]  # else accelerate shards, too
        if recipe.shard == "auto":
            recipe = dataclasses.replace(recipe, shard="always")
    if recipe.lora_rank and recipe.shard == "always":
        raise UsageError("LoRA is trained in replicas: leave out --lora-rank or --shard")
    return recipe


def _check_number(name: str) -> None:
    value = os.environ.get(name, "0")
    try:
        int(value)
    except ValueError:
        raise TwellError(
            f"{name} in the environment must be a whole number, got {shown(value)}: unset it, or "
            "start with torchrun"
        ) from None


def _check_num_processes() -> None:
    here, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if torch.cuda.is_available() and here > num_gpus:
        raise TwellError(
            f"{here} processes were started on a machine with {num_gpus} GPUs: start one for each, "
            f"torchrun --nproc-per-node {num_gpus}"
        )


def _check_fsdp() -> None:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise TwellError(
            f"the accelerate config says fsdp_version {version}: say 2, or start with torchrun"
        )
    for name, refused in (
        ("FORWARD_PREFETCH", "it is always on"),
        ("BACKWARD_PREFETCH", "it is always on"),
        ("OFFLOAD_PARAMS", "nothing is kept in host memory"),
        ("ACTIVATION_CHECKPOINTING", "give --gradient-checkpointing"),
    ):
        value = os.environ.get(f"FSDP_{name}", "false")
        if value.lower() not in ("false", "no_prefetch"):
            raise TwellError(
                f"the accelerate config says fsdp_{name.lower()} {value}: leave it out ({refused})"
            )
