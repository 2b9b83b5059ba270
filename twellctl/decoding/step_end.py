"""The end of a round on its device: which tokens each row keeps, their records, the next inputs.

On a GPU whose kernels are at hand one of them (kernels/decode/choose.cu) does that, else torch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_spec import CHOOSE_BLOCK
from twellctl.decoding.drafted import Draft
from twellctl.decoding.engine import MAX_TOP_LOGPROBS, Sampling, Token
from twellctl.decoding.rounds import NO_TOKEN, NOT_KEPT, kept
from twellctl.decoding.sampler import Field, Variant, choose, cut, log_probabilities
from twellctl.decoding.weighing import Weights

_LOGITS = 4 * CHOOSE_BLOCK  # that a block takes at a time
_BLOCKS_AT_ONCE = 1024  # more would wait for each other


class Record:
    """What a round leaves of each token: columns of int32, floats by their bits.

    The token, `NO_TOKEN` or `NOT_KEPT`; how many neurons of each layer fired; the token's
    log-probability, the likeliest tokens and theirs. The last three are only written by variants
    that ask for log-probabilities.
    """

    def __init__(self, neurons: Sequence[int], vocab_size: int, mapped: int = 0):
        self.neurons, self._mapped, num_layers = neurons, mapped, len(neurons)
        self.num_top = min(MAX_TOP_LOGPROBS, vocab_size)
        self.fired = slice(1, 1 + num_layers)
        self.logprob = 1 + num_layers
        self.top_ids = slice(self.logprob + 1, self.logprob + 1 + self.num_top)
        self.top_logprobs = slice(self.top_ids.stop, self.top_ids.stop + self.num_top)
        self.width = self.top_logprobs.stop

    def shares(self, records: np.ndarray) -> np.ndarray:
        """Of records `[.., width]`, which share of each layer's neurons fired, `[.., L]`.

        Without the `mapped` ones, which always do.
        """
        own = np.asarray(self.neurons, np.float64) - self._mapped
        return np.maximum(records[..., self.fired] - self._mapped, 0) / own

    def token(
        self, record: np.ndarray, sampling: Sampling, draft: Draft | None = None
    ) -> Token | None:
        """The token of one record, with what `sampling` wants to know; None for what is no number.

        That is a logit of NaN, and a log-probability where a logit is infinite.
        """
        token = int(record[0])
        if token == NO_TOKEN:
            return None
        densities = tuple(self.shares(record).tolist()) if sampling.densities else None
        if sampling.top_logprobs is None:
            return Token(token, densities=densities, draft=draft)
        floats: np.ndarray = record.view(np.float32)
        logprob = float(floats[self.logprob])
        if math.isnan(logprob):
            return None
        top = zip(record[self.top_ids].tolist(), floats[self.top_logprobs].tolist(), strict=True)
        return Token(token, logprob, tuple(top)[: sampling.top_logprobs], densities, draft)


class StepEnd:
    """For rounds of up to `max_rows` rows, `num_tokens` each, that follow one another."""

    def __init__(
        self,
        record: Record,
        kernels: KernelSet | None,
        max_rows: int,
        device: torch.device,
        num_tokens: int = 1,
    ):
        self._record, self._kernels = record, kernels
        # while blocks are at work: the best so far of each token, and how many of a row are through
        self._best = torch.zeros(max_rows * num_tokens, dtype=torch.int64, device=device)
        self._tickets = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def writes_to_host(self, variant: Variant) -> bool:
        """Whether such a round needs no copy of its records: it can write to the host's memory."""
        return self._kernels is not None and not variant.logprobs and not variant.weighed

    def kind_of(self, variant: Variant) -> Variant:
        """The variant whose CUDA graph `variant` shares: both launch the same at the end."""
        return variant if self._kernels is None else variant._replace(drawn=False)

    def __call__(
        self,
        logits: Tensor,
        fired: Tensor,
        inputs: tuple[Tensor, Tensor],
        fields: Tensor,
        records: Tensor,
        variant: Variant,
        weights: Weights | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """From logits `[B, Q, V]` and `fired` int32 `[L, B, Q]` to `records` int32 `[B, Q, width]`.

        `inputs`: the tokens and positions `[B, Q]` that were read. The next token and position go
        into `fields`, int32 `[len(Field), B]`. Where the variant `writes_to_host`, `records` may be
        pinned, `[2, B, Q, width]`, and are written by turns. `weights` are those of the rows, where
        the variant is weighed. `ids` int32 `[V]`, ascending: the tokens that the logits are of, in
        variants without weights and log-probabilities; None: all.
        """
        weighed = logits if weights is None else weights.weighed_all(logits, *inputs, fields)
        wide = _of_each_token(fields, inputs[1])
        flat = weighed.flatten(0, 1)
        flat = cut(flat, wide) if variant.cut else flat
        if self._kernels is None:
            self._by_torch(flat, ids, fired, inputs, wide, fields, records, variant.drawn)
        else:
            logits_of_tokens = flat.float().contiguous()
            self._by_kernel(self._kernels, logits_of_tokens, ids, fired, inputs, fields, records)
        if weights is not None:
            weights.count_kept(*inputs, records[..., 0])
        if variant.logprobs:
            self._write_logprobs(logits, records)

    def _by_torch(
        self,
        logits: Tensor,
        ids: Tensor | None,
        fired: Tensor,
        inputs: tuple[Tensor, Tensor],
        wide: Tensor,
        fields: Tensor,
        records: Tensor,
        drawn: bool,
    ) -> None:
        tokens, positions = inputs
        places = choose(logits, wide, drawn, ids)
        is_nan = logits.gather(-1, places[:, None]).view(tokens.shape).isnan()
        chosen = (places if ids is None else ids[places]).view(tokens.shape)
        is_kept = kept(tokens, positions, chosen, is_nan)
        records[..., 0] = chosen.masked_fill(is_nan, NO_TOKEN).masked_fill(~is_kept, NOT_KEPT)
        records[..., self._record.fired] = fired.permute(1, 2, 0)
        count = is_kept.sum(1)
        last = tokens.shape[1] - 1 - is_kept.flip(1).int().argmax(1)
        fields[Field.TOKEN] = chosen.gather(1, last[:, None])[:, 0]
        position = fields[Field.POSITION]
        torch.minimum(position + count.int(), fields[Field.LIMIT], out=position)

    def _by_kernel(
        self,
        kernels: KernelSet,
        logits: Tensor,
        ids: Tensor | None,
        fired: Tensor,
        inputs: tuple[Tensor, Tensor],
        fields: Tensor,
        records: Tensor,
    ) -> None:
        B, Q = inputs[0].shape
        V = logits.shape[1]
        tokens, positions = (None, None) if Q == 1 else inputs
        blocks = min(-(-V // _LOGITS), max(1, _BLOCKS_AT_ONCE // (B * Q)))
        kernels.launch(
            "choose",
            (blocks, B * Q),
            CHOOSE_BLOCK,
            {
                "logits": logits,
                "ids": ids,
                "V": V,
                "fields": fields,
                "fields_stride": fields.stride(0),
                "tokens": tokens,
                "positions": positions,
                "Q": Q,
                "fired": fired,
                "L": len(fired),
                "record": records,
                "record_stride": records.stride(-3),
                "token_stride": records.stride(-2),
                "slot_stride": records.stride(0) if records.dim() > 3 else 0,
                "best": self._best,
                "tickets": self._tickets,
            },
            overlap=True,
        )

    def _write_logprobs(self, logits: Tensor, records: Tensor) -> None:
        record, floats = self._record, records.view(torch.float32)
        chosen = records[..., 0].long().clamp(min=0)
        found = log_probabilities(logits.flatten(0, 1), chosen.flatten())
        logprob, ids, logprobs = (part.unflatten(0, chosen.shape) for part in found)
        floats[..., record.logprob] = logprob
        records[..., record.top_ids] = ids.int()
        floats[..., record.top_logprobs] = logprobs


def _of_each_token(fields: Tensor, positions: Tensor) -> Tensor:
    """Fields `[len(Field), B Q]`: those of the row, and where the token stands."""
    Q = positions.shape[1]
    if Q == 1:
        return fields
    wide = fields.repeat_interleave(Q, 1)
    wide[Field.POSITION] = positions.flatten()
    return wide
