"""The key-value cache in pages, and which of them are free.

A page holds the keys and values of `PAGE` consecutive tokens of one sequence, in every layer. Page
0 belongs to nobody: rows that only fill up a batch write there. The token at position p of a row
lies in page `table[p // PAGE]`, slot `p % PAGE`. Keys are stored as attention takes them, with
their rotary positions.
"""

import bisect
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from twellctl.bundle.twell_spec import PAGE


def pages_for(num_tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-num_tokens // PAGE)


class PagePool:
    """Pages 1 to `num_pages` - 1, lent and given back."""

    def __init__(self, num_pages: int):
        self.capacity = num_pages - 1
        self._free = list(range(self.capacity, 0, -1))
        self._lent: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many pages, or None if fewer are free; then none is taken."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._lent.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free pages that were lent, and empty the list. `KeyError` for a page that was not."""
        for page in pages:
            self._lent.remove(page)
        self._free.extend(reversed(pages))
        pages.clear()


class RunPool:
    """The same for those who need consecutive pages: the first run that is long enough is lent."""

    def __init__(self, num_pages: int):
        self.capacity = num_pages - 1
        self._free = [range(1, num_pages)]  # ascending, with something lent between two

    def take(self, count: int) -> range | None:
        """So many pages, or None if there is no such run."""
        for i, run in enumerate(self._free):
            if len(run) >= count:
                self._free[i : i + 1] = [rest] if (rest := run[count:]) else []
                return run[:count]
        return None

    def give_back(self, pages: range) -> None:
        """Free a run that was lent."""
        at = bisect.bisect(self._free, pages.start, key=lambda run: run.start)
        before, after = self._free[max(at - 1, 0) : at], self._free[at : at + 1]
        if before and before[0].stop == pages.start:
            pages, at = range(before[0].start, pages.stop), at - 1
        else:
            before = []
        if after and after[0].start == pages.stop:
            pages = range(pages.start, after[0].stop)
        else:
            after = []
        self._free[at : at + len(before) + len(after)] = [pages]


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
    """`keys[i]` and `values[i]` of layer i: `[num_pages, kv_heads, PAGE, head_dim]`, zeroed."""

    def __init__(self, shapes: list[LayerShape], num_pages: int, device: torch.device):
        def pages(shape: LayerShape, head_dim: int) -> Tensor:
            size = (num_pages, shape.kv_heads, PAGE, head_dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        self.keys = [pages(shape, shape.key_dim) for shape in shapes]
        self.values = [pages(shape, shape.value_dim) for shape in shapes]


@torch.inference_mode()
def cached_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer of `model` caches, seen from one token that goes through it."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    keys_and_values = [(layer.keys, layer.values) for layer in cache.layers]
    return [
        LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype)
        for keys, values in keys_and_values
    ]


def cache_argument(module: nn.Module) -> str:
    """What `module.forward` calls the cache; transformers 5.24 has a new name for it."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
