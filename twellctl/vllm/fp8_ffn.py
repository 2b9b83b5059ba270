"""The gated FFN of a vLLM model over TwELL, its weights in vLLM's own FP8 linear layers.

vLLM turns an e4m3 weight `[N, K]` into a view `[K, N]` of the same bytes, with the scales of its
rows `[N, 1]`: turned back it is what the kernels read. Of W_down they want another layout, which
is made beside it. Where the kernels do not run, or dense is faster, vLLM's own layers compute; one
operator hides which, so that a compiled graph holds for both. It hides from vLLM's compiler what
could be fused around their products, so that is compiled by itself.
"""

import functools
import itertools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from twellctl.bundle.twell_ffn import fp8_ffn_beside
from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_fp8 import E4M3, Fp8Weight
from twellctl.bundle.twell_train import define_operators
from twellctl.here.own_kernels import own_kernels
from twellctl.vllm.routes import Layer, engines_way

_places = itertools.count()
_ffns: weakref.WeakValueDictionary[int, "TwellFp8FFN"] = weakref.WeakValueDictionary()


class TwellFp8FFN(nn.Module):
    """`down(relu(gate(x)) * up(x))`, `[..., K]` to `[..., K]`, in the place of `stock`.

    It takes over the linear layers of `stock`, and so their shards, as `TwellFFN` does. `begin` is
    called with the device when the weights are loaded, and says whether the kernels are used.
    `compiled`: whether vLLM compiles models.
    """

    def __init__(
        self,
        stock: nn.Module,
        tile: int,
        slots: int,
        density: float,
        begin: Callable[[torch.device], bool],
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.compiled = compiled
        self.gate_up_proj, self.down_proj = stock.gate_up_proj, stock.down_proj
        self.down_proj.quant_method = _AsStockThen(self.down_proj.quant_method, self._lay)
        self.tile, self.slots, self.density, self.begin = tile, slots, density, begin
        self.turned: Tensor | None = None  # W_down by rows of neurons, if the kernels are used
        place = next(_places)
        _ffns[place] = self
        # a tensor: a constant would make each layer a graph of its own to compile
        self.register_buffer("place", torch.tensor([place], device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = _ffn(x, self.place)
        return tensor_model_parallel_all_reduce(y) if self.down_proj.tp_size > 1 else y

    @property
    def layer(self) -> Layer:
        """What this rank computes of the layer."""
        K, N = self.down_proj.output_size, self.down_proj.input_size_per_partition
        biases = (self.gate_up_proj.bias is not None, self._b_down is not None)
        return Layer(K, N, biases, self.tile, self.slots, self.density)

    def compute(self, x: Tensor) -> Tensor:
        """What this rank adds to y."""
        if self.turned is None:
            return self.compute_densely(x)
        gate_up, down = self.weights
        return fp8_ffn_beside(
            engines_way(self.compute_densely),
            *(x, *gate_up.chunk(2), down, self.turned),
            slots=self.slots,
            tile=self.tile,
            sources=own_kernels(),
            density=self.density,
        )

    def compute_densely(self, x: Tensor) -> Tensor:
        """The same by vLLM's own linear layers."""
        run = _compiled() if self.compiled else _densely
        return run(x, self.gate_up_proj, self.down_proj, self._b_down)

    @property
    def weights(self) -> tuple[Fp8Weight, Fp8Weight]:
        """Of gate and up, `[2N, K]`, and of down, `[K, N]`: views of what vLLM holds."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return (
            Fp8Weight(gate_up.weight.t(), gate_up.weight_scale, gate_up.bias),
            Fp8Weight(down.weight.t(), down.weight_scale, self._b_down),
        )

    def why_not_read(self) -> str | None:
        """None if the kernels read what vLLM made of these weights, else why not.

        Asked of layers whose weights vLLM has processed.
        """
        K, N = self.layer.K, self.layer.N
        for linear, rows, columns in ((self.gate_up_proj, 2 * N, K), (self.down_proj, K, N)):
            held, scale = linear.weight, getattr(linear, "weight_scale", None)
            as_stored = held.dtype == E4M3 and held.shape == (columns, rows)
            scaled = scale is not None and scale.dtype == torch.float32 and scale.numel() == rows
            if not (as_stored and scaled and held.t().is_contiguous()):
                return "vLLM holds these weights in a layout of its own (--linear-backend?)"
        return None

    @property
    def _b_down(self) -> Tensor | None:
        """The bias of down, which one of all ranks adds."""
        return self.down_proj.bias if self.down_proj.tp_rank == 0 else None

    def _lay(self) -> None:
        """Both linear layers are as vLLM wants them: that of down comes last."""
        weight, before, self.turned = self.down_proj.weight, self.turned, None
        if not self.begin(weight.device):
            return
        if before is not None and before.shape == weight.shape:  # captured graphs read it there
            self.turned = before.copy_(weight)
        else:
            self.turned = weight.contiguous()


class _AsStockThen(QuantizeMethodBase):
    """vLLM's own method of a linear layer; when it has processed the weights, `then` is called."""

    def __init__(self, stock: QuantizeMethodBase, then: Callable[[], None]) -> None:
        self.stock, self.then = stock, then

    def create_weights(self, layer: nn.Module, *sizes, **attributes) -> None:
        self.stock.create_weights(layer, *sizes, **attributes)

    def apply(self, layer: nn.Module, *inputs) -> Tensor:
        return self.stock.apply(layer, *inputs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.stock.process_weights_after_loading(layer)
        self.then()


def _densely(x: Tensor, gate_up: nn.Module, down: nn.Module, b_down: Tensor | None) -> Tensor:
    gate, up = gate_up.quant_method.apply(gate_up, x, gate_up.bias).chunk(2, -1)
    return down.quant_method.apply(down, keep_fired(gate) * up, b_down).contiguous()


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_densely, dynamic=True)


def _run(x: Tensor, place: Tensor) -> Tensor:
    return _ffns[place.item()].compute(x)


def _fake(x: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library = torch.library.Library("twell", "FRAGMENT")
define_operators(_library, "vllm", ("fp8_ffn", "(Tensor x, Tensor place) -> Tensor", _run, _fake))
_ffn = torch.ops.twell.fp8_ffn_vllm.default
