"""The key-value cache in pages: one tensor for the keys of a layer and one for its values.

The token at position p of a row lies in page `table[p // PAGE]`, slot `p % PAGE`. Keys are stored
as attention takes them, with their rotary positions. A cache is made once and handed to all
decoders that read and write it.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from twellctl.bundle.twell_spec import PAGE


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for a token: `kv_heads` keys of `key_dim`, values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return PAGE * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class PagedCache:
    """`keys[i]` and `values[i]` of layer i: `[num_pages, kv_heads, PAGE, head_dim]`, zeroed.

    In memory the heads of a page lie one after another, as the decode kernels read them;
    `by_tokens` its tokens do, as PyTorch's flash attention reads consecutive pages.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        device: torch.device,
        *,
        by_tokens: bool = False,
    ):
        self.shapes, self.num_pages, self.by_tokens = list(shapes), num_pages, by_tokens

        def pages(shape: LayerShape, head_dim: int) -> Tensor:
            inner = (PAGE, shape.kv_heads) if by_tokens else (shape.kv_heads, PAGE)
            made = torch.zeros((num_pages, *inner, head_dim), dtype=shape.dtype, device=device)
            return made.transpose(1, 2) if by_tokens else made

        self.keys = [pages(shape, shape.key_dim) for shape in shapes]
        self.values = [pages(shape, shape.value_dim) for shape in shapes]

    def check(self, shapes: Sequence[LayerShape], *, by_tokens: bool) -> None:
        """`ValueError` if a decoder that caches `shapes` in this order cannot use the cache."""
        if list(shapes) != self.shapes:
            raise ValueError("the cache was made for layers of other shapes")
        if by_tokens != self.by_tokens:
            raise ValueError(f"the cache must be made with by_tokens={by_tokens}")


def page_bytes(shapes: Sequence[LayerShape]) -> int:
    """Bytes of one page over all layers; 0: nothing is cached in pages."""
    return sum(shape.page_bytes for shape in shapes)


@torch.inference_mode()
def cached_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer of `model` caches, seen from one token that goes through it."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    return [
        LayerShape(of.keys.shape[1], of.keys.shape[-1], of.values.shape[-1], of.keys.dtype)
        for of in cache.layers
    ]


def cache_argument(module: nn.Module) -> str:
    """What `module.forward` calls the cache; transformers 5.24 has a new name for it."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
