"""What a fine-tuning run shows: a live panel on a terminal, a line now and then elsewhere."""

import contextlib
import time
from typing import Any

from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from transformers import TrainerCallback

from twellctl import ui
from twellctl.recipe import Recipe


class Progress:
    """The display of one run, on stderr; `silent` shows nothing (the other processes of a run)."""

    def __init__(self, silent: bool = False):
        self.silent = silent
        self._live: Live | None = None

    def reading(self) -> contextlib.AbstractContextManager:
        """Something that moves on a terminal while text is read and tokenised."""
        if self.silent or not ui.stderr.is_terminal:
            return contextlib.nullcontext()
        return ui.stderr.status("reading and tokenising the text")

    def first_line(
        self, recipe: Recipe, num_steps: int, resumed_at: int, has_teacher: bool
    ) -> None:
        """Say what kind of run this is."""
        if recipe.l1_schedule == "constant":
            l1 = f"l1 held constant at {recipe.l1:g}"
        else:
            l1 = (
                f"l1 starts at {recipe.l1:g} and is steered until {recipe.target_sparsity:.1%} of "
                "the neurons are zero"
            )
        teacher = f"teacher share {recipe.teacher_weight:g}" if has_teacher else "no teacher"
        rate = f"learning rate {recipe.learning_rate:.3g}"
        start = f"resumed at step {resumed_at} of " if resumed_at else ""
        steps = f"{start}{num_steps} steps of {recipe.batch_size * recipe.seq_len} tokens"
        self.note(f"{l1}; {teacher}; {rate}; {steps}")

    def note(self, text: str) -> None:
        """Say something in a line of its own."""
        if not self.silent:
            ui.note(text)

    def callback(self, trainer: Any, recipe: Recipe, num_neurons: int) -> TrainerCallback:
        """The hook into the Trainer that feeds this display."""
        return _Show(self, trainer, recipe.batch_size * recipe.seq_len, num_neurons)

    def show(self, figures: dict[str, str], step: int, num_steps: int, *, line: bool) -> None:
        """Show the figures of a step; `line` is true when a log line is due."""
        if self.silent:
            return
        if ui.stderr.is_terminal:
            if self._live is None:
                self._bar = Bar(
                    TextColumn("step {task.completed} of {task.total}"),
                    BarColumn(),
                    TaskProgressColumn(),
                    TimeRemainingColumn(),
                )
                self._task = self._bar.add_task("", total=num_steps)
                self._live = Live(console=ui.stderr, refresh_per_second=4)
                self._live.start()
            self._bar.update(self._task, completed=step)
            self._live.update(_panel(self._bar, figures))
        elif line:
            ui.note(
                f"step {step}/{num_steps}  " + "  ".join(f"{k} {v}" for k, v in figures.items())
            )

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Show(TrainerCallback):
    def __init__(self, progress: Progress, trainer: Any, step_tokens: int, num_neurons: int):
        self.progress, self.trainer = progress, trainer
        self.step_tokens, self.num_neurons = step_tokens, num_neurons
        self.began: tuple[float, int] | None = None
        self.held_out: dict[str, str] = {}

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began is None:
            self.began = (time.monotonic(), state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        started, first = self.began
        rate = (state.global_step - first) / max(time.monotonic() - started, 1e-9)
        report = self.trainer.report
        figures = {
            "tokens/s": f"{rate * self.step_tokens:.0f}",
            "eta": f"{(state.max_steps - state.global_step) / rate:.0f}s",
            "loss": f"{report.cross_entropy:.4f}",
            "penalty": f"{report.penalty:.4g}",
            "l1": f"{report.l1:.3g}",
            "nnz": f"{report.density * self.num_neurons:.1f}",
            "density": f"{report.density:.2%}",
        }
        step = state.global_step
        line = step % args.logging_steps == 0 or step == state.max_steps
        self.progress.show(figures | self.held_out, step, state.max_steps, line=line)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.held_out = {
            "held-out": f"{metrics['eval_loss']:.4f} at {metrics['eval_density']:.2%}",
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
