"""What became of drafts, by who made them. No torch."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_DRAFTS = 7  # with the row's input they are an octet, which the kernels read like one token


class Draft(NamedTuple):
    """What a token has to do with the drafts of its round."""

    drafter: str
    read: int  # how many the round read, if this is its first token; else 0
    kept: bool  # whether this token is one of them


@dataclass
class Drafted:
    """`passes` of a model over a sequence in rounds; by drafter, the drafts that these `read`, and
    those of them that they `kept`."""

    passes: int = 0
    read: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    @property
    def num_read(self) -> int:
        return self.read.total()

    @property
    def num_kept(self) -> int:
        return self.kept.total()

    @property
    def tokens_a_pass(self) -> float | None:
        """None where no draft was read."""
        return 1 + self.num_kept / self.passes if self.num_read else None

    def add(self, drafter: str, read: int, kept: int) -> None:
        """So many drafts more."""
        if read:
            self.read[drafter] += read
            self.kept[drafter] += kept

    def see(self, draft: Draft | None) -> None:
        """One token more, after the first; None: its round had no drafts."""
        if draft is not None:
            self.add(draft.drafter, draft.read, 0)
            self.kept[draft.drafter] += draft.kept
        self.passes += draft is None or not draft.kept

    def since(self, before: "Drafted") -> "Drafted":
        """What came after `before`."""
        return Drafted(
            self.passes - before.passes, self.read - before.read, self.kept - before.kept
        )

    def copy(self) -> "Drafted":
        return Drafted(self.passes, self.read.copy(), self.kept.copy())

    def __str__(self) -> str:
        """Like "3.62 tokens a pass, kept 25/28 of fit, 5/7 of lookup"; nothing without drafts."""
        if not self.num_read:
            return ""
        kept = (f"{self.kept[name]}/{read} of {name}" for name, read in self.read.items())
        return f"{self.tokens_a_pass:.2f} tokens a pass, kept {', '.join(kept)}"
