"""The history of a run: `metrics.jsonl`, a JSON object for each step that was logged or judged."""

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from twellctl.errors import TwellError
from twellctl.files.strict_json import parse_json, to_json
from twellctl.models.carried import METRICS_FILE
from twellctl.report.charts import Curves, Line, Panel
from twellctl.training.trainer import SparseTrainer


class History(TrainerCallback):
    """Writes as the run goes. A resumed run goes on after the step of its checkpoint.

    `loss`, `teacher_kl` and the densities are those of the step's own text; `held_out`,
    `held_out_kl` (with a teacher) and `held_out_density` are there where the step was followed by
    an evaluation. `price` is the coefficient of the penalty, `seconds` have passed since the run
    began, pauses not counted.
    """

    def __init__(self, trainer: SparseTrainer, run: Path, step_tokens: int):
        self.trainer, self.path, self.step_tokens = trainer, run / METRICS_FILE, step_tokens
        self.last: dict[str, Any] = {}
        self._at = 0  # where the last row begins
        self._began = time.monotonic()
        self._since = (self._began, 0)  # when, and at which step, the rate began to be counted

    def go_on(self, step: int) -> None:
        """Keep what an earlier process wrote up to `step`, the one it is resumed at."""
        if not self.trainer.is_world_process_zero():
            return
        rows = _rows(self.path) if step else []
        kept = [row for row in rows if row["step"] <= step]
        lines = [to_json(row) + "\n" for row in kept]
        self.path.write_text("".join(lines), encoding="utf-8")
        if kept:
            self.last, self._at = kept[-1], sum(map(len, map(str.encode, lines[:-1])))
            self._began -= self.last.get("seconds", 0)

    def on_train_begin(self, args, state, control, **kwargs):
        self._since = (time.monotonic(), state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}):
            return
        report, (since, first) = self.trainer.report, self._since
        tokens, seconds = (state.global_step - first) * self.step_tokens, time.monotonic() - since
        self._write(
            state,
            loss=report.cross_entropy,
            teacher_kl=report.teacher_kl,
            density=report.density,
            density_by_layer=report.density_by_layer,
            price=report.l1,
            tokens_per_second=tokens / max(seconds, 1e-9),
            learning_rate=logs["learning_rate"],
        )

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        found = {"held_out": metrics["eval_loss"], "held_out_density": metrics["eval_density"]}
        if "eval_teacher_kl" in metrics:
            found["held_out_kl"] = metrics["eval_teacher_kl"]
        self._write(state, **found)

    def _write(self, state: Any, **figures: Any) -> None:
        """Add figures of this step to its row, which is the last one, or begin it."""
        self._since = (time.monotonic(), state.global_step)
        if not state.is_world_process_zero:
            return
        step = state.global_step
        with self.path.open("r+b") as file:
            if self.last.get("step") != step:
                self._at, self.last = file.seek(0, 2), {"step": step}
            seconds = round(time.monotonic() - self._began, 3)
            self.last |= {"tokens": step * self.step_tokens, "seconds": seconds} | figures
            file.seek(self._at)
            file.write(f"{to_json(self.last)}\n".encode())
            file.truncate()


def chart_of(path: Path, title: str, wanted: float | None) -> Curves:
    """Losses, densities and the price, step by step, of the history in `path`.

    `wanted` is the density that was asked for. Held-out figures are of fewer steps.
    """
    rows = _rows(path)

    def lines(**named: str) -> list[Line]:
        """Of figures by what they are of; one that no row has is left out."""
        found = {of: [row.get(figure) for row in rows] for of, figure in named.items()}
        return [Line(of.replace("_", " "), y) for of, y in found.items() if set(y) != {None}]

    steps = [row["step"] for row in rows]
    losses = lines(this_text="loss", held_out="held_out")
    differ = lines(this_text="teacher_kl", held_out="held_out_kl")
    fires = lines(this_text="density", held_out="held_out_density")
    price = lines(price="price")
    drawn = (
        Panel("Cross-entropy, nats a token", "step", steps, losses, False, from_zero=False),
        Panel("KL to the teacher, nats a token", "step", steps, differ, False),
        Panel("Neurons that fire", "step", steps, fires, wanted=wanted),
        Panel("Price of a neuron that fires", "step", steps, price, False),
    )
    return Curves(title, [panel for panel in drawn if panel.lines])


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows that were written; a last line that was cut short is left out."""
    if not path.is_file():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    try:
        rows = [parse_json(line) for line in whole]
        if all(row["step"] + row.get("seconds", 0) >= 0 for row in rows):
            return rows
    except (ValueError, TypeError, KeyError):
        pass
    raise TwellError(f"{path} is damaged: remove it, and --resume without what it says")
