"""Rounds of a batch: each row reads its next input and drafts of what follows, and keeps as many
tokens as are chosen.

A drafter proposes tokens; one pass of the model reads them; the choice (step_end.py) keeps the
token after the row's input, and each further one as long as the draft before it was chosen, too.
Without a drafter a round is a step: it reads one token of each row and keeps one.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from twellctl.decoding.sampler import Field, Variant

if TYPE_CHECKING:
    from twellctl.decoding.weighing import Weights

NO_TOKEN = -1  # in a record: the chosen token's logit is NaN; kernels/decode/choose.cu knows it
NOT_KEPT = -2  # in a record: the token follows a draft that was not chosen


class Drafts(NamedTuple):
    """So many drafts for each row of a round, by this one of the batch's drafters."""

    num: int = 0
    drafter: int = 0


class Drafter(Protocol):
    """What proposes the tokens of a round. It may have passes of its own over the same cache."""

    name: str
    most_drafts: int  # of a row and round
    max_rows: int | None  # of a round with drafts; None: any number
    stand: Rows[Tensor]  # what the next drafts depend on, and rounds change

    def load(self, rows: Rows[list[int]]) -> None:
        """The tokens of each row, set anew; no round is under way. A list that was there before has
        grown by what its row has kept."""
        ...

    def follow(self, tokens: Tensor, positions: Tensor) -> None:
        """What a round reads, `[B, Q]` each, with drafts of whomever. No host reads."""
        ...

    def draft(
        self,
        fields: Tensor,
        tables: Tensor,
        count: int,
        variant: Variant,
        weights: "Weights | None",
    ) -> Tensor:
        """Tokens that may follow the input of each row, int32 `[B, count]`, 1 to `most_drafts`.

        `fields` int32 `[len(Field), B]`, `tables` int32 `[B, W]`, on the device, stay as they are;
        `variant` and `weights` as of the choice of what the model reads (step_end.py). No host
        reads.
        """
        ...


@dataclass(frozen=True)
class Round:
    """A round that was launched."""

    num_rows: int
    drafts: Drafts
    _records: Tensor
    # before it, if its time is asked for, and behind it
    _events: tuple[torch.cuda.Event | None, torch.cuda.Event | None] = (None, None)
    _seconds: float = 0.0  # without events

    @property
    def num_tokens(self) -> int:
        """That each row reads."""
        return 1 + self.drafts.num

    def read(self) -> np.ndarray:
        """Its records, int32 `[num_rows, num_tokens, width]`; waits for it. Valid for `in_flight`
        rounds."""
        if (end := self._events[1]) is not None:
            end.synchronize()
        return self._records.numpy()[: self.num_rows, : self.num_tokens]

    @property
    def seconds(self) -> float:
        """That the device took, of a round that was read."""
        begin, end = self._events
        return self._seconds if begin is None else begin.elapsed_time(end) / 1000


def inputs_of(fields: Tensor, drafts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens and positions `[B, Q]` that a round reads, as `Decoder.run` takes them.

    No row goes beyond its limit: near to it, it reads fewer of its `drafts` `[B, Q - 1]`.
    """
    first, position = fields[Field.TOKEN, :, None], fields[Field.POSITION, :, None]
    if drafts is None:
        return first, position
    tokens = torch.cat([first, drafts.int()], 1)
    Q = tokens.shape[1]
    wanted = (fields[Field.LIMIT, :, None] - position).clamp(0, Q - 1)  # drafts of each row
    place = wanted + torch.arange(1 - Q, 1, dtype=torch.int32, device=tokens.device)
    tokens = tokens.gather(1, place.clamp(min=0).long())
    return tokens, (position + place).masked_fill_(place < 0, -1)


def kept(tokens: Tensor, positions: Tensor, chosen: Tensor, is_nan: Tensor) -> Tensor:
    """Which of the `chosen` tokens are kept, bool `[B, Q]`, as all others.

    `chosen[:, j]` follows `tokens[:, j]`.
    """
    is_token = positions >= 0
    agrees = (chosen[:, :-1] == tokens[:, 1:]) & ~is_nan[:, :-1] | ~is_token[:, :-1]
    agrees = torch.cat([torch.ones_like(is_token[:, :1]), agrees], 1)
    return is_token & (agrees.cumprod(1) > 0)


def records_of(rounds: Rows[Round]) -> np.ndarray:
    """Of rounds of the same rows, which follow one another: int32 `[num_rows, tokens, width]`."""
    rounds[-1].read()
    found = [one.read() for one in rounds]
    return found[0] if len(found) == 1 else np.concatenate(found, 1)


def chosen_in(records: np.ndarray) -> list[list[int]]:
    """The tokens of each row that were kept, in their order; `NO_TOKEN` among them."""
    chosen = records[..., 0].tolist()
    if records.shape[1] == 1:
        return chosen
    return [[token for token in of_row if token != NOT_KEPT] for of_row in chosen]
