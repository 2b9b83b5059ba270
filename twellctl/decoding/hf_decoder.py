"""Any causal model of transformers through its own forward, over a cache in pages: the plain form.

Attention sees the whole block table of a row, gathered; what is not its own is masked. Slow and
simple, on any device and in any dtype: the judge of faster decoders. What fires is counted by
hooks. Models whose state is not in pages go one sequence at a time (`LoneDecoder`).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_format import fires
from twellctl.bundle.twell_model import activation_of, gate_and_up, gated_ffns
from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.paged_cache import PagedCache, cache_argument, cached_shapes
from twellctl.decoding.pages import pages_for
from twellctl.models.defaults import context_of


class FiredCounts:
    """Counts at the activations of a model's gated FFNs, in forwards inside `counted`.

    Where a layer has several FFNs (experts), or an activation is none that is zero below zero (SiLU
    is not), none is metered. One that runs over TwELL's kernels
    never shows its activation: the gates of the last tokens are computed a second time.
    `neurons`: how many each layer has, known from the first forward on. `mapped`: so many of them
    always fire (twell_config.py), and are no news.
    """

    def __init__(self, model: nn.Module, num_hidden_layers: int):
        ffns, below = gated_ffns(model), torch.tensor([-1.0])
        is_metered = not any(activation_of(ffn)(below).any() for ffn in ffns)
        self._ffns = ffns if is_metered and len(ffns) <= num_hidden_layers else []
        self.neurons = [1] * len(self._ffns)
        self.mapped = mapped_neurons(model.config)
        self._counts: list[Tensor | None] = [None] * len(self._ffns)

    @contextlib.contextmanager
    def counted(self, num_rows: int) -> Iterator[None]:
        """A forward of so many rows is made inside."""
        with contextlib.ExitStack() as hooks:
            for i, ffn in enumerate(self._ffns):
                hooks.callback(self._hook(i, ffn, num_rows).remove)
            yield

    def of_last_tokens(self, num_rows: int, device: torch.device) -> Tensor:
        """int32 `[L, num_rows]`, of the forward counted last."""
        if not self._counts:
            return torch.empty((0, num_rows), dtype=torch.int32, device=device)
        return torch.stack(self._counts)

    def _count(self, i: int, fired: Tensor) -> None:
        own = fired[..., : fired.shape[-1] - self.mapped]
        self._counts[i] = own.sum(-1, dtype=torch.int32) + self.mapped
        self.neurons[i] = fired.shape[-1]

    def _hook(self, i: int, ffn: nn.Module, num_rows: int) -> RemovableHandle:
        activation = activation_of(ffn)

        def last(tokens: Tensor) -> Tensor:
            return tokens.reshape(num_rows, -1, tokens.shape[-1])[:, -1]

        def look_at_activation(module: nn.Module, inputs: tuple[Tensor], active: Tensor) -> None:
            self._count(i, last(active) != 0)

        def compute_gates(module: nn.Module, inputs: tuple[Tensor]) -> None:
            x = last(inputs[0])
            first, *second = gate_and_up(ffn)
            gate = first(x) if second else first(x).chunk(2, -1)[0]
            self._count(i, fires(gate))

        if getattr(ffn, "twell_sources", ""):
            return ffn.register_forward_pre_hook(compute_gates)
        return activation.register_forward_hook(look_at_activation)


PREFILL_CHUNK = 1024
_ATTENTION = ("sdpa", "eager")  # those that take a mask of numbers
_LAYER_TYPES = ("full_attention", "sliding_attention")


def _why_not(model: PreTrainedModel) -> str | None:
    """None if `HFDecoder` can drive `model`, else what stands against it."""
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


class HFDecoder:
    """A `Decoder` (decoder.py) for models that cache keys and values of attention, nothing else."""

    max_rows = None
    prefill_chunk = PREFILL_CHUNK
    capturable = True
    kernels = None
    why_not = staticmethod(_why_not)

    def __init__(self, model: PreTrainedModel, width: Callable[[int], int] = int):
        """`width`: columns that the cache has of a head of so many, with zeros behind."""
        config = model.config.get_text_config()
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = context_of(config.to_dict())
        self._model, self._config = model, config
        self._shapes = [
            replace(shape, key_dim=width(shape.key_dim), value_dim=width(shape.value_dim))
            for shape in cached_shapes(model)
        ]
        self._cache_argument = cache_argument(model)
        self._fired = FiredCounts(model, config.num_hidden_layers)
        self.neurons, self.mapped = self._fired.neurons, self._fired.mapped
        self.page_bytes = sum(shape.page_bytes for shape in self._shapes)

    def open_cache(self, num_pages: int) -> None:
        self.cache = PagedCache(self._shapes, num_pages, self.device)

    def widths(self, max_pages: int) -> list[int]:
        powers = [1 << i for i in range(max_pages.bit_length())]
        return sorted({*powers, max_pages})

    def prefill(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and positions `[B, Q]`, tables `[B, W]`; what is returned is of the last ones.

        Position -1 is no token: it looks at its row's first one, and nobody looks at it.
        """
        rows = _Rows(self.cache, positions.long(), tables.long())
        with self._fired.counted(len(tokens)):
            done = self._model(
                input_ids=tokens.long(),
                position_ids=rows.positions,
                attention_mask=self._masks(rows),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: rows},
            )
        return done.logits[:, -1], self._fired.of_last_tokens(len(tokens), self.device)

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        return self.prefill(tokens[:, None], positions[:, None], tables)

    def read(self, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        """Cache whole prompts from their first tokens on, in one forward."""
        begun = [(prompt, 0, taken) for prompt, taken in zip(prompts, pages, strict=True)]
        self.prefill(*(torch.from_numpy(rows).to(self.device) for rows in padded(begun)))

    def _masks(self, rows: "_Rows") -> Tensor | dict[str, Tensor]:
        """One mask, or one for each kind of layer where the config tells several kinds."""
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and tables as `Decoder.prefill` takes them, of (tokens, first, pages)."""
    P = max(len(tokens) for tokens, _, _ in parts)
    tokens = np.zeros((len(parts), P), np.int32)
    positions = np.full_like(tokens, -1)
    tables = np.zeros((len(parts), max(pages_for(f + len(t)) for t, f, _ in parts)), np.int32)
    for row, (new, first, pages) in enumerate(parts):
        tokens[row, P - len(new) :] = new
        positions[row, P - len(new) :] = range(first, first + len(new))
        taken = pages[: pages_for(first + len(new))]
        tables[row, : len(taken)] = taken
    return tokens, positions, tables


class _Rows(Cache):
    """The pages of some rows, as the model's attention sees them: a cache for one forward."""

    def __init__(self, cache: PagedCache, positions: Tensor, tables: Tensor):
        super().__init__(layers=[])
        self.positions = positions.clamp(min=0)
        self._tables, self._cache = tables, cache
        # page 0 is nobody's
        self._pages = tables.gather(1, self.positions // PAGE).masked_fill(positions < 0, 0)
        self._slots = self.positions % PAGE
        self._places = torch.arange(tables.shape[1] * PAGE, device=tables.device)
        # `[B, 1, W * PAGE, 1]`: what lies behind may be NaN, and 0 * NaN is NaN
        self._behind = (self._places > positions[:, -1:])[:, None, :, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store `[B, kv_heads, Q, head_dim]`; returns all of the rows, `[.., W * PAGE, ..]`."""
        found = []
        wide = self._cache.keys[layer_idx], self._cache.values[layer_idx]
        for pages, new in zip(wide, (keys, values), strict=True):
            pages = pages[..., : new.shape[-1]]
            pages[self._pages, :, self._slots] = new.transpose(1, 2)
            found.append(self._gather(pages))
        return tuple(found)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[B, 1, Q, W * PAGE]`: nothing where a token may look."""
        queries = self.positions[:, None, :, None]
        hidden = self._places > queries
        if window is not None:
            hidden |= self._places <= queries - window
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, torch.finfo(dtype).min
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError("each row has its own length: the model must use position_ids")

    def _gather(self, pages: Tensor) -> Tensor:
        return pages[self._tables].transpose(1, 2).flatten(2, 3).masked_fill(self._behind, 0)


class LoneDecoder:
    """A `Decoder` (decoder.py) of one row; tables and positions are not looked at."""

    page_bytes = 0
    max_rows = 1
    capturable = False
    kernels = None

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config()
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = config.max_position_embeddings
        self.prefill_chunk = self.context  # states that recur are not continued by many tokens
        self._model, self._cache_argument = model, cache_argument(model)
        self._fired = FiredCounts(model, config.num_hidden_layers)
        self.neurons, self.mapped = self._fired.neurons, self._fired.mapped

    def open_cache(self, num_pages: int) -> None:
        """There is none: transformers' grows with each sequence."""

    def widths(self, max_pages: int) -> list[int]:
        return [max_pages]

    def prefill(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(tokens)

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        return self._forward(tokens[None])

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with self._fired.counted(1):
            done = self._model(
                input_ids=tokens.to(torch.long),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            )
        return done.logits[:, -1], self._fired.of_last_tokens(1, self.device)
