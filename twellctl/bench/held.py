"""What engines have in memory, found by walking over all that they refer to."""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType

import torch
from transformers import PretrainedConfig

from twellctl.decoding.attention import AttendLayer
from twellctl.decoding.paged_cache import PagedCache

# whose attributes are not looked at
_NO_HOLDERS = (str, bytes, int, float, type, ModuleType, FunctionType, PretrainedConfig)


def held_bytes(*holders: object) -> int:
    """What `holders` (models, decoders, schedulers) have in memory, but for caches of keys and
    values: weights in all their layouts, codes, tables, buffers."""
    found: dict[int, int] = {}  # storages, by where they begin
    cached: set[int] = set()
    seen: set[int] = set()
    left: list[object] = [*holders]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _NO_HOLDERS):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            cached |= {tensor.untyped_storage().data_ptr() for tensor in _cached_in(one)}
            left += _parts_of(one)
    return sum(size for place, size in found.items() if place not in cached)


def _cached_in(one: object) -> Iterable[torch.Tensor]:
    """The keys and values that a cache has, or a layer attends to."""
    if isinstance(one, PagedCache):
        return *one.keys, *one.values
    return (one.keys, one.values) if isinstance(one, AttendLayer) else ()


def _parts_of(one: object) -> Iterable[object]:
    if isinstance(one, Mapping):
        return one.values()
    if isinstance(one, list | tuple | set | deque):
        return one
    if isinstance(one, partial):
        return one.func, one.args, one.keywords
    if isinstance(one, MethodType):
        return (one.__self__,)
    return getattr(one, "__dict__", {}).values()
