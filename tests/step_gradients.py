"""One optimizer step of finetune, in one process or in each of several: its gradients."""

from pathlib import Path

import torch
from transformers import TrainerCallback

from twellctl.finetune import finetune
from twellctl.training.progress import Progress
from twellctl.training.recipe import resolve_recipe

SETTINGS = {
    "batch_size": 8,
    "seq_len": 32,
    "eval_fraction": 0.0,
    "max_steps": 1,
    "l1": 0.5,
    "l1_schedule": "constant",
    "teacher": "none",
    "max_grad_norm": 1e9,
    "save_steps": 0,
}


class Capture(Progress):
    """Saves gradients and the step's report instead of showing them."""

    def __init__(self, path: Path):
        self.path = path

    def callback(self, trainer, recipe, num_neurons):
        capture = self

        class Hook(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                capture.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

            def on_step_end(self, args, state, control, **kwargs):
                saved = {"gradients": capture.gradients, "report": vars(trainer.report)}
                if state.is_world_process_zero:
                    torch.save(saved, capture.path)

        return Hook()


def one_step(model, text, out, micro_batch, checkpointing, gradients):
    """Saves the gradients and the step's report to the file `gradients`."""
    settings = SETTINGS | {
        "data": [str(text)],
        "micro_batch_size": micro_batch,
        "gradient_checkpointing": checkpointing,
    }
    progress = Capture(Path(gradients))
    finetune(model, out, resolve_recipe(None, settings), progress=progress, overwrite=True)
