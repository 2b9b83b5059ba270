"""One layer in its turn: the layer of both models, and the hidden states of both at it.

The original model's states and the changed model's are what goes into the layer, until `ffn_text`
is called, or `advance`. From then on the original's are what its layer gives, and the changed
model's what the changed layer gives without its FFN, whose inputs are held instead. `advance` adds
what the changed FFN gives. So the states of a model are held once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_model import activation_name, activation_of
from twellctl.fitting.ffn import FfnText, GatedFfn, token_weights
from twellctl.fitting.layerwise import Layer
from twellctl.here.processes import num_processes

FFN_TOKENS = 8192  # for this many the outputs of the original FFN are computed at once


@dataclass
class States:
    """Hidden states `[W + H, L, K]` of both models: of W windows to fit on, then of H held out.

    `at_once` windows go through a layer together. `dtype` is that of the FFN's inputs.
    """

    original: Tensor
    changed: Tensor
    num_fitted: int
    at_once: int
    dtype: torch.dtype

    @property
    def fitted(self) -> slice:
        return slice(0, self.num_fitted)

    @property
    def held_out(self) -> slice:
        return slice(self.num_fitted, len(self.original))

    def batches(self, windows: slice) -> list[slice]:
        """`windows`, in parts of `at_once`."""
        starts = range(windows.start, windows.stop, self.at_once)
        return [slice(start, min(start + self.at_once, windows.stop)) for start in starts]


@dataclass(frozen=True)
class Read:
    """A batch of tokens at some linear layers, by name.

    `inputs` `[T, in]` are what each reads in the changed model, `wanted` `[T, out]` what it gives
    in the original model, on that one's own states; `weights` `[T]` are those of the states that
    go into its layer. The changed model's states there are `away` `[T, K]` from the original's.
    """

    inputs: dict[str, Tensor]
    wanted: dict[str, Tensor]
    weights: Tensor
    away: Tensor


class Block:
    """What a method is given (`method.py`). `seed` is of this block and this process."""

    def __init__(self, layer: Layer, states: States, activation: nn.Module | None, seed: int):
        self.original, self.changed, self.seed = layer, layer.copy(), seed
        if activation is not None:
            ffn = self.changed.ffn
            setattr(ffn, activation_name(ffn), activation)
        self._states = states
        self._z: Tensor | None = None  # the FFN's inputs, once states were moved
        self._before: Tensor | None = None  # states before the layer, if they are needed again

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the changed layer have these weights and biases; names it does not have are left."""
        self.changed.put(tensors)

    @torch.no_grad()
    def reads(self, names: Sequence[str], tokens: int | None = None) -> Iterator[Read]:
        """What the linear layers `names` read and are to give, for the text that is fitted on.

        All are read in the same forward, which ends at the last of them. Inputs depend on what was
        put so far. `tokens`: the first windows that have so many, of all processes together, are
        enough.
        """
        assert self._z is None, "the states have left the block's beginning"
        states = self._states
        windows = states.fitted
        if tokens is not None:
            count = -(-tokens // (states.original.shape[1] * num_processes()))
            windows = slice(0, min(count, windows.stop))
        for part in states.batches(windows):
            before, changed = states.original[part].float(), states.changed[part].float()
            _, wanted = _recorded(self.original, before, names)
            inputs, _ = _recorded(self.changed, changed, names)
            away = (before - changed).flatten(0, 1)
            yield Read(inputs, wanted, token_weights(before), away)

    def ffn_text(self) -> FfnText:
        """What the changed layer's FFN reads and is to give, for the text that is fitted on."""
        return self._text(self._states.fitted)

    def ffn_held_out(self) -> FfnText:
        """The same for the text that is held out."""
        return self._text(self._states.held_out)

    @torch.no_grad()
    def advance(self) -> None:
        """Make the states what both layers give; the block is of no use any more."""
        z, states, factor = self._ffn_inputs(), self._states.changed, self.original.factor
        ffn, act = GatedFfn.of(self.changed.ffn), activation_of(self.changed.ffn)
        for part in self._all_batches():
            output = ffn(z[part].flatten(0, 1), act).view_as(z[part])
            if factor is not None:
                states[part] = states[part].float() + factor * output.float()
            else:
                assert self._before is not None
                states[part] = self.changed.with_output(self._before[part].float(), output)

    def _text(self, windows: slice) -> FfnText:
        inputs = self._ffn_inputs()[windows].flatten(0, 1)
        original = self._states.original[windows].flatten(0, 1)
        changed = self._states.changed[windows].flatten(0, 1)
        parts = original.split(FFN_TOKENS)
        weights = torch.cat([token_weights(part.float()) for part in parts])
        if (factor := self.original.factor) is not None:
            return FfnText(
                inputs, weights, lambda t: (original[t].float() - changed[t].float()) / factor
            )
        own = torch.cat([self.original.gated(part) for part in inputs.split(FFN_TOKENS)])
        return FfnText(inputs, weights, lambda t: own[t])

    @torch.no_grad()
    def _ffn_inputs(self) -> Tensor:
        """`[W + H, L, K]`; the first call moves the states through the layers, but for this FFN."""
        if self._z is None:
            states = self._states
            if self.original.factor is None:
                self._before = states.changed.clone()
            self._z = torch.empty_like(states.changed, dtype=states.dtype)
            for part in self._all_batches():
                states.original[part] = self.original(states.original[part].float())
                without_ffn, z = self.changed.apart(states.changed[part].float(), states.dtype)
                states.changed[part], self._z[part] = without_ffn, z
        return self._z

    def _all_batches(self) -> list[slice]:
        return self._states.batches(slice(0, len(self._states.original)))


class _AllRead(Exception):
    """What was to be read has been: the rest of a layer need not be computed."""


def _recorded(
    layer: Layer, states: Tensor, names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(inputs, outputs) `[T, *]` of the linear layers `names`, for states `[B, L, K]`."""
    inputs, outputs = dict[str, Tensor](), dict[str, Tensor]()

    def record(name: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        inputs[name], outputs[name] = args[0].flatten(0, -2), output.flatten(0, -2)
        if len(outputs) == len(names):
            raise _AllRead

    with ExitStack() as hooks:
        for name in names:
            module = layer.module.get_submodule(name)
            hooks.callback(module.register_forward_hook(partial(record, name)).remove)
        with suppress(_AllRead):
            layer(states)
    return inputs, outputs
