"""A small run of finetune, one that gets Ctrl-C, and what to compare: shared by its tests."""

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe, resolve_recipe

SMALL = {
    "seq_len": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "max_steps": 12,
    "l1": 1e-3,
    "learning_rate": 3e-3,
    "eval_blocks": 4,
    "eval_steps": 5,
    "logging_steps": 1,
    "save_steps": 0,
}


def small(text_file: Path, **changes) -> Recipe:
    return resolve_recipe(None, SMALL | {"data": [str(text_file)]} | changes)


class Watching(Progress):
    """Calls `begun(trainer)` before the first step, and `step(trainer, state)` as each begins."""

    def __init__(self, begun=lambda trainer: None, step=lambda trainer, state: None):
        self.begun, self.step = begun, step

    def callback(self, trainer, recipe, num_neurons):
        self.begun(trainer)
        step = self.step

        class Hook(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                step(trainer, state)

        return Hook()


class InterruptAt(Watching):
    """Sends this process Ctrl-C when a step ends."""

    def __init__(self, at: int):
        def step(trainer, state):
            if state.global_step == at - 1:
                os.kill(os.getpid(), signal.SIGINT)

        super().__init__(step=step)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(left: Path, right: Path) -> None:
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
