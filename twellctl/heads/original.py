"""The model that a draft head drafts for, and what it makes of text, as the head reads it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from twellctl.decoding.paged_cache import cache_argument
from twellctl.heads.last_layer import lower_layers
from twellctl.models.families import rotary_of, turned_by
from twellctl.models.loading import without_mask
from twellctl.models.lower_states import lower_states


@dataclass(frozen=True)
class Read:
    """What a model made of ids `[B, S]`: normalised states `[B, S, K]`, with the outputs of n lower
    layers in front `[B, S, (1 + n) K]`, and what its last layer cached, turned: keys and values
    `[B, Hkv, S, D]`."""

    ids: Tensor
    states: Tensor
    all_states: Tensor
    keys: Tensor
    values: Tensor


class Original:
    """A frozen model, for windows of `seq_len` tokens."""

    def __init__(self, model: PreTrainedModel, seq_len: int):
        without_mask(model, seq_len)
        self._lower = lower_layers(len(model.model.layers))
        self.model = model.requires_grad_(False)
        kind = turned_by(model, model.model.layers[-1])
        assert kind is not None, "why_no_head refuses such a model"
        like = torch.empty(1, dtype=model.dtype, device=model.device)
        positions = torch.arange(seq_len, device=model.device)[None]
        cos, sin = rotary_of(model, kind)(like, positions)
        self._cos, self._sin = cos[0], sin[0]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocabulary(self) -> int:
        return self.model.lm_head.out_features

    @torch.no_grad()
    def read(self, ids: Tensor) -> Read:
        """Of ids `[B, seq_len]`."""
        ids, cached = ids.to(self.device), _LastLayer()
        base = self.model.model
        how = {cache_argument(base): cached, "use_cache": True}
        with lower_states(self.model, self._lower) as lower:
            states = base(input_ids=ids, **how).last_hidden_state
        return Read(ids, states, torch.cat((*lower, states), -1), cached.keys, cached.values)

    def embedded(self, ids: Tensor) -> Tensor:
        """`[.., K]` of ids."""
        return F.embedding(ids, self.model.get_input_embeddings().weight)

    def angles(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[count, D]` of `count` positions from `first` on."""
        return self._cos[first : first + count], self._sin[first : first + count]

    def rows_of(self, tokens: Tensor) -> Tensor:
        """`[V, K]`: the rows of its LM head for `tokens` `[V]`."""
        return self.model.lm_head.weight[tokens]

    @torch.no_grad()
    def chosen(self, states: Tensor) -> Tensor:
        """int64 `[M]`: the likeliest token by states `[M, K]`."""
        return likeliest(states, self.model.lm_head.weight)


class _LastLayer(DynamicCache):
    """Keeps keys and values of the layer that ran last, and no others."""

    keys: Tensor
    values: Tensor

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


LOGITS_AT_ONCE = 1 << 25  # elements of one tensor of logits; some six such exist, in float32


def likeliest(states: Tensor, rows: Tensor) -> Tensor:
    """int64 `[M]`: by which of the `rows` `[V, K]` of an LM head states `[M, K]` are likeliest."""
    parts = states.split(rows_at_once(len(rows)))
    return torch.cat([F.linear(part.to(rows.dtype), rows).argmax(-1) for part in parts])


def rows_at_once(vocabulary: int) -> int:
    """How many rows may have their logits at once."""
    return max(1, LOGITS_AT_ONCE // vocabulary)
