"""A second model as the drafter of rounds, over the cache of the model that it drafts for.

A sparse fit has the attention of its original. So it reads what the original has cached, and writes
its own keys and values behind that, where the original's pass overwrites them. It draws with the
noise of the original (sampler.py), under the same penalties: a draft is kept where both have chosen
alike, whatever the temperature. It drafts for one sequence at a time: for several a pass of the
original costs each of them little, and drafts never gained.
"""

from collections.abc import Sequence

from torch import Tensor

from twellctl.decoding.decoder import Decoder, Wanted
from twellctl.decoding.draft_end import DraftEnd
from twellctl.decoding.drafted import MOST_DRAFTS
from twellctl.decoding.sampler import Variant
from twellctl.decoding.weighing import Weights


class ModelDrafter:
    """A `Drafter` (rounds.py): what `decoder` writes. It is attached to the cache of the rounds."""

    name = "fit"
    most_drafts = MOST_DRAFTS
    max_rows: int | None = 1
    stand: Sequence[Tensor] = ()  # what it reads is cached, and stays

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self._end = DraftEnd(decoder, decoder.neurons, decoder.mapped)

    def load(self, rows: Sequence[list[int]]) -> None:
        """What it knows of them is cached."""

    def follow(self, tokens: Tensor, positions: Tensor) -> None:
        """The round caches what it reads."""

    def draft(
        self,
        fields: Tensor,
        tables: Tensor,
        count: int,
        variant: Variant,
        weights: Weights | None,
    ) -> Tensor:
        def guess(number: int, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self._decoder.run(*inputs, tables, wanted=Wanted.ROUGH)

        return self._end.drafts(fields, count, variant, weights, guess)
