"""Drafts out of the text itself: what followed its last tokens the last time that they stood in it.

Edits of a given text, quotations and code repeat long stretches. Looking for them takes no pass of
a model: the device, where the rows' tokens lie, compares each place of a row with its end. The host
looks for the same in what it has read, and so knows how often such drafts would have been right,
also of rounds that had others.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.weighing import Weights

MOST_LOOKED_UP = 15  # drafts of a row and round: with its input they are two octets
_LONGEST, _SHORTEST = 4, 2  # tokens in a row that stood there before, at most and at least
_COMPARED = 3  # by the host


class LookupDrafter:
    """A `Drafter` (rounds.py) that knows the tokens of `max_rows` rows, up to `context` of each."""

    name = "lookup"
    most_drafts = MOST_LOOKED_UP
    max_rows: int | None = None
    stand: Sequence[Tensor] = ()  # tokens behind a position may be anything

    def __init__(self, max_rows: int, context: int, device: torch.device):
        self._context = context
        # like keys and values: those behind a row's position may be anything. Column `context` is
        # for what is no token
        self._tokens = torch.zeros(max_rows, context + 1, dtype=torch.int32, device=device)
        self._loaded: list[list[int]] = []

    def load(self, rows: Sequence[list[int]]) -> None:
        before, self._loaded = self._loaded, list(rows)
        for row, tokens in enumerate(rows):
            if row >= len(before) or tokens is not before[row]:  # else it followed them
                self._tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    def follow(self, tokens: Tensor, positions: Tensor) -> None:
        places = torch.where(positions < 0, self._context, positions).long()
        self._tokens[: len(tokens)].scatter_(1, places, tokens)

    def draft(
        self,
        fields: Tensor,
        tables: Tensor,
        count: int,
        variant: Variant,
        weights: Weights | None,
    ) -> Tensor:
        position = fields[Field.POSITION, :, None].long()
        self.follow(fields[Field.TOKEN, :, None], position)
        seen = self._tokens[: fields.shape[1], : min(tables.shape[1] * PAGE, self._context)]
        best = _last_place(seen, position)
        # a stretch that reaches the position goes on from its beginning
        steps = torch.arange(count, device=seen.device) % (position - best)
        return seen.gather(1, best + 1 + steps)


def _last_place(seen: Tensor, position: Tensor) -> Tensor:
    """Where the tokens up to `position` `[B, 1]` stood before in `seen` `[B, C]`, int64 `[B, 1]`:
    the place of the longest stretch that is equal, of several the last. Without any the place
    before."""
    places = torch.arange(seen.shape[1], device=seen.device)
    equal = places < position
    length = torch.zeros_like(seen, dtype=torch.int64)
    for back in range(_LONGEST):
        own = seen.gather(1, (position - back).clamp(min=0))
        equal = equal & (places >= back) & (F.pad(seen, (back, 0))[:, : seen.shape[1]] == own)
        length += equal
    worth = torch.where(length >= _SHORTEST, length * seen.shape[1] + places, -1)
    found, best = worth.max(1, keepdim=True)
    return torch.where(found < 0, position - 1, best)


class Repeats:
    """What the host knows of a text's repetitions."""

    def __init__(self, tokens: Sequence[int]):
        self._last: tuple[int, ...] = ()
        self._following: dict[tuple[int, ...], int] = {}  # what came behind the last tokens
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> bool:
        """One more token of the text; whether it is what followed the last ones before."""
        said = self._following.get(self._last) == token
        if len(self._last) == _COMPARED:
            self._following[self._last] = token
        self._last = (*self._last, token)[-_COMPARED:]
        return said
