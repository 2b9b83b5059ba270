"""The end of a step on its device: a token for each row, told, and made the row's next input.

On a GPU whose kernels are at hand one of them (kernels/decode/choose.cu) does that, else torch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_spec import CHOOSE_BLOCK
from twellctl.decoding.engine import MAX_TOP_LOGPROBS, Sampling, Token
from twellctl.decoding.sampler import Field, Variant, choose, cut, log_probabilities
from twellctl.decoding.weighing import Weights

NO_TOKEN = -1  # told for a token whose logit is NaN; kernels/decode/choose.cu does the same
_LOGITS = 4 * CHOOSE_BLOCK  # that a block takes at a time
_BLOCKS_AT_ONCE = 1024  # more would wait for each other


class Record:
    """What a step tells of each row: columns of int32, floats by their bits.

    The token, or `NO_TOKEN`; how many neurons of each layer fired; the token's log-probability, the
    likeliest tokens and theirs. The last three are only written by variants that ask for
    log-probabilities.
    """

    def __init__(self, neurons: Sequence[int], vocab_size: int, mapped: int = 0):
        self.neurons, self._mapped, num_layers = neurons, mapped, len(neurons)
        self.num_top = min(MAX_TOP_LOGPROBS, vocab_size)
        self.fired = slice(1, 1 + num_layers)
        self.logprob = 1 + num_layers
        self.top_ids = slice(self.logprob + 1, self.logprob + 1 + self.num_top)
        self.top_logprobs = slice(self.top_ids.stop, self.top_ids.stop + self.num_top)
        self.width = self.top_logprobs.stop

    def shares(self, rows: np.ndarray) -> np.ndarray:
        """Of rows `[.., width]`, which share of each layer's neurons fired, `[.., L]`.

        Without the `mapped` ones, which always do.
        """
        own = np.asarray(self.neurons, np.float64) - self._mapped
        return np.maximum(rows[..., self.fired] - self._mapped, 0) / own

    def token(self, row: np.ndarray, sampling: Sampling) -> Token | None:
        """The token of one row, with what `sampling` asks to be told; None for what is no number.

        That is a logit of NaN, and a log-probability beside an infinite logit.
        """
        if row[0] == NO_TOKEN:
            return None
        if sampling.top_logprobs is None and not sampling.densities:
            return Token(int(row[0]))
        floats, logprob, top = row.view(np.float32), None, ()
        if (count := sampling.top_logprobs) is not None:
            if math.isnan(logprob := float(floats[self.logprob])):
                return None
            pairs = zip(row[self.top_ids].tolist(), floats[self.top_logprobs].tolist(), strict=True)
            top = tuple(pairs)[:count]
        densities = tuple(self.shares(row).tolist()) if sampling.densities else None
        return Token(int(row[0]), logprob, top, densities)


class StepEnd:
    """For steps of up to `max_rows` rows that follow one another."""

    def __init__(
        self, record: Record, kernels: KernelSet | None, max_rows: int, device: torch.device
    ):
        self._record, self._kernels = record, kernels
        # of rows whose blocks are at work: the best so far, and how many are through
        self._best = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tickets = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def tells_host(self, variant: Variant) -> bool:
        """Whether such a step needs no copy of its records: it can write to the host's memory."""
        return self._kernels is not None and not variant.logprobs

    def kind_of(self, variant: Variant) -> Variant:
        """The variant whose CUDA graph `variant` shares: both launch the same at the end."""
        return variant if self._kernels is None else variant._replace(drawn=False)

    def __call__(
        self,
        logits: Tensor,
        fired: Tensor,
        fields: Tensor,
        records: Tensor,
        variant: Variant,
        weights: Weights | None = None,
    ) -> None:
        """From logits `[B, V]` and `fired` int32 `[L, B]` to `records` int32 `[B, width]`.

        The next token and position go into `fields`, int32 `[len(Field), B]`. Where `tells_host`,
        `records` may be pinned, `[2, B, width]`, and are written by turns. `weights` are those of
        the rows, where the variant is weighed.
        """
        kept = logits if weights is None else weights.weighed(logits, fields)
        kept = cut(kept, fields) if variant.cut else kept
        if self._kernels is None:
            self._by_torch(kept, fired, fields, records, variant.drawn)
        else:
            self._by_kernel(kept.float().contiguous(), fired, fields, records)
        if weights is not None:
            weights.count(fields)
        if variant.logprobs:
            self._tell_logprobs(logits, records)

    def _by_torch(
        self, logits: Tensor, fired: Tensor, fields: Tensor, records: Tensor, drawn: bool
    ) -> None:
        tokens = choose(logits, fields, drawn)
        is_nan = logits.gather(-1, tokens[:, None])[:, 0].isnan()
        fields[Field.TOKEN] = tokens
        records[:, 0] = tokens.masked_fill(is_nan, NO_TOKEN)
        records[:, self._record.fired] = fired.T
        position = fields[Field.POSITION]
        torch.minimum(position + 1, fields[Field.LIMIT], out=position)

    def _by_kernel(self, logits: Tensor, fired: Tensor, fields: Tensor, records: Tensor) -> None:
        B, V = logits.shape
        blocks = min(-(-V // _LOGITS), max(1, _BLOCKS_AT_ONCE // B))
        self._kernels.launch(
            "choose",
            (blocks, B),
            CHOOSE_BLOCK,
            (
                *(logits, V, fields, fields.stride(0), fired, len(fired)),
                *(records, records.stride(-2), records.stride(0) if records.dim() > 2 else 0),
                *(self._best, self._tickets),
            ),
            overlap=True,
        )

    def _tell_logprobs(self, logits: Tensor, records: Tensor) -> None:
        record, floats = self._record, records.view(torch.float32)
        chosen, ids, logprobs = log_probabilities(logits, records[:, 0].long().clamp(min=0))
        floats[:, record.logprob] = chosen
        records[:, record.top_ids] = ids.int()
        floats[:, record.top_logprobs] = logprobs
