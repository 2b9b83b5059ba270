"""The gated FFN of a vLLM model over TwELL, its weights in vLLM's own FP8 linear layers.

vLLM turns an e4m3 weight `[N, K]` into a view `[K, N]` of the same bytes, with the scales of its
rows `[N, 1]`: turned back it is what the kernels read. Of W_down they want another layout, which
is made, too. Where the kernels do not run, or dense is faster, vLLM's own layers compute.

vLLM's compiler rounds the input of a layer in the norm before it. So that it still can, x is
rounded outside of the operator, which takes both: ways over what fires read x as it is. What lies
between the two dense products is compiled by itself.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from twellctl.bundle.twell_e4m3 import DTYPE
from twellctl.bundle.twell_ffn import sparse_ffn_of_engine
from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_ways import Way
from twellctl.bundle.twell_weights import FFN, Weight
from twellctl.here.own_kernels import own_kernels
from twellctl.vllm.ffn import StockThen, TwellFFN
from twellctl.vllm.plans import engines_way


class TwellFp8FFN(TwellFFN):
    """The same of weights in e4m3. `compiled`: whether vLLM compiles models."""

    kind = "e4m3"

    def __init__(self, *given, compiled: bool = False) -> None:
        super().__init__(*given)
        self.compiled = compiled
        self.turned: Tensor | None = None  # W_down by rows of neurons, if the kernels are used
        self.rounds = _takes_rounded(self.gate_up_proj)

    def rounded(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`x` as vLLM rounds it for the layer of gate and up, if that takes it so."""
        return self.gate_up_proj.scheme.fp8_linear.quant_fp8(x) if self.rounds else (None, None)

    def compute(self, x: Tensor, values: Tensor | None, scales: Tensor | None) -> Tensor:
        """What this rank adds to y."""
        if self.turned is None:
            return self._densely(x, values, scales)
        gate_up, down = self.weights
        return sparse_ffn_of_engine(
            self.dense_way(x, values, scales),
            x,
            FFN(*gate_up.chunk(2), down, self.turned),
            slots=self.slots,
            tile=self.tile,
            sources=own_kernels(),
            plan=self.plan,
            density=self.density,
        )

    def dense_way(self, x: Tensor, *rounded: Tensor | None) -> Way:
        """vLLM's own linear layers over `x`; what `rounded` gives of it is made before they run."""
        return engines_way(functools.partial(self._densely, x, *(rounded or self.rounded(x))))

    def _densely(self, *x: Tensor | None) -> Tensor:
        run = _compiled() if self.compiled else _dense
        return run(*x, self.gate_up_proj, self.down_proj, self._b_down)

    @property
    def weights(self) -> tuple[Weight, Weight]:
        """Of gate and up, `[2N, K]`, and of down, `[K, N]`: views of what vLLM holds."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return (
            Weight("e4m3", gate_up.weight.t(), gate_up.weight_scale.reshape(-1, 1), gate_up.bias),
            Weight("e4m3", down.weight.t(), down.weight_scale.reshape(-1, 1), self._b_down),
        )

    def why_not_read(self) -> str | None:
        """None if the kernels read what vLLM made of these weights, else why not.

        Asked of layers whose weights vLLM has processed.
        """
        K, N = self.layer.sizes.K, self.layer.sizes.N
        for linear, rows, columns in ((self.gate_up_proj, 2 * N, K), (self.down_proj, K, N)):
            held, scale = linear.weight, getattr(linear, "weight_scale", None)
            as_stored = held.dtype == DTYPE and held.shape == (columns, rows)
            scaled = scale is not None and scale.dtype == torch.float32 and scale.numel() == rows
            if not (as_stored and scaled and held.t().is_contiguous()):
                return "vLLM holds these weights in a layout of its own (--linear-backend?)"
        return None

    def _take_methods(self) -> None:
        self.down_proj.quant_method = StockThen(self.down_proj.quant_method, self._lay)

    def _lay(self) -> None:
        """Both linear layers are as vLLM wants them: that of down comes last."""
        weight, before, self.turned = self.down_proj.weight, self.turned, None
        if not self.begin(weight.device):
            return
        if before is not None and before.shape == weight.shape:  # captured graphs read it there
            self.turned = before.copy_(weight)
        else:
            self.turned = weight.contiguous()


def _takes_rounded(linear: nn.Module) -> bool:
    """Whether this layer of vLLM's takes inputs that are rounded already; some round none."""
    kernel = getattr(getattr(linear, "scheme", None), "fp8_linear", None)
    plain = FP8ScaledMMLinearKernel.apply_weights
    return kernel is not None and getattr(type(kernel), "apply_weights", None) is plain


def _dense(
    x: Tensor,
    values: Tensor | None,
    scales: Tensor | None,
    gate_up: nn.Module,
    down: nn.Module,
    b_down: Tensor | None,
) -> Tensor:
    given = x
    if values is not None:
        key = gate_up.scheme.fp8_linear.input_quant_key()
        given = QuantizedActivation(values, scales, x.dtype, x.shape, key)
    gate, up = gate_up.quant_method.apply(gate_up, given, gate_up.bias).chunk(2, -1)
    return down.quant_method.apply(down, keep_fired(gate) * up, b_down).contiguous()


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_dense, dynamic=True)
