"""What a run does at the end of each step, and when it is interrupted."""

import signal
import threading
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from twellctl.training.trainer import SparseTrainer


class NoStepLeft(Exception):
    """A run was resumed after its last step, where transformers would train one step more."""


class SparsityCallback(TrainerCallback):
    """Ends each step, marks complete checkpoints, and turns Ctrl-C into a checkpoint and a stop."""

    def __init__(self, trainer: SparseTrainer, stopping: Callable[[], None] = lambda: None):
        """`stopping` is called, from a signal handler, when the first signal comes."""
        self.trainer, self.stopping = trainer, stopping
        self.asked_to_stop = self.in_a_hurry = False
        self.stopped_at: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:  # the checkpoint is loaded by now
            raise NoStepLeft
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._ask)

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.finish_step(self.asked_to_stop) and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
        if state.global_step == state.max_steps:
            control.should_save = True  # so that a failure to write the result loses nothing

    def on_save(self, args, state, control, **kwargs):
        self.trainer.checkpoint_saved()

    def restore_signals(self) -> None:
        """Put back the signal handlers that were there before training."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _ask(self, number, frame):
        # a launcher hands the signal on to processes that already had it: there, twice is once
        if self.asked_to_stop and self.trainer.args.world_size == 1:
            self.in_a_hurry = True
            raise KeyboardInterrupt
        if not self.asked_to_stop:
            self.stopping()
        self.asked_to_stop = True
