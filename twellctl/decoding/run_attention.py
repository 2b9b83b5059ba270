"""Attention of transformers' models over rows whose keys lie in consecutive pages, in one launch.

A row's keys follow one another in memory, so that the flash attention of PyTorch reads as many of
them as the row has, from wherever they begin: rows differ in length, and nothing is gathered or
masked. Where there is no flash attention (on a CPU, of capped scores) plain attention takes one row
after another.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from twellctl.decoding.paged_cache import LayerShape

_NAME = "twell_runs"  # of `_attend`, as transformers knows it
_HEAD_DIM = 256  # of flash attention, at most; a multiple of 8


@dataclass(frozen=True)
class Runs:
    """Which queries see which keys: row b has the queries from `queries[b]` to `queries[b + 1]`.

    Its keys are `lengths[b]`, from `keys[b]` on; its last query belongs to the last of them, and
    queries before the first key are nobody's. All
    int32, `[B + 1]` and lengths `[B]`. `most_queries` and `most_keys` bound those of a row.
    """

    queries: Tensor
    keys: Tensor
    lengths: Tensor
    most_queries: int
    most_keys: int


_RUNS: ContextVar[Runs] = ContextVar("_RUNS")  # of the forward under way


@contextlib.contextmanager
def attending(config: PreTrainedConfig, runs: Runs) -> Iterator[None]:
    """Forwards of the model with this config attend over `runs` inside; its cache gives keys and
    values `[places, kv_heads, head_dim]` of all rows."""
    usual, before = config._attn_implementation, _RUNS.set(runs)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _RUNS.reset(before)


def why_not_attend_runs(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> str | None:
    """None if `model`, which caches `shapes`, can attend so, else a sentence."""
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
    for shape in shapes:
        dims = {shape.key_dim, shape.value_dim}
        if len(dims) > 1 or max(dims) > _HEAD_DIM or max(dims) % 8:
            return f"flash attention takes heads of up to {_HEAD_DIM}, a multiple of 8"
    return None


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

    Key and value are `[places, kv_heads, head_dim]`, of all rows: `_RUNS` says whose.
    """
    runs = _RUNS.get()
    B, _, Q, _ = query.shape
    query = query.transpose(1, 2).flatten(0, 1)
    out = attend_runs(query, key, value, runs, scaling, sliding_window)
    return out.unflatten(0, (B, Q)), None


AttentionInterface.register(_NAME, _attend)


def attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Queries `[tokens, heads, head_dim]`, keys and values `[places, kv_heads, head_dim]` of all
    rows, to `[tokens, heads, head_dim]`.

    `window`: positions that count, the query's own included. With a `cap` scores become
    cap tanh(score / cap), which flash attention has not.
    """
    window = window if window and window < runs.most_keys else None
    if query.is_cuda and cap is None:
        return _flash(query, key, value, runs, scale, window)
    return _plain(query, key, value, runs, scale, window, cap)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None, window: int | None
) -> Tensor:
    """All rows in one launch, which reads no key after a row's last one."""
    return torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key,
        value,
        runs.queries,
        runs.keys,
        runs.most_queries,
        runs.most_keys,
        0.0,
        runs.most_queries > 1 or window is not None,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=runs.lengths,
    )[0]


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """One row after another."""
    rows = torch.stack((runs.queries.diff(), runs.keys[:-1], runs.lengths), 1)
    taken, out = 0, []
    for num_queries, start, length in rows.tolist():
        queries = query[taken : taken + num_queries]
        places = torch.arange(length, device=query.device)
        own = torch.arange(length - num_queries, length, device=query.device)[:, None]
        seen = places <= own
        if window is not None:
            seen &= places > own - window
        parts = (queries, key[start : start + length], value[start : start + length])
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        attended = _scored(q, k, v, seen, scale, cap)
        out.append(attended[0].transpose(0, 1))
        taken += num_queries
    return torch.cat(out)


def _scored(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None, cap: float | None
) -> Tensor:
    """Attention of queries `[1, heads, Q, head_dim]` to the keys that are `seen`, bool `[Q, .]`."""
    if not cap:
        attend = nn.functional.scaled_dot_product_attention
        return attend(query, key, value, seen, scale=scale, enable_gqa=True)
    sharing = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(sharing, 1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = cap * ((query @ key.mT).float() * scale / cap).tanh()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return weights.to(value.dtype) @ value
