"""The weights of one gated FFN, as fitting holds and changes them, and the text to fit it on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_model import weights_of
from twellctl.here.processes import sum_over_processes

AT_ONCE = 8192  # tokens whose features are held


@dataclass(frozen=True)
class FfnText:
    """What an FFN reads and is to give, for all tokens of this process.

    `z` `[T, K]` is its input, `weights` `[T]` is what the squared error of a token counts, and
    `wanted(tokens)` is the output wanted `[*, K]`, float32, of a slice or index of the tokens.
    """

    z: Tensor
    weights: Tensor
    wanted: Callable[[slice | Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.z)

    def parts(self, stride: int = 1) -> Iterator[slice]:
        """Its tokens, in parts of as many as features are held of; every `stride`-th part."""
        starts = range(0, len(self), AT_ONCE * stride)
        return (slice(i, min(i + AT_ONCE, len(self))) for i in starts)

    def squares(self, *outputs: Tensor) -> list[float]:
        """Of each of `outputs` `[T, K]` its weighted square, summed over all processes."""
        found = [(out.square().sum(-1) * self.weights).double().sum() for out in outputs]
        sums = torch.stack(found)
        sum_over_processes(sums)
        return sums.tolist()


def token_weights(states: Tensor) -> Tensor:
    """`[T]`: one over the mean square of each of the states `[..., K]`."""
    return 1 / states.flatten(0, -2).square().mean(-1).clamp(min=1e-12)


@dataclass(frozen=True)
class GatedFfn:
    """`down(act(gate(z)) * up(z))`: gate and up `[N, K]`, down `[K, N]`, biases or None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, ffn: nn.Module) -> "GatedFfn":
        """The weights of a stock module, packed or separate."""
        gate, up, down = weights_of(ffn).weights
        return cls(gate.values, up.values, down.values, gate.bias, up.bias, down.bias)

    def named(self, ffn: nn.Module) -> dict[str, Tensor]:
        """The tensors under the names that the stock module `ffn` has for them."""
        named = {"down_proj.weight": self.down, "down_proj.bias": self.down_bias}
        pairs = {"weight": (self.gate, self.up), "bias": (self.gate_bias, self.up_bias)}
        for kind, (gate, up) in pairs.items():
            if not hasattr(ffn, "gate_up_proj"):
                named |= {f"gate_proj.{kind}": gate, f"up_proj.{kind}": up}
            elif gate is not None and up is not None:
                named[f"gate_up_proj.{kind}"] = torch.cat([gate, up])
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def stored(self, ffn: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors as a file holds them, under the names that the stock module `ffn` has."""
        return {name: tensor.to(dtype) for name, tensor in self.named(ffn).items()}

    def gates(self, z: Tensor) -> Tensor:
        """`[T, N]` before the activation, of inputs `[T, K]`."""
        return F.linear(z, self.gate.to(z.dtype), _like(self.gate_bias, z))

    def ups(self, z: Tensor) -> Tensor:
        """`[T, N]`, of inputs `[T, K]`."""
        return F.linear(z, self.up.to(z.dtype), _like(self.up_bias, z))

    def __call__(self, z: Tensor, act: Callable[[Tensor], Tensor] = torch.relu_) -> Tensor:
        """`[T, K]`, with the activation `act`."""
        hidden = act(self.gates(z)).mul_(self.ups(z))
        return F.linear(hidden, self.down.to(z.dtype), _like(self.down_bias, z))

    def rounded(self, dtype: torch.dtype) -> "GatedFfn":
        """Each weight as `dtype` holds it, still in the dtype that it has."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: v.to(dtype).to(v.dtype) for name, v in values.items()})

    def first(self, num_neurons: int) -> "GatedFfn":
        """The first neurons alone."""
        gate_bias, up_bias = (
            b if b is None else b[:num_neurons] for b in (self.gate_bias, self.up_bias)
        )
        rows = self.gate[:num_neurons], self.up[:num_neurons], self.down[:, :num_neurons]
        return GatedFfn(*rows, gate_bias, up_bias, self.down_bias)

    def with_map(self, direction: Tensor, map_up: Tensor, map_down: Tensor) -> "GatedFfn":
        """`map_down map_up z` added, as R neurons whose gate is `direction` `[K]`.

        `map_up` is `[R, K]`, `map_down` `[K, R]`; row and column of a neuron get the same length.
        """
        lengths = map_down.norm(dim=0).clamp(min=1e-9), map_up.norm(dim=1).clamp(min=1e-9)
        scale = (lengths[0] / lengths[1]).sqrt()
        rank = len(map_up)
        return replace(
            self,
            gate=torch.cat([self.gate, direction.expand(rank, -1)]),
            up=torch.cat([self.up, map_up * scale[:, None]]),
            down=torch.cat([self.down, map_down / scale], 1),
            **self.longer_biases(rank),
        )

    def longer_biases(self, more: int) -> dict[str, Tensor | None]:
        """The biases of gate and up, of `more` neurons without any."""
        biases = {"gate_bias": self.gate_bias, "up_bias": self.up_bias}
        return {n: b if b is None else F.pad(b, (0, more)) for n, b in biases.items()}


def _like(bias: Tensor | None, z: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(z.dtype)
