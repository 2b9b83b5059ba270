"""What layers of a model make of tokens on their way to the last one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def lower_states(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """While it is open each forward fills the list: the outputs `[.., K]` of `layers`, which are
    numbered from 0, in their order."""
    found: list[Tensor] = [None] * len(layers)  # type: ignore[list-item]

    def keep(place: int, module: nn.Module, given: Any, made: Any) -> None:
        found[place] = made[0] if isinstance(made, tuple) else made

    hooks = [
        model.base_model.layers[layer].register_forward_hook(partial(keep, place))
        for place, layer in enumerate(layers)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
