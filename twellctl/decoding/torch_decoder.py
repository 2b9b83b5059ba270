"""Any causal model of transformers through its own forward, over a cache in pages.

By itself attention sees the whole block table of a row, gathered; what is not its own is masked.
That is slow and simple, on any device and in any dtype: the judge of faster decoders. `consecutive`
is for rows in consecutive pages: attention reads all of them in one launch (run_attention.py), and
prompts go through the model one after another, without what fills them up.
"""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from twellctl.bundle.twell_launch import KernelSet, kernels_for
from twellctl.bundle.twell_reasons import why_not_loaded
from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.fired_counts import FiredCounts
from twellctl.decoding.paged_cache import LayerShape, PagedCache, cache_argument, cached_shapes
from twellctl.decoding.pages import pages_for
from twellctl.decoding.run_attention import Runs, attending, why_not_attend_runs
from twellctl.decoding.torch_head import TorchHead
from twellctl.decoding.transfers import to_device
from twellctl.heads.head import DraftHead
from twellctl.here.own_kernels import own_kernels
from twellctl.models.defaults import LONGEST, context_of
from twellctl.models.lower_states import lower_states

PREFILL_CHUNK = 1024
_ATTENTION = ("sdpa", "eager")  # those that take a mask of numbers
_LAYER_TYPES = ("full_attention", "sliding_attention")


def why_not(model: PreTrainedModel) -> str | None:
    """None if `TorchDecoder` can drive `model`, else what stands against it."""
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or not _caches_attention_only(model.config):
        return f"{name} keeps more than keys and values of attention"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if other := sorted(kinds.difference(_LAYER_TYPES)):
        return f"{name} has {other[0]} layers"
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"{name} attends in chunks"
    if config._attn_implementation not in _ATTENTION:
        return f"attention {config._attn_implementation} takes no mask (load the model with sdpa)"
    if rope := _rope_by_length(model):
        return f"{name}'s {rope} rotary positions depend on the longest sequence of a batch"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return f"{name} lies on several devices"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    return None


def why_not_consecutive(model: PreTrainedModel) -> str | None:
    """None if `TorchDecoder` can drive `model` over consecutive pages, else a sentence."""
    return why_not(model) or why_not_attend_runs(model, cached_shapes(model))


def _caches_attention_only(config: PreTrainedConfig) -> bool:
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in DynamicCache(config=config).layers)


def _rope_by_length(model: PreTrainedModel) -> str | None:
    """The kind of rotary positions if they depend on the length (transformers' rope_type)."""
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        kinds = found.values() if isinstance(found, dict) else [found]
        for kind in kinds:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                return kind
    return None


