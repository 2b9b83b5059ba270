"""A draft head over windows of text, from every token at once, several steps far.

At base t the model has read the tokens up to t, and token t + 1 is known. Step j reads token
t + 1 + j and the state before it: the model's at first, then its own of step j - 1. The state that
it makes stands for the model's at t + 1 + j.
"""

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from twellctl.heads.head import DraftHead
from twellctl.heads.original import Original, Read


def unroll(head: DraftHead, original: Original, read: Read, ahead: int) -> list[Tensor]:
    """The states `[B, S - ahead, K]` of each of `ahead` steps, for the bases 0 .. S - ahead - 1.

    The head computes in the dtype of the model, whatever its weights are, as when it drafts.
    """
    bases = read.ids.shape[1] - ahead
    states, attend, found = read.all_states[:, :bases], _Attention(read, bases), list[Tensor]()
    weights = {name: part.to(states.dtype) for name, part in head.named_parameters()}
    for first in range(1, 1 + ahead):
        embedded = original.embedded(read.ids[:, first : first + bases])
        given = embedded, states, original.angles(first, bases), attend
        states = functional_call(head, weights, given)
        found.append(states)
    return found


class _Attention:
    """What a head sees, step by step: the model's keys and values up to each base, and its own of
    the same base. Scores are computed again in the backward pass, in place of being kept."""

    def __init__(self, read: Read, bases: int):
        self._keys, self._values = read.keys[:, :, :bases], read.values[:, :, :bases]
        self._own_keys, self._own_values = list[Tensor](), list[Tensor]()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._own_keys.append(k)
        self._own_values.append(v)
        own = torch.stack(self._own_keys, 3), torch.stack(self._own_values, 3)
        given = q, self._keys, self._values, *own
        return checkpoint(_attended, *given, use_reentrant=False, preserve_rng_state=False)


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
) -> Tensor:
    """`[B, T, H, D]` of q `[B, T, H, D]`, the model's keys and values `[B, Hkv, T, D]` and own
    ones `[B, T, Hkv, n, D]`."""
    T, Hkv, D = q.shape[1], keys.shape[1], q.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q = (q * D**-0.5).unflatten(2, (Hkv, -1))
    before = torch.einsum("bthgd,bhsd->bhtgs", q, keys)
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    before = before.masked_fill(later[:, None], float("-inf"))
    own = torch.einsum("bthgd,bthnd->bhtgn", q, own_keys)
    shares = torch.cat((before, own), -1).softmax(-1, dtype=wide).to(q.dtype)
    given = torch.einsum("bhtgs,bhsd->bthgd", shares[..., :T], values)
    given = given + torch.einsum("bhtgn,bthnd->bthgd", shares[..., T:], own_values)
    return given.flatten(2, 3)
