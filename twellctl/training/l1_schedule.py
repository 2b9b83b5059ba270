"""How the L1 coefficient moves: held constant, or steered until a target density is met."""

import math
from dataclasses import dataclass

RAMP = 0.15  # share of the run over which the goal falls from the first density to the target
RAMP_STEPS = 100  # but not in fewer steps,
MOST_RAMP = 0.3  # nor over more of the run
PROPORTIONAL = 3.0
INTEGRAL = 100.0  # a run; both gains were tuned on the model of tests/test_penalty.py
SMOOTHING = 0.01  # a run: the time over which measured density is averaged
MAX_ERROR = 1.5  # in log density: more error does not push harder
MAX_STEP = 0.1  # the most that log l1 moves in one step of a run of 100 or more
MAX_L1 = 10.0  # where the penalty sums over neurons


@dataclass
class L1Schedule:
    """A PI controller on log l1 against log density; without a `target` nothing moves.

    The goal falls geometrically from the density first seen to `target` over the first `ramp` of
    the run and stays there. The integral moves in proportion to the learning rate: a model that
    hardly learns cannot answer. All it does depends on its fields and `update`'s arguments alone,
    so a resumed run repeats it exactly.
    """

    l1: float
    target: float | None  # density
    num_steps: int
    ceiling: float = MAX_L1
    log_integral: float | None = None
    log_density: float | None = None
    log_first: float | None = None

    def update(self, density: float, progress: float, learning_rate_share: float) -> None:
        """After a step: its density, the share of the run done, learning rate over its peak."""
        if self.target is None:
            return
        seen = math.log(max(density, 1e-6))
        if self.log_integral is None or self.log_density is None or self.log_first is None:
            self.log_integral, self.log_density, self.log_first = math.log(self.l1), seen, seen
        weight = min(1.0, 1 / (SMOOTHING * self.num_steps))
        self.log_density += weight * (seen - self.log_density)
        goal = math.log(self.target)
        if self.log_first > goal and progress < self.ramp:
            goal = self.log_first + (goal - self.log_first) * progress / self.ramp
        error = max(-MAX_ERROR, min(MAX_ERROR, self.log_density - goal))
        before = math.log(self.l1)
        wanted = self.log_integral + PROPORTIONAL * error
        most = MAX_STEP * max(1, 100 / self.num_steps)
        moved = before + max(-most, min(most, wanted - before))
        if abs(wanted - before) <= most or (wanted < before) == (error > 0):
            # not while the coefficient itself still has to catch up: the integral would wind up
            self.log_integral += INTEGRAL / self.num_steps * learning_rate_share * error
            self.log_integral = min(self.log_integral, math.log(self.ceiling))
        self.l1 = math.exp(min(moved, math.log(self.ceiling)))

    @property
    def ramp(self) -> float:
        """Share of the run in which the goal falls."""
        return min(MOST_RAMP, max(RAMP, RAMP_STEPS / self.num_steps))
