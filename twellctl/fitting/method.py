"""What a method is: all that is done to one block, a decoder layer, while the walk stands at it.

The walk (`walk.py`) knows states, targets, text that processes share, memory and resuming. A method
knows weights and sums. It gets a `Block` and gives a `Change`:

    block.original, block.changed   the layer as the model has it, and as it is so far
    block.reads(names)              for any of its linear layers, attention's included: what each
                                    reads in the changed model, and what the original's gives
    block.put(tensors)              tensors of the changed layer, by their names in it
    block.ffn_text()                what the changed FFN reads, and what it is to give so that the
                                    states after the block are the original's
    block.ffn_held_out()            the same for text that is held out, for figures

Whatever is put before `ffn_text` is called is part of what the FFN is fitted to. So a method that
changes attention too reads, sums and puts attention's weights first, and then fits the FFN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from twellctl.fitting.block import Block
from twellctl.fitting.layerwise import Layerwise

Figures = dict[str, float]


@dataclass(frozen=True)
class Change:
    """What became of a block.

    `tensors` are all that changed, by their names in the block (`self_attn.q_proj.weight`), in the
    dtypes in which they are stored. The layer takes those that are weights or biases of it;
    others, such as scales, are only kept. `figures` are for progress and the report.
    """

    tensors: dict[str, Tensor]
    figures: Figures


class Method(Protocol):
    """Changes one block after another. What it makes depends on its arguments alone.

    In several processes each has its own part of the text, and all must make the same tensors.
    """

    @property
    def activation(self) -> nn.Module | None:
        """The activation of the FFNs that it makes; None: their own."""

    def look(self, layerwise: Layerwise, ids: Tensor) -> None:
        """Look at the original, before any block: `ids` `[B, L]` are the same in all processes."""

    def change(self, block: Block, before: Sequence[Figures]) -> Change:
        """Change `block`; `before` are the figures of all blocks before it.

        `TwellError` says why it cannot be done, and the walk says in which layer.
        """
