"""What a fine-tuning run shows: the last step on a terminal, a line now and then elsewhere."""

import threading
import time
from typing import Any

from transformers import TrainerCallback

from twellctl.screens import ui
from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe


class RunScreen(Progress):
    """The display of one run, on stderr; `checkpoint` is what an interrupted one leaves."""

    def __init__(self, checkpoint: str = "a checkpoint will be kept"):
        self.checkpoint = checkpoint

    doing, note, fail = staticmethod(ui.doing), staticmethod(ui.note), staticmethod(ui.fail)

    def stopping(self) -> None:
        text = f"stopping after this step; {self.checkpoint}; Ctrl-C once more stops now"
        # a signal handler must not wait for locks that the code it interrupted may hold
        threading.Thread(target=self.note, args=(text,)).start()

    def first_line(
        self, recipe: Recipe, num_steps: int, num_blocks: int, resumed_at: int, has_teacher: bool
    ) -> None:
        if recipe.l1_schedule == "constant":
            price = f"price held constant at {recipe.l1:g}"
        else:
            price = (
                f"price from {recipe.l1:g} on, steered until {recipe.density:.2%} of "
                "the neurons fire"
            )
        teacher = f"teacher share {recipe.teacher_weight:g}" if has_teacher else "no teacher"
        rate = f"learning rate {recipe.learning_rate:.3g}"
        start = f"resumed at step {resumed_at} of " if resumed_at else ""
        steps = f"{start}{num_steps} steps of {recipe.step_tokens} tokens"
        passes = num_steps * recipe.batch_size / num_blocks
        again = f", the text {passes:.1f} times" if passes > 1.05 else ""
        self.note(f"{price}; {teacher}; {rate}; {steps}{again}")

    def callback(self, trainer: Any, recipe: Recipe, num_neurons: int) -> TrainerCallback:
        return _Show(trainer, recipe.step_tokens, num_neurons)

    def stop(self) -> None:
        ui.activity.over()

    def of_another(self) -> Progress:
        return _Errors()


class _Errors(Progress):
    """Shows why a process ends, and nothing else."""

    fail = staticmethod(ui.fail)


class _Show(TrainerCallback):
    def __init__(self, trainer: Any, step_tokens: int, num_neurons: int):
        self.trainer, self.step_tokens, self.num_neurons = trainer, step_tokens, num_neurons
        self.began: tuple[float, int] | None = None
        self.last_line = 0.0
        self.left = ""

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began is None:
            self.began = (time.monotonic(), state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        now, step, (started, first) = time.monotonic(), state.global_step, self.began
        rate = (step - first) / max(now - started, 1e-9)
        self.left = f"{ui.duration((state.max_steps - step) / rate)} left"
        text = self._line(state, self._figures(rate))
        line = step % args.logging_steps == 0 or now - self.last_line > ui.LONGEST_SILENCE
        if ui.stderr.is_terminal:
            ui.doing(text)
        elif line or step == state.max_steps:
            self.last_line = now
            ui.activity.over()
            ui.note(text)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        held_out = f"{metrics['eval_loss']:.4f} at {metrics['eval_density']:.2%}"
        ui.activity.over()
        ui.note(self._line(state, {"held-out": held_out}))

    def _line(self, state: Any, figures: dict[str, str]) -> str:
        shown = (f"{name} {figure}" for name, figure in figures.items())
        step = f"step {state.global_step}/{state.max_steps}"
        return "  ".join(filter(None, (step, self.left, *shown)))

    def _figures(self, rate: float) -> dict[str, str]:
        report = self.trainer.report
        return {
            "tokens/s": f"{rate * self.step_tokens:.0f}",
            "loss": f"{report.cross_entropy:.4f}",
            "price": f"{report.l1:.3g}",
            "neurons": f"{report.density * self.num_neurons:.1f}",
            "density": f"{report.density:.2%}",
        }
