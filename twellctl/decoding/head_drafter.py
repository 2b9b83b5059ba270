"""A draft head as the drafter of rounds, over what the model's last layer has cached.

The head begins where the model has ended: with the state of the last token that was read and kept
(heads/head.py). It draws with the model's noise (sampler.py), under the same penalties: a draft is
kept where both have chosen alike, whatever the temperature. It drafts for one sequence at a time.

Where rows have changed, the state of the wrong token may be taken once: then a round's drafts are
poor.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from twellctl.decoding.decoder import Decoder
from twellctl.decoding.draft_end import DraftEnd
from twellctl.decoding.drafted import MOST_DRAFTS
from twellctl.decoding.lookup import MOST_LOOKED_UP
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.weighing import Weights
from twellctl.heads.head import DraftHead

_MOST_READ = 1 + MOST_LOOKED_UP  # tokens of a row, in rounds with drafts of whomever
_NOWHERE = -2  # no position


class HeadPass(Protocol):
    """A draft head over the cache of a decoder, one token of one row at a time. No host reads."""

    states: Tensor  # `[n, K]`: what the next token continues

    def begin(
        self, tables: Tensor, position: Tensor, count: int, states: Tensor, read: Tensor
    ) -> None:
        """`count` drafts behind the token at `position` `[1]` of a row, in the pages `tables` `[1,
        W]`. `states` are those of tokens at the positions `read`, int32 `[n]`, as `keep_states` has
        them: that token continues the first of the position before its own, or the first of all if
        there is none.
        """
        ...

    def __call__(self, number: int, token: Tensor, position: Tensor) -> Tensor:
        """Float32 logits `[1, V]` of the tokens that the head can guess, for draft `number`, behind
        `token`, int32 `[1]`, at its position `[1]`. `states` becomes that token's, `[1, K]`."""
        ...


class HeadDecoder(Decoder, Protocol):
    """A `Decoder` that can tell the states of the tokens it gave logits of."""

    def keep_states(self, most: int, lower: Sequence[int]) -> Tensor:
        """Where each pass from now on leaves the states of those tokens, row by row, the first
        `most`: the outputs of the `lower` layers, then the normalised state, `[most, (1 + n) K]`,
        which stays where it is."""
        ...

    def open_head(self, head: DraftHead) -> HeadPass: ...


class HeadDrafter:
    """A `Drafter` (rounds.py): what `head` guesses of the model that `decoder` drives."""

    name = "head"
    most_drafts = MOST_DRAFTS
    max_rows: int | None = 1

    def __init__(self, head: DraftHead, decoder: HeadDecoder):
        device = decoder.device
        self._guess = decoder.open_head(head)
        self._states = decoder.keep_states(_MOST_READ, head.sizes.lower)
        # the positions of the tokens that these are of
        self._read = torch.full((_MOST_READ,), _NOWHERE, dtype=torch.int32, device=device)
        self.stand: Sequence[Tensor] = (self._states, self._read)
        self._row: list[int] | None = None
        self._none_fired = torch.zeros(0, 1, 1, dtype=torch.int32, device=device)
        self._end = DraftEnd(decoder, ids=head.tokens.to(device, torch.int32))

    def load(self, rows: Sequence[list[int]]) -> None:
        if rows and rows[0] is not self._row:  # a prompt was read, whose last token got logits
            self._read.fill_(_NOWHERE)
            self._read[0] = len(rows[0]) - 2
        self._row = rows[0] if rows else None

    def follow(self, tokens: Tensor, positions: Tensor) -> None:
        read = positions.flatten()[: len(self._read)]
        self._read[: len(read)] = read  # behind these lie states of rounds before

    def draft(
        self,
        fields: Tensor,
        tables: Tensor,
        count: int,
        variant: Variant,
        weights: Weights | None,
    ) -> Tensor:
        self._guess.begin(tables, fields[Field.POSITION], count, self._states, self._read)

        def guess(number: int, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            token, position = (part[:, 0] for part in inputs)
            return self._guess(number, token, position)[:, None], self._none_fired

        return self._end.drafts(fields, count, variant, weights, guess)
