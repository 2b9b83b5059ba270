"""A gated FFN whose weights are rounded."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twellctl.bundle import twell_int4
from twellctl.fitting.ffn import GatedFfn
from twellctl.fitting.grid import Codes


@dataclass(frozen=True)
class RoundedFfn(GatedFfn):
    """As `GatedFfn`; its weights are those of `codes`, of gate, up and down."""

    codes: tuple[Codes, ...] = ()

    @classmethod
    def of_codes(
        cls, gate: Codes, up: Codes, down: Codes, biases: dict[str, Tensor | None]
    ) -> "RoundedFfn":
        """That of these weights, with `biases` by the names of their fields."""
        gate_bias, up_bias, down_bias = map(biases.get, ("gate_bias", "up_bias", "down_bias"))
        weights = gate.weight, up.weight, down.weight
        return cls(*weights, gate_bias, up_bias, down_bias, (gate, up, down))

    def stored(self, ffn: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """The packed weights, and biases in `dtype`."""
        codes, scales = (
            GatedFfn(*parts).named(ffn)
            for parts in zip(*((c.codes, c.scales) for c in self.codes), strict=True)
        )
        made = dict[str, Tensor]()
        for name, tensor in super().stored(ffn, dtype).items():
            if name in codes:
                made |= twell_int4.named(name.removesuffix(".weight"), codes[name], scales[name])
            else:
                made[name] = tensor
        return made
