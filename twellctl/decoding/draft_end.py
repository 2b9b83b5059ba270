"""How drafts are chosen, whoever guesses them: as the model that they are for chooses tokens."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from twellctl.decoding.decoder import Decoder
from twellctl.decoding.rounds import inputs_of
from twellctl.decoding.sampler import Variant
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.weighing import Weights

# From the number of a draft, and the token before it with its position, `[1, 1]` each: to logits
# `[1, 1, V]` of the tokens that can be guessed, and how many neurons fired, int32 `[L, 1, 1]`.
Guess: TypeAlias = Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


class DraftEnd:
    """Chooses the drafts of one row, one after the other, as the model chooses tokens."""

    def __init__(
        self,
        decoder: Decoder,
        neurons: Sequence[int] = (),
        mapped: int = 0,
        ids: Tensor | None = None,
    ):
        """`decoder`: of the model; `neurons` and `mapped` (decoder.py): of what drafts. `ids` int32
        `[V]`, ascending: the tokens that it can guess; None: all."""
        self._ids, self._vocab_size = ids, decoder.vocab_size
        self._record = Record(neurons, decoder.vocab_size, mapped)
        self._end = StepEnd(self._record, decoder.kernels, 1, decoder.device)

    def drafts(
        self,
        fields: Tensor,
        count: int,
        variant: Variant,
        weights: Weights | None,
        guess: Guess,
    ) -> Tensor:
        """Int32 `[1, count]`; the other arguments are those of `Drafter.draft` (rounds.py)."""
        fields, variant = fields.clone(), variant._replace(logprobs=False)
        written = None if weights is None else weights.written.clone()
        ids = self._ids if weights is None else None
        size = count, 1, 1, self._record.width
        records = torch.empty(size, dtype=torch.int32, device=fields.device)
        for number, of_draft in enumerate(records):
            inputs = inputs_of(fields, None)
            logits, fired = guess(number, inputs)
            if weights is not None:  # they are of all tokens
                logits = self._of_all(logits)
            self._end(logits, fired, inputs, fields, of_draft, variant, weights, ids)
        if weights is not None:
            weights.written.copy_(written)
        return records[:, :, 0, 0].T.clamp(min=0)  # a draft that is no number is none to keep

    def _of_all(self, logits: Tensor) -> Tensor:
        """Over the whole vocabulary, with -inf of the tokens that cannot be guessed."""
        if self._ids is None:
            return logits
        wide = logits.new_full((1, 1, self._vocab_size), -torch.inf)
        return wide.index_copy_(2, self._ids.long(), logits)
