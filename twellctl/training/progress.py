"""What a fine-tuning run reports while it works."""

from typing import Any

from transformers import TrainerCallback

from twellctl.training.recipe import Recipe


class Progress:
    """Shows nothing; `screens.run.RunScreen` shows a run on stderr."""

    def doing(self, text: str) -> None:
        """Receives what lasts, while no step can be shown."""

    def note(self, text: str) -> None:
        """Receives something for a line of its own."""

    def fail(self, text: str) -> None:
        """Receives why this process ends, where no error can be raised."""

    def stopping(self) -> None:
        """Answers a first Ctrl-C, in the middle of a step."""

    def first_line(
        self, recipe: Recipe, num_steps: int, num_blocks: int, resumed_at: int, has_teacher: bool
    ) -> None:
        """Receives what kind of run this is; `num_blocks` are there to train on."""

    def callback(self, trainer: Any, recipe: Recipe, num_neurons: int) -> TrainerCallback:
        """The hook into the Trainer that feeds this display."""
        return TrainerCallback()

    def stop(self) -> None:
        """The run is over."""

    def of_another(self) -> "Progress":
        """The display of a process that is not the first."""
        return Progress()
