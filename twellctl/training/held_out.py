"""What the held-out losses of a run say of it: whether it is lost, and whether it is good still."""

from collections.abc import Sequence
from dataclasses import dataclass

LOST = 3  # so many evaluations in a row above the first end a run,
RECOVERS = 0.1  # unless they make up this share of what they are above it
SAME = 1e-3  # share of a loss within which another one is no worse: above all rounding


@dataclass(frozen=True)
class HeldOutLosses:
    """`losses`: (step, loss) of all evaluations, from the one before the first step on.

    `leeway`: how far above the first one the others may stay.
    """

    losses: Sequence[tuple[int, float]]
    leeway: float

    def is_good_at(self, step: int) -> bool:
        """Whether the last evaluation was at `step` or since, and not as bad as in a lost run."""
        last_step, last = self.losses[-1]
        return last <= self._worst and step <= last_step

    def lost_since(self, settled: float) -> int | None:
        """The step since which evaluation after evaluation is far from the first; None: not lost.

        Evaluations up to the step `settled` do not count, and a run is not lost that is making up
        what it has lost.
        """
        last = [(step, loss) for step, loss in self.losses if step > settled][-LOST:]
        if len(last) < LOST or any(loss <= self._worst for _, loss in last):
            return None
        (since, before), (_, now) = last[0], last[-1]
        return None if before - now >= RECOVERS * (before - self._worst) else since

    @property
    def _worst(self) -> float:
        return self.losses[0][1] * (1 + SAME) + self.leeway
