"""A draft head as the drafter of rounds, over what the model's last layer has cached.

The head begins where the model has ended: with the state of the last token that was read and kept
(heads/head.py). It draws with the model's noise (sampler.py), under the same penalties: a draft is
kept where both have chosen alike, whatever the temperature. It drafts for one sequence at a time.

Its own keys and values of a round lie behind those that it has gathered, and nothing of it is
cached. Where rows have changed, the state of the wrong token may be taken once: then a round's
drafts are poor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.families import rotary_of, turned_by
from twellctl.decoding.lookup import MOST_LOOKED_UP
from twellctl.decoding.paged_cache import PagedCache
from twellctl.decoding.rounds import inputs_of
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.weighing import Weights
from twellctl.heads.head import DraftHead

MOST_HEAD_DRAFTS = 7  # with the row's input they are an octet
_MOST_READ = 1 + MOST_LOOKED_UP  # tokens of a row, in rounds with drafts of whomever
_NOWHERE = -2  # no position


class StatesDecoder(Decoder, Protocol):
    """A `Decoder` that can tell the states of the tokens it gave logits of."""

    def keep_states(self, most: int) -> Tensor:
        """Where each pass from now on leaves the normalised states of those tokens, row by row, the
        first `most`: `[most, K]`, which stays where it is."""
        ...


class HeadDrafter:
    """A `Drafter` (rounds.py): what `head` guesses of `model`, which `decoder` runs over `cache`.

    `tensors`: all that it holds beyond the model, but the states that the decoder leaves.
    """

    name = "head"
    most_drafts = MOST_HEAD_DRAFTS
    max_rows: int | None = 1

    def __init__(
        self,
        head: DraftHead,
        model: PreTrainedModel,
        decoder: StatesDecoder,
        cache: PagedCache,
    ):
        self._head, device = head, decoder.device
        self._embeddings = model.get_input_embeddings().weight.detach()
        self._rows = model.get_output_embeddings().weight.detach()[head.tokens]
        D = head.sizes.D  # the cache may be wider
        self._keys, self._values = cache.keys[-1][..., :D], cache.values[-1][..., :D]
        reach = min(decoder.context, cache.num_pages * PAGE)
        self._angles = _angles(model, reach, head.norm.weight.dtype)
        self._states = decoder.keep_states(_MOST_READ)
        # the positions of the tokens that these are of
        self._read = torch.full((_MOST_READ,), _NOWHERE, dtype=torch.int32, device=device)
        self._row: list[int] | None = None
        size = 1, decoder.vocab_size
        self._logits = torch.full(size, -torch.inf, dtype=torch.float32, device=device)
        self._record = Record((), decoder.vocab_size)
        self._none_fired = torch.zeros(0, 1, 1, dtype=torch.int32, device=device)
        self._end = StepEnd(self._record, decoder.kernels, 1, device)
        self.tensors = [*head.state_dict().values(), self._rows, self._angles, self._logits]

    def load(self, rows: Sequence[list[int]]) -> None:
        if rows and rows[0] is not self._row:  # a prompt was read, whose last token got logits
            self._read.fill_(_NOWHERE)
            self._read[0] = len(rows[0]) - 2
        self._row = rows[0] if rows else None

    def follow(self, tokens: Tensor, positions: Tensor) -> None:
        read = positions.flatten()[: len(self._read)]
        self._read.fill_(_NOWHERE)
        self._read[: len(read)] = read

    def draft(
        self,
        fields: Tensor,
        tables: Tensor,
        count: int,
        variant: Variant,
        weights: Weights | None,
    ) -> Tensor:
        fields, variant = fields.clone(), variant._replace(logprobs=False)
        written = None if weights is None else weights.written.clone()
        position = fields[Field.POSITION]
        before = (self._read == position - 1).int().argmax(0, keepdim=True)
        states = self._states.index_select(0, before)
        seen = _Seen(self._keys, self._values, tables[0], position, count)
        records = torch.empty(
            (count, 1, 1, self._record.width), dtype=torch.int32, device=fields.device
        )
        for number, of_draft in enumerate(records):
            inputs = inputs_of(fields, None)
            embedded = F.embedding(fields[Field.TOKEN].clamp(min=0), self._embeddings)
            angles = (
                self._angles[0, fields[Field.POSITION]],
                self._angles[1, fields[Field.POSITION]],
            )
            states = self._head(embedded, states, angles, seen.attending(number))
            found = F.linear(states, self._rows).float()
            logits = self._logits.index_copy_(1, self._head.tokens, found)
            given = logits[:, None], self._none_fired, inputs, fields, of_draft
            self._end(*given, variant, weights)
        if weights is not None:
            weights.written.copy_(written)
        return records[:, :, 0, 0].T.clamp(min=0)


class _Seen:
    """What a round's drafts of one row attend to: all that is cached below its `position` `[1]`, in
    the pages of its `table` `[W]`, and `count` places behind that for drafts."""

    def __init__(self, keys: Tensor, values: Tensor, table: Tensor, position: Tensor, count: int):
        self._num_cached = len(table) * PAGE
        places = torch.arange(self._num_cached + count, device=table.device)
        is_cached = places < position
        self._keys, self._values = (
            _gathered(pages, table, is_cached[: self._num_cached], count)
            for pages in (keys, values)
        )
        self._places, self._is_cached = places, is_cached & (places < self._num_cached)

    def attending(self, number: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of draft `number`, as `DraftHead` calls it."""
        last = self._num_cached + number
        hidden = ~(self._is_cached | (self._places >= self._num_cached) & (self._places <= last))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[:, last], self._values[:, last] = k[0], v[0]
            Hkv, D = k.shape[1:]
            by_group = q.view(Hkv, -1, D)
            scores = by_group @ self._keys.transpose(1, 2) / math.sqrt(D)
            shares = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
            return (shares @ self._values).view(q.shape)

        return attend


def _gathered(pages: Tensor, table: Tensor, is_cached: Tensor, count: int) -> Tensor:
    """`[Hkv, W PAGE + count, D]`; what is not cached is 0, since anything may lie there."""
    found = pages[table].transpose(0, 1).flatten(1, 2)
    return F.pad(found.where(is_cached[:, None], 0), (0, 0, 0, count))


def _angles(model: PreTrainedModel, reach: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the positions below `reach` in the last layer, `[2, reach, D]`."""
    kind = turned_by(model, model.base_model.layers[-1])
    assert kind is not None  # why_no_head
    positions = torch.arange(reach, device=model.device)[None]
    found = rotary_of(model, kind)(torch.empty(1, dtype=dtype, device=model.device), positions)
    return torch.cat(found)
