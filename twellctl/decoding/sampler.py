"""Which token follows, on the device: rows of logits in, one token of each row out. No host reads.

A draw is the largest of logit / temperature + noise (Gumbel's), where the noise of a token depends
on the row's seed, its position and the token alone. So a row draws the same with any other rows in
the batch, in any place of it, and again when it is recomputed.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twellctl.decoding.engine import MAX_TOP_LOGPROBS, Sampling

GREEDY_BELOW = 1e-5  # temperatures that are taken as 0


class Field(IntEnum):
    """What a batch knows of its rows, int32 `[len(Field), B]`; floats by their bits."""

    TOKEN = 0  # the next step's input
    POSITION = 1  # where it stands
    LIMIT = 2  # positions go no further
    TEMPERATURE = 3  # float32; 0: greedy
    TOP_P = 4  # float32
    TOP_K = 5  # 0: all
    SEED_LOW = 6
    SEED_HIGH = 7
    SLOT = 8  # of the host's two records, the one that the next step writes
    # floats; kernels/decode/choose.cu does not know these
    MIN_P = 9
    REPETITION = 10
    FREQUENCY = 11
    PRESENCE = 12


class Variant(NamedTuple):
    """What must be computed for some row: each variant is a CUDA graph of its own."""

    drawn: bool = False  # False: all are greedy, the one argmax is enough
    cut: bool = False  # some row has top_k, top_p or min_p: logits are sorted
    logprobs: bool = False
    weighed: bool = False  # some row has penalties, biases or a guide (weighing.py)

    def __or__(self, other: "Variant") -> "Variant":
        return Variant(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


def variant_of(sampling: Sampling) -> Variant:
    """What one request needs."""
    drawn = _temperature(sampling) > 0
    cut = drawn and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    penalties = sampling.repetition_penalty != 1, sampling.frequency_penalty
    weighed = any((*penalties, sampling.presence_penalty, sampling.logit_bias, sampling.guide))
    return Variant(drawn, cut, sampling.top_logprobs is not None, weighed)


def fields_of(sampling: Sampling, seed: int) -> np.ndarray:
    """What a request says of its row, int32 `[len(Field)]`; where the row stands is 0 yet."""
    fields: np.ndarray = np.zeros(len(Field), np.int32)
    floats = {
        Field.TEMPERATURE: _temperature(sampling),
        Field.TOP_P: sampling.top_p,
        Field.MIN_P: sampling.min_p,
        Field.REPETITION: sampling.repetition_penalty,
        Field.FREQUENCY: sampling.frequency_penalty,
        Field.PRESENCE: sampling.presence_penalty,
    }
    fields[list(floats)] = np.array([*floats.values()], np.float32).view(np.int32)
    fields[Field.TOP_K] = min(max(sampling.top_k, 0), np.iinfo(np.int32).max)
    seeds = np.array([seed & (1 << 64) - 1], np.uint64)
    fields[[Field.SEED_LOW, Field.SEED_HIGH]] = seeds.view(np.int32)
    return fields


def choose(logits: Tensor, fields: Tensor, drawn: bool, ids: Tensor | None = None) -> Tensor:
    """Where the next token of each row lies among its logits `[B, V]`, int64 `[B]`; fields int32
    `[len(Field), B]`.

    kernels/decode/choose.cu does the same. Not `drawn`: all rows are greedy. `ids` int32 `[V]`,
    ascending: the tokens that the logits are of; None: all.
    """
    best = logits.argmax(-1)
    if not drawn:
        return best
    if ids is None:
        ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=fields.device)
    noisy = _scaled(logits, fields).add_(_gumbel(fields, ids))
    return torch.where(_temperatures(fields) > 0, noisy.argmax(-1), best)


def cut(logits: Tensor, fields: Tensor) -> Tensor:
    """`logits` with -inf in place of the tokens that may not be drawn.

    Kept are the `top_k` likeliest tokens; of those the fewest whose shares add up to `top_p`; of
    those the ones with at least `min_p` times the share of the likeliest. Tokens as likely as the
    last one kept are kept too.
    """
    scaled, size = _scaled(logits, fields), logits.shape[-1]
    top_k, top_p = fields[Field.TOP_K], fields[Field.TOP_P].view(torch.float32)
    ordered = scaled.sort(-1, descending=True).values
    kth = torch.where(top_k > 0, top_k.clamp(max=size), size).long() - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, kth[:, None]), -torch.inf)
    # whole numbers: their sums are the same in whatever order a GPU adds them up
    shares = ((ordered - ordered[:, :1]).exp().double() * 2**40).long()
    before = shares.cumsum(-1) - shares
    enough = (top_p.double()[:, None] * shares.sum(-1, keepdim=True)).long()
    kept = (before < enough) | (top_p >= 1)[:, None]
    min_p = fields[Field.MIN_P].view(torch.float32)[:, None]  # of 0 the logarithm is -inf
    kept &= ordered >= ordered[:, :1] + min_p.log()
    last = (kept & (ordered > -torch.inf)).sum(-1, keepdim=True).clamp(min=1) - 1
    return logits.masked_fill(scaled < ordered.gather(-1, last), -torch.inf)


def log_probabilities(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the chosen `tokens` `[B]`, and the likeliest tokens `[B, n]` with theirs, likeliest first.

    Of the model's own distribution, float32; n is `MAX_TOP_LOGPROBS` or the whole vocabulary.
    """
    all_of_them = logits.float().log_softmax(-1)
    chosen = all_of_them.gather(-1, tokens[:, None])[:, 0]
    top = all_of_them.topk(min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    return chosen, top.indices, top.values


def _temperature(sampling: Sampling) -> float:
    """0 for what is greedy, said so or not: of several best tokens all take the first."""
    one_left = sampling.top_k == 1 or sampling.top_p <= 0
    return 0.0 if one_left or sampling.temperature < GREEDY_BELOW else sampling.temperature


def _temperatures(fields: Tensor) -> Tensor:
    return fields[Field.TEMPERATURE].view(torch.float32)


def _scaled(logits: Tensor, fields: Tensor) -> Tensor:
    """float32, those of greedy rows by a temperature above 0."""
    return logits.float() / _temperatures(fields).clamp_min(GREEDY_BELOW)[:, None]


def _gumbel(fields: Tensor, tokens: Tensor) -> Tensor:
    """Noise float32 `[B, V]` of `tokens` int32 `[V]`."""
    low, high, position = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.POSITION]
    first = _mixed(low ^ _mixed(position + _ODD))
    second = _mixed(high ^ _mixed(first + _ODD))
    bits = _mixed(tokens * _ODD + first[:, None], second[:, None]) & 0x7FFFFFFF
    # between 0 and 1, fine near 0: that is where the largest noise comes from
    exponential = -torch.log1p(-(bits.float() + 0.5) * 2.0**-31)
    return -exponential.log_()


_ODD = 0x9E3779B9 - (1 << 32)


def _mixed(bits: Tensor, more: Tensor | None = None) -> Tensor:
    """A hash of int32 `bits` (and of `more`), one to one; products wrap around."""
    bits = (bits ^ _shifted(bits, 16)) * 0x7FEB352D
    if more is not None:
        bits = bits ^ more
    bits = (bits ^ _shifted(bits, 15)) * (0x846CA68B - (1 << 32))
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (bits >> by) & ((1 << (32 - by)) - 1)
