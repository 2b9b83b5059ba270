"""Stock models over many rows at once, each row in consecutive pages: attention in one launch.

The model's own forward runs; only its cache and its attention are replaced. A row's keys lie one
behind the other, so that the flash attention of PyTorch reads as many of them as the row has, from
wherever they begin: rows differ in length, and nothing is gathered or masked. Prompts are read
packed, one behind the other without padding. Where there is no flash attention (on a CPU) plain
attention takes one row after another.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from twellctl.bundle.twell_launch import KernelSet, kernels_for
from twellctl.bundle.twell_reasons import why_not_loaded
from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.hf_decoder import HFDecoder
from twellctl.decoding.paged_cache import cache_argument, cached_shapes
from twellctl.here.own_kernels import own_kernels
from twellctl.models.defaults import context_of

_ATTENTION = "twell_rows"  # how `_attend` is registered with transformers
_HEAD_DIM = 256  # of flash attention, at most; a multiple of 8


class DenseDecoder:
    """What `Bulk` (bulk.py) asks of a `Decoder` (decoder.py), and `read`.

    A row's pages must be consecutive: of its table only the first is looked at. Nothing is metered.
    """

    capturable = True
    max_rows = None
    neurons: Sequence[int] = ()
    mapped = 0

    @staticmethod
    def why_not(model: PreTrainedModel) -> str | None:
        """None if `model` can be driven so, else what stands against it."""
        return HFDecoder.why_not(model) or _why_not(model)

    def __init__(self, model: PreTrainedModel):
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.context = context_of(model.config.get_text_config().to_dict())
        self.kernels = _kernels_that_choose(self.device)
        self._model, self._cache_argument = model, cache_argument(model)
        self._shapes = cached_shapes(model)
        self.page_bytes = sum(shape.page_bytes for shape in self._shapes)
        self._attention = model.config._attn_implementation

    def close(self) -> None:
        """The model attends as before."""
        self._model.set_attn_implementation(self._attention)

    def open_cache(self, num_pages: int) -> None:
        """`keys[i]` and `values[i]` of layer i: `[num_pages * PAGE, kv_heads, head_dim]`.

        From now on the model attends by them alone.
        """

        def places(shape: Any, head_dim: int) -> Tensor:
            size = (num_pages * PAGE, shape.kv_heads, head_dim)
            return torch.zeros(size, dtype=shape.dtype, device=self.device)

        self.keys = [places(shape, shape.key_dim) for shape in self._shapes]
        self.values = [places(shape, shape.value_dim) for shape in self._shapes]
        AttentionInterface.register(_ATTENTION, _attend)
        self._model.set_attn_implementation(_ATTENTION)

    def widths(self, max_pages: int) -> list[int]:
        return [max_pages]

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.step`, but that nothing is told of what fired: `[0, B]`."""
        B, W = tables.shape
        starts = tables[:, 0] * PAGE
        where = _Where(
            torch.arange(B + 1, dtype=torch.int32, device=self.device),
            nn.functional.pad(starts, (0, 1)),
            positions + 1,
            most_queries=1,
            most_keys=W * PAGE,
        )
        rows = _Rows(self, (starts + positions).long(), all_keys=True)
        done = self._forward(
            self._model, tokens[:, None], positions[:, None], rows, where, logits_to_keep=1
        )
        return done.logits[:, -1], torch.empty((0, B), dtype=torch.int32, device=self.device)

    def read(self, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        """Cache whole prompts from their first tokens on, in one forward; no wait for the host."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        starts = torch.tensor([taken[0] * PAGE for taken in pages])
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(lengths)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        places = positions + starts.repeat_interleave(lengths)
        tokens, positions, places = self._there(torch.stack([tokens, positions, places]))
        ends, longest = self._there(ends.int()), int(lengths.max())
        where = _Where(ends, ends, ends.diff(), longest, longest)
        rows = _Rows(self, places, all_keys=False)
        self._forward(self._model.base_model, tokens[None], positions[None], rows, where)

    def _there(self, host: Tensor) -> Tensor:
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def _forward(
        self,
        module: nn.Module,
        tokens: Tensor,
        positions: Tensor,
        rows: "_Rows",
        where: "_Where",
        **how: Any,
    ) -> Any:
        how[self._cache_argument] = rows
        before = _WHERE.set(where)
        try:
            return module(
                input_ids=tokens.long(), position_ids=positions.long(), use_cache=True, **how
            )
        finally:
            _WHERE.reset(before)


@dataclass(frozen=True)
class _Where:
    """Which queries see which keys: row b has those from `queries[b]` to `queries[b + 1]`.

    Its keys are `lengths[b]`, from `keys[b]` on; its last query belongs to the last of them. All
    int32, `[B + 1]` and lengths `[B]`.
    """

    queries: Tensor
    keys: Tensor
    lengths: Tensor
    most_queries: int
    most_keys: int


_WHERE: ContextVar[_Where] = ContextVar("_WHERE")  # of the forward under way


class _Rows(Cache):
    """What the model's attention takes for its cache, for one forward."""

    def __init__(self, decoder: DenseDecoder, places: Tensor, all_keys: bool):
        """`places` int64: of each token, in the cache. Not `all_keys`: the new ones are all."""
        super().__init__(layers=[])
        self._decoder, self._places, self._all_keys = decoder, places, all_keys

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store `[B, kv_heads, Q, head_dim]`; keys and values as `_attend` takes them."""
        new = [part.transpose(1, 2).flatten(0, 1) for part in (keys, values)]
        stored = [self._decoder.keys[layer_idx], self._decoder.values[layer_idx]]
        for cached, part in zip(stored, new, strict=True):
            cached.index_copy_(0, self._places, part)
        return stored if self._all_keys else new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError("each row has its own length: the model must use position_ids")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query `[B, heads, Q, head_dim]`, `[B, Q, heads, ..]` out.

    But key and value are `[places, kv_heads, head_dim]`, of all rows: `_WHERE` says whose.
    """
    where = _WHERE.get()
    B, _, Q, _ = query.shape
    window = sliding_window if sliding_window and sliding_window < where.most_keys else None
    run = _flash if query.is_cuda else _plain
    out = run(query.transpose(1, 2).flatten(0, 1), key, value, where, scaling, window)
    return out.unflatten(0, (B, Q)), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, where: _Where, scale: float, window: int | None
) -> Tensor:
    """All rows in one launch, which reads no key behind a row's last one."""
    return torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key,
        value,
        where.queries,
        where.keys,
        where.most_queries,
        where.most_keys,
        0.0,
        where.most_queries > 1 or window is not None,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=where.lengths,
    )[0]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, where: _Where, scale: float, window: int | None
) -> Tensor:
    """One row after another."""
    rows = zip(where.queries.diff(), where.keys, where.lengths, strict=False)
    taken, out = 0, []
    for num_queries, start, length in torch.tensor(list(rows)).tolist():
        queries = query[taken : taken + num_queries]
        places = torch.arange(length)
        own = places[length - num_queries :, None]
        seen = places <= own
        if window is not None:
            seen &= places > own - window
        parts = (queries, key[start : start + length], value[start : start + length])
        attended = nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts), seen, scale=scale, enable_gqa=True
        )
        out.append(attended[0].transpose(0, 1))
        taken += num_queries
    return torch.cat(out)


def _why_not(model: PreTrainedModel) -> str | None:
    name, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} attends by its own code"
    if config.model_type == "diffllama" or getattr(config, "kv_lora_rank", None):
        return f"{name} makes keys and values of what it keeps"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{name} caps what attention computes"
    if config._attn_implementation != "sdpa":
        return f"{name} attends by {config._attn_implementation}"
    if model.device.type != "cuda":
        return None
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention takes bf16 and fp16, not {str(model.dtype).removeprefix('torch.')}"
    for shape in cached_shapes(model):
        dims = {shape.key_dim, shape.value_dim}
        if len(dims) > 1 or max(dims) > _HEAD_DIM or max(dims) % 8:
            return f"flash attention takes heads of up to {_HEAD_DIM}, a multiple of 8"
    return None


def _kernels_that_choose(device: torch.device) -> KernelSet | None:
    """Those with kernels/decode/choose.cu, if they are at hand."""
    if device.type != "cuda":
        return None
    if why_not_loaded(own_kernels(), device.index, ("choose",)):
        return None
    return kernels_for(own_kernels(), device.index)