class TorchDecoder:
    """A `Decoder` (decoder.py) for models that cache keys and values of attention, nothing else."""

    max_rows: int | None = None
    most_rough = 0
    prefill_chunk = PREFILL_CHUNK
    why_not = staticmethod(why_not)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        consecutive: bool = False,
        stable: bool = False,
    ):
        """`consecutive`: the pages of a row are consecutive, of its table `run` reads the places to
        write alone, and what fires is not counted; the cache is one `by_tokens`. `stable`: few
        tokens go through the model one by one, and the host reads where they stand.
        """
        config = model.config.get_text_config()
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = context_of(config.to_dict()) or LONGEST
        self.consecutive, self.stable, self.capturable = consecutive, stable, not stable
        self.kernels = _kernels_that_choose(self.device) if consecutive else None
        self.shapes: Sequence[LayerShape] = cached_shapes(model)
        self._model, self._config = model, config
        self._cache_argument = cache_argument(model)
        self._fired = None if consecutive else FiredCounts(model, config.num_hidden_layers)
        self.neurons: Sequence[int] = [] if self._fired is None else self._fired.neurons
        self.mapped = 0 if self._fired is None else self._fired.mapped
        self._states: Tensor | None = None
        self._lower: Sequence[int] = ()

    def keep_states(self, most: int, lower: Sequence[int]) -> Tensor:
        """As head_drafter.py has it, of a model whose head is a linear layer over its states."""
        size = most, (1 + len(lower)) * self._config.hidden_size
        self._states = torch.zeros(size, dtype=self._model.dtype, device=self.device)
        self._lower = lower
        return self._states

    def open_head(self, head: DraftHead) -> TorchHead:
        """For passes of `head` over what the last layer caches."""
        return TorchHead(head, self._model, self._cache, self.context)

    def attach(self, cache: PagedCache) -> None:
        cache.check(self.shapes, by_tokens=self.consecutive)
        self._cache = cache

    def widths(self, max_pages: int) -> list[int]:
        if self.consecutive:
            return [max_pages]
        powers = [1 << i for i in range(max_pages.bit_length())]
        return sorted({*powers, max_pages})

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int = 1,
        wanted: Wanted = Wanted.EXACT,
    ) -> tuple[Tensor, Tensor]:
        if self._fired is None:
            return self._run_consecutive(tokens, positions, tables, last)
        if self.stable and last == tokens.shape[1]:
            return self._run_each(self._fired, tokens, positions, tables)
        return self._run_together(self._fired, tokens, positions, tables, last)

    def _run_each(
        self, counts: FiredCounts, tokens: Tensor, positions: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each token by itself, over no more pages than it needs. What is no token gets zeros."""
        B, Q = tokens.shape
        pages = [pages_for(position + 1) for position in positions.flatten().tolist()]
        found: list[tuple[Tensor, Tensor] | None] = []
        for (row, place), width in zip(itertools.product(range(B), range(Q)), pages, strict=True):
            at = slice(row, row + 1), slice(place, place + 1)
            given = tokens[at], positions[at], tables[row : row + 1, :width]
            first = row * Q + place
            found.append(self._run_together(counts, *given, 1, first) if width else None)
        one_found = next(one for one in found if one is not None)
        nothing = tuple(map(torch.zeros_like, one_found))
        logits, fired = zip(*(one or nothing for one in found), strict=True)
        return torch.cat(logits).view(B, Q, -1), torch.cat(fired, 2).view(len(fired[0]), B, Q)

    def _run_together(
        self,
        counts: FiredCounts,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """`first`: of these tokens, among those of the pass that get logits."""
        B = len(tokens)
        given = tokens, positions.long(), tables.long()
        tokens, positions, tables = (to_device(self.device, part) for part in given)
        rows = _Rows(self._cache, _pages_of(positions, tables), positions, tables)
        with counts.counted(B, last):
            how = {"attention_mask": self._masks(rows)}
            if self._states is not None and last:
                logits = self._logits_and_states(self._states[first:], tokens, rows, last, **how)
            else:
                logits = self._logits(tokens, rows, last, **how)
        return logits, counts.found(B, last, self.device)

    def _run_consecutive(
        self, tokens: Tensor, positions: Tensor, tables: Tensor, last: int
    ) -> tuple[Tensor, Tensor]:
        """Of inputs on the host, what fills them up is left out of the forward."""
        B, Q = tokens.shape
        keys = F.pad(tables[:, 0] * PAGE, (0, 1)).int()
        lengths = (positions[:, -1] + 1).int()
        positions = positions.long()
        pages = _pages_of(positions, tables.long())
        queries = Q * torch.arange(B + 1, dtype=torch.int32, device=tokens.device)
        most_queries = Q
        wanted: int | Tensor = last
        is_token = positions >= 0
        if not tokens.is_cuda and not is_token.all():
            tokens, positions, pages = (part[is_token][None] for part in (tokens, positions, pages))
            counts = is_token.sum(1)
            queries = F.pad(counts.cumsum(0), (1, 0)).int()
            most_queries = int(counts.max())
            wanted = (queries[1:, None] - last + torch.arange(last)).flatten()
        given = tokens, positions, pages, queries, keys, lengths
        there = (to_device(self.device, part) for part in given)
        tokens, positions, pages, queries, keys, lengths = there
        runs = Runs(queries, keys, lengths, most_queries, tables.shape[1] * PAGE)
        with attending(self._config, runs):
            logits = self._logits(tokens, _Rows(self._cache, pages, positions, None), wanted)
        fired = torch.empty((0, B, last), dtype=torch.int32, device=self.device)
        return logits.view(B, last, logits.shape[-1]), fired

    def _logits(self, tokens: Tensor, rows: "_Rows", wanted: int | Tensor, **how: Any) -> Tensor:
        """Of the last `wanted` tokens of each row, or of the places `wanted` `[n]`."""
        how |= {self._cache_argument: rows, "position_ids": rows.positions, "use_cache": True}
        num_wanted = len(wanted) if isinstance(wanted, Tensor) else wanted
        if num_wanted == 0:
            self._model.base_model(input_ids=tokens.long(), **how)
            return torch.empty((len(tokens), 0, self.vocab_size), device=self.device)
        return self._model(input_ids=tokens.long(), logits_to_keep=wanted, **how).logits

    def _logits_and_states(
        self, states: Tensor, tokens: Tensor, rows: "_Rows", last: int, **how: Any
    ) -> Tensor:
        """As `_logits`; the states go to `states` as well."""
        how |= {self._cache_argument: rows, "position_ids": rows.positions, "use_cache": True}
        with lower_states(self._model, self._lower) as lower:
            found = self._model.base_model(input_ids=tokens.long(), **how).last_hidden_state
        of_all = torch.cat((*lower, found), -1)[:, -last:]
        told = of_all.flatten(0, 1)[: len(states)]
        states[: len(told)] = told
        return self._model.get_output_embeddings()(found[:, -last:])

    def _masks(self, rows: "_Rows") -> Tensor | dict[str, Tensor]:
        """One mask, or one for each kind of layer where the config names several kinds."""
        window = getattr(self._config, "sliding_window", None)
        kinds = getattr(self._config, "layer_types", None)
        if kinds is None:
            return rows.mask(window, self._model.dtype)
        return {
            kind: rows.mask(window if kind == "sliding_attention" else None, self._model.dtype)
            for kind in set(kinds)
        }


def padded(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and tables on the host, as `Decoder.run` takes them, of (tokens, position
    of the first, pages)."""
    Q = max(len(tokens) for tokens, _, _ in parts)
    tokens: np.ndarray = np.zeros((len(parts), Q), np.int32)
    positions = np.full_like(tokens, -1)
    num_pages = max(pages_for(first + len(tokens)) for tokens, first, _ in parts)
    tables: np.ndarray = np.zeros((len(parts), num_pages), np.int32)
    for row, (new, first, pages) in enumerate(parts):
        tokens[row, Q - len(new) :] = new
        positions[row, Q - len(new) :] = range(first, first + len(new))
        taken = pages[: pages_for(first + len(new))]
        tables[row, : len(taken)] = taken
    return torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(tables)


def _pages_of(positions: Tensor, tables: Tensor) -> Tensor:
    """The page of each token, int64 `[B, Q]`; page 0, which is nobody's, for what fills up."""
    return tables.gather(1, positions.clamp(min=0) // PAGE).masked_fill(positions < 0, 0)


class _Rows(Cache):
    """The cached keys and values of some rows, as the model's attention sees them in one forward.

    `pages` int64 `[B, Q]`: where new tokens are stored. `tables` int64 `[B, W]` of the rows, whose
    keys are gathered; None: attention takes all pages as they lie (run_attention.py).
    """

    def __init__(self, cache: PagedCache, pages: Tensor, positions: Tensor, tables: Tensor | None):
        super().__init__(layers=[])
        self.positions = positions.clamp(min=0)
        self._cache, self._pages, self._tables = cache, pages, tables
        self._slots = self.positions % PAGE
        if tables is not None:
            self._places = torch.arange(tables.shape[1] * PAGE, device=tables.device)
            # `[B, 1, W * PAGE, 1]`: what lies there may be NaN, and 0 * NaN is NaN
            self._unused = (self._places > positions[:, -1:])[:, None, :, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store `[B, kv_heads, Q, head_dim]`; returns what the model's attention takes."""
        found = []
        wide = self._cache.keys[layer_idx], self._cache.values[layer_idx]
        for pages, new in zip(wide, (keys, values), strict=True):
            pages[self._pages, :, self._slots] = new.transpose(1, 2)
            found.append(self._seen(pages))
        return tuple(found)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[B, 1, Q, W * PAGE]`: nothing where a token may look.

        What fills up looks at its row's first token, and nobody looks at what comes of it.
        """
        queries = self.positions[:, None, :, None]
        hidden = self._places > queries
        if window is not None:
            hidden |= self._places <= queries - window
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, torch.finfo(dtype).min
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError("each row has its own length: the model must use position_ids")

    def _seen(self, pages: Tensor) -> Tensor:
        """All keys or values of the rows `[B, kv_heads, W * PAGE, head_dim]`, or of all pages
        `[places, kv_heads, head_dim]`."""
        if self._tables is None:
            return pages.transpose(1, 2).flatten(0, 1)
        return pages[self._tables].transpose(1, 2).flatten(2, 3).masked_fill(self._unused, 0)


def _kernels_that_choose(device: torch.device) -> KernelSet | None:
    """Those with kernels/decode/choose.cu, if they are at hand."""
    if device.type != "cuda":
        return None
    if why_not_loaded(own_kernels(), device.index, ("choose",)):
        return None
    return kernels_for(own_kernels(), device.index)
