"""What a fine-tuning run shows: a live panel on a terminal, a line now and then elsewhere."""

import threading
import time
from typing import Any

from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from transformers import TrainerCallback

from twellctl.screens import ui
from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe


class RunScreen(Progress):
    """The display of one run, on stderr; `checkpoint` is what an interrupted one leaves."""

    def __init__(self, checkpoint: str = "a checkpoint will be kept"):
        self.checkpoint = checkpoint
        self._live: Live | None = None

    def doing(self, text: str) -> None:
        ui.doing(text)

    def note(self, text: str) -> None:
        ui.note(text)

    def fail(self, text: str) -> None:
        ui.fail(text)

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
        return _Show(self, trainer, recipe.step_tokens, num_neurons)

    def show(
        self, step: int, num_steps: int, left: str, figures: dict[str, str], *, line: bool
    ) -> None:
        """Show the figures of a step; `left` is the time to go, `line` says that one is due."""
        if ui.stderr.is_terminal:
            if self._live is None:
                ui.activity.over()
                self._bar = Bar(
                    TextColumn("step {task.completed} of {task.total}"),
                    BarColumn(),
                    TaskProgressColumn(),
                    TextColumn("{task.fields[left]}"),
                )
                self._task = self._bar.add_task("", total=num_steps, left=left)
                self._live = Live(console=ui.stderr, refresh_per_second=4)
                self._live.start()
            self._bar.update(self._task, completed=step, left=left)
            self._live.update(_panel(self._bar, figures))
        elif line:
            ui.activity.over()
            shown = [f"step {step}/{num_steps}", left, *(f"{k} {v}" for k, v in figures.items())]
            ui.note("  ".join(filter(None, shown)))

    def stop(self) -> None:
        ui.activity.over()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def of_another(self) -> Progress:
        return _Errors()


class _Errors(Progress):
    """Shows why a process ends, and nothing else."""

    def fail(self, text: str) -> None:
        ui.fail(text)


class _Show(TrainerCallback):
    def __init__(self, progress: RunScreen, trainer: Any, step_tokens: int, num_neurons: int):
        self.progress, self.trainer = progress, trainer
        self.step_tokens, self.num_neurons = step_tokens, num_neurons
        self.began: tuple[float, int] | None = None
        self.last_line = 0.0
        self.figures: dict[str, str] = {}
        self.held_out: dict[str, str] = {}
        self.left = ""

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began is None:
            self.began = (time.monotonic(), state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        now, step, (started, first) = time.monotonic(), state.global_step, self.began
        rate = (step - first) / max(now - started, 1e-9)
        self.left = f"{ui.duration((state.max_steps - step) / rate)} left"
        self.figures = self._figures(rate)
        line = step % args.logging_steps == 0 or now - self.last_line > ui.LONGEST_SILENCE
        line = line or step == state.max_steps
        self.last_line = now if line else self.last_line
        self._show(state, self.figures, line)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        held_out = f"{metrics['eval_loss']:.4f} at {metrics['eval_density']:.2%}"
        if ui.stderr.is_terminal:  # a panel shows it for long, so it says of which step it is
            self.held_out = {"held-out": f"{held_out} (step {state.global_step})"}
            self._show(state, self.figures, False)
        else:
            self._show(state, {"held-out": held_out}, True)

    def _show(self, state: Any, figures: dict[str, str], line: bool) -> None:
        figures = figures | self.held_out
        self.progress.show(state.global_step, state.max_steps, self.left, figures, line=line)

    def _figures(self, rate: float) -> dict[str, str]:
        report = self.trainer.report
        return {
            "tokens/s": f"{rate * self.step_tokens:.0f}",
            "loss": f"{report.cross_entropy:.4f}",
            "price": f"{report.l1:.3g}",
            "neurons": f"{report.density * self.num_neurons:.1f}",
            "density": f"{report.density:.2%}",
        }


def _panel(bar: Bar, figures: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name in figures:
        grid.add_column(name)
    grid.add_row(*figures, style="dim")
    grid.add_row(*figures.values())
    outer = Table.grid()
    outer.add_row(bar)
    outer.add_row(grid)
    return outer
