"""A stock model, run one layer at a time: what goes into its first layer, each layer, its head.

Layers stay where the model was loaded (on the CPU); each is copied to the device for its turn. So a
device holds one layer, and what lies around them. All arguments that the model's own code gives a
layer (masks, rotary positions) are recorded from a call of it, so that every family works.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bundle.twell_int4 import expanded
from twellctl.bundle.twell_model import activation_of, gated_ffns
from twellctl.errors import TwellError
from twellctl.fitting.ffn import GatedFfn
from twellctl.models.layers import ffn_layers
from twellctl.models.loading import without_mask

PROBE_TOKENS = 8
DIRECT = 0.02  # relative error up to which a layer is said to add its FFN's output as it is


class Layerwise:
    """`model`, in eval mode, for windows of `seq_len` tokens."""

    def __init__(self, model: PreTrainedModel, seq_len: int, device: torch.device):
        without_mask(model, seq_len)
        self.model, self.seq_len, self.device = model, seq_len, device
        self.layers = ffn_layers(model)
        self.hidden_size = model.config.get_text_config().hidden_size
        inside = {id(p) for layer in self.layers for p in [*layer.parameters(), *layer.buffers()]}
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
        self._given: list[tuple[tuple, dict]] = []
        self._returns_tuple = False

    @torch.no_grad()
    def first_states(self, ids: Tensor) -> Tensor:
        """What goes into the first layer `[B, L, K]` float32, for ids `[B, L]`."""
        if not self._given:
            self._run_to_layers(ids[:1], self._given)  # masks of one window suit any number
        return self._run_to_layers(ids, [])

    def _run_to_layers(self, ids: Tensor, given: list[tuple[tuple, dict]]) -> Tensor:
        """The states at the first layer; `given` gets what else each layer was given."""
        seen: list[Tensor] = []

        def record(index: int) -> Callable:
            def forward(states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
                if not index:
                    seen.append(states)
                given.append((args, kwargs))
                return (states,) if self._returns_tuple else states

            return forward

        with self._instead(record), self._computing():
            self.model.base_model(input_ids=ids.to(self.device), use_cache=False)
        return seen[0].float()

    @torch.no_grad()
    def logits(self, ids: Tensor, states: Tensor) -> Tensor:
        """`[B, L, V]` float32, of what the last layer gave."""

        def give(index: int) -> Callable:
            return lambda *args, **kwargs: (states,) if self._returns_tuple else states

        with self._instead(give), self._computing():
            return self.model(input_ids=ids.to(self.device), use_cache=False).logits.float()

    def layer(self, index: int) -> "Layer":
        """Layer `index`, a copy in float32 on the device; `first_states` was called before."""
        module = copy.deepcopy(self.layers[index]).to(self.device, torch.float32)
        args, kwargs = self._given[index]
        layer = Layer(module, args, kwargs, self._computing)
        self._returns_tuple = layer.returns_tuple
        return layer

    @contextlib.contextmanager
    def _instead(self, forward: Callable[[int], Callable]) -> Iterator[None]:
        """Inside, layer i calls `forward(i)` instead of its own."""
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = forward(index)
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def _computing(self) -> contextlib.AbstractContextManager:
        on_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu)


class Layer:
    """A decoder layer `states + attention, then + factor * FFN`, as far as it is one."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, computing: Callable):
        self.module, self._args, self._kwargs, self._computing = module, args, kwargs, computing
        self.returns_tuple = False
        self.factor = self.factor_of(self.ffn_name)

    @property
    def ffn(self) -> nn.Module:
        """Its gated FFN."""
        (ffn,) = gated_ffns(self.module)
        return ffn

    @property
    def weights(self) -> GatedFfn:
        """The FFN's weights."""
        return GatedFfn.of(self.ffn)

    @property
    def ffn_name(self) -> str:
        """What the layer calls its FFN."""
        return next(name for name, module in self.module.named_modules() if module is self.ffn)

    def linears(self) -> list[list[str]]:
        """The names of its linear layers as they are called; those that read one input, together.

        It is called once to see that. `TwellError` for one that it does not call.
        """
        called: list[tuple[Tensor, list[str]]] = []

        def record(name: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if not (called and called[-1][0] is args[0]):
                called.append((args[0], []))
            called[-1][1].append(name)

        linears = {n: m for n, m in self.module.named_modules() if type(m) is nn.Linear}
        with contextlib.ExitStack() as hooks:
            for name, module in linears.items():
                handle = module.register_forward_hook(functools.partial(record, name))
                hooks.callback(handle.remove)
            down = self.weights.down
            self(torch.zeros(1, self._probe_length(), len(down), device=down.device))
        found = [names for _, names in called]
        if unused := sorted(linears.keys() - {name for names in found for name in names}):
            raise TwellError(f"{unused[0]} is not called when its layer is: it cannot be rounded")
        return found

    def factor_of(self, name: str) -> float | None:
        """What the layer multiplies the output of its module `name` with before it adds it to the
        states; None: it does more, such as normalise it first."""
        device, size = self.weights.down.device, (1, self._probe_length(), len(self.weights.down))
        generator = torch.Generator(device).manual_seed(0)
        states, output = (torch.randn(size, generator=generator, device=device) for _ in range(2))
        module = self.module.get_submodule(name)

        def gives(output: Tensor) -> Tensor:
            """What the layer gives if this module gives `output`, and an FFN behind it nothing."""
            hook = module.register_forward_hook(lambda m, args, out: output.to(out.dtype))
            try:
                return self._with_ffn(torch.zeros_like, states)
            finally:
                hook.remove()

        added = gives(output) - gives(torch.zeros_like(output))
        factor = float((added * output).sum() / output.square().sum())
        error = float((added - factor * output).norm() / added.norm().clamp(min=1e-9))
        return factor if error < DIRECT and abs(factor) > 1e-6 else None

    def copy(self) -> "Layer":
        """The same layer, over the same tensors; what is `put` into one the other does not get."""
        made, tensors = copy.copy(self), [*self.module.parameters(), *self.module.buffers()]
        made.module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})
        return made

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights, packed or not, and biases by these; sizes of the FFN may be others."""
        tensors = expanded(tensors)
        for name in tensors.keys() & dict(self.module.named_parameters()).keys():
            owner, _, kind = name.rpartition(".")
            weight = nn.Parameter(tensors[name].to(self.weights.down.device, torch.float32), False)
            setattr(self.module.get_submodule(owner), kind, weight)

    def __call__(self, states: Tensor) -> Tensor:
        """What it gives for states `[B, L, K]`, in float32."""
        with torch.no_grad(), self._computing():
            out = self.module(states, *self._args, **self._kwargs)
        self.returns_tuple = isinstance(out, tuple)
        return (out[0] if self.returns_tuple else out).float()

    def apart(self, states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(what it gives if its FFN gives nothing, what the FFN reads in `dtype`)."""
        read: list[Tensor] = []

        def nothing(z: Tensor) -> Tensor:
            read.append(z.to(dtype))
            return torch.zeros_like(z)

        return self._with_ffn(nothing, states), read[0]

    def with_output(self, states: Tensor, output: Tensor) -> Tensor:
        """What it gives if its FFN gives `output` `[B, L, K]`."""
        return self._with_ffn(lambda z: output.to(z.dtype), states)

    def gated(self, z: Tensor) -> Tensor:
        """What its FFN gives with its own activation, for inputs `[T, K]`, in float32."""
        with torch.no_grad(), self._computing():
            weights = self.weights
            hidden = activation_of(self.ffn)(weights.gates(z)) * weights.ups(z)
            out = hidden @ weights.down.to(hidden.dtype).T
            if weights.down_bias is not None:
                out = out + weights.down_bias
        return out.float()

    def _with_ffn(self, forward: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        ffn = self.ffn
        ffn.forward = forward
        try:
            return self(states)
        finally:
            del ffn.forward

    def _probe_length(self) -> int:
        """How many tokens the recorded arguments are for."""
        positions = self._kwargs.get("position_embeddings")
        first = positions[0] if isinstance(positions, tuple | list) else positions
        return PROBE_TOKENS if first is None else first.shape[1]
