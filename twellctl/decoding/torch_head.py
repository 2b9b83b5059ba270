"""A draft head (heads/head.py) in plain PyTorch, over pages: the judge of faster passes of it.

What is cached below a row's position is gathered once a round. The head's own keys and values lie
behind that, and nothing of it is cached.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.paged_cache import PagedCache
from twellctl.heads.head import DraftHead
from twellctl.models.families import rotary_of, turned_by


class TorchHead:
    """A `HeadPass` (head_drafter.py) of a head of `model`, for positions below `context`."""

    def __init__(self, head: DraftHead, model: PreTrainedModel, cache: PagedCache, context: int):
        self._head = copy.deepcopy(head).to(model.device)
        self._embeddings = model.get_input_embeddings().weight.detach()
        self._rows = model.get_output_embeddings().weight.detach()[self._head.tokens]
        D = head.sizes.D
        self._keys, self._values = cache.keys[-1][..., :D], cache.values[-1][..., :D]
        reach = min(context, cache.num_pages * PAGE)
        kind = turned_by(model, model.base_model.layers[-1])
        assert kind is not None  # heads/source.py refuses such models
        like = torch.empty(1, dtype=model.dtype, device=model.device)
        positions = torch.arange(reach, device=model.device)[None]
        self._cos, self._sin = (part[0] for part in rotary_of(model, kind)(like, positions))

    def begin(
        self, tables: Tensor, position: Tensor, count: int, states: Tensor, read: Tensor
    ) -> None:
        self._seen = _Seen(self._keys, self._values, tables[0], position, count)
        before = (read == position - 1).int().argmax(0, keepdim=True)
        self.states = self._head.merged(states.index_select(0, before))

    def __call__(self, number: int, token: Tensor, position: Tensor) -> Tensor:
        angles = self._cos[position], self._sin[position]
        embedded = F.embedding(token, self._embeddings)
        attend = self._seen.attending(number)
        self.states = self._head(embedded, self.states, angles, attend)
        return F.linear(self.states, self._rows).float()


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
