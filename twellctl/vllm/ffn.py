"""The gated FFN of a vLLM model over TwELL, its weights in vLLM's own linear layers.

One operator hides from vLLM's compiler which way is taken, so that a compiled graph holds for all.
"""

import itertools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from twellctl.bundle.twell_ffn import sparse_ffn
from twellctl.bundle.twell_measured import Sizes
from twellctl.bundle.twell_model import by_rows_of_neurons
from twellctl.bundle.twell_train import define_operators
from twellctl.bundle.twell_weights import FFN, plain_weight
from twellctl.here.own_kernels import own_kernels
from twellctl.vllm.plans import Layer, Planned

_places = itertools.count()
_ffns: weakref.WeakValueDictionary[int, "TwellFFN"] = weakref.WeakValueDictionary()


class TwellFFN(nn.Module):
    """`down(relu(gate(x)) * up(x))`, `[..., K]` to `[..., K]`, in the place of `stock`.

    It takes over the linear layers of `stock`, and so their shards: with tensor parallelism each
    rank has N / ranks neurons, and the results are added up. `begin` is called with the device
    when the weights are loaded, and tells by which ways the FFNs go.
    """

    kind = "bf16"  # of the weights

    def __init__(
        self,
        stock: nn.Module,
        tile: int,
        slots: int,
        density: float,
        begin: Callable[[torch.device], Planned],
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = stock.gate_up_proj, stock.down_proj
        self.tile, self.slots, self.density, self._begin = tile, slots, density, begin
        self.plan = ""  # of its ways, once the weights are loaded; none: it goes densely
        self._take_methods()
        place = next(_places)
        _ffns[place] = self
        # a tensor: a constant would make each layer a graph of its own to compile
        self.register_buffer("place", torch.tensor([place], device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = _ffn(x, *self.rounded(x), self.place)
        return tensor_model_parallel_all_reduce(y) if self.down_proj.tp_size > 1 else y

    def rounded(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`x` rounded, and its scales, if they are wanted."""
        return None, None

    @property
    def layer(self) -> Layer:
        """What this rank computes of the layer."""
        K, N = self.down_proj.output_size, self.down_proj.input_size_per_partition
        biases = (self.gate_up_proj.bias is not None, self._b_down is not None)
        return Layer(Sizes(K, N, biases, self.kind), self.tile, self.slots, self.density)

    def compute(self, x: Tensor, values: Tensor | None, scales: Tensor | None) -> Tensor:
        """What this rank adds to y; `values`, `scales` as `rounded` gave them."""
        gate_up = plain_weight(self.gate_up_proj.weight, self.gate_up_proj.bias)
        down = plain_weight(self.down_proj.weight, self._b_down)
        return sparse_ffn(
            x,
            FFN(*gate_up.chunk(2), down),
            tile=self.tile,
            slots=self.slots,
            density=self.density,
            sources=own_kernels(),
            route="dense",
            plan=self.plan,
        )

    @property
    def _b_down(self) -> Tensor | None:
        """The bias of down, which one of all ranks adds."""
        return self.down_proj.bias if self.down_proj.tp_rank == 0 else None

    def _take_methods(self) -> None:
        self.gate_up_proj.quant_method = _AsStored()
        self.down_proj.quant_method = StockThen(_AsStored(), self._lay)

    def _lay(self) -> None:
        """The weights are loaded, that of down last: it is laid as the kernels read it."""
        weight = self.down_proj.weight
        self.begin(weight.device)
        weight.data = by_rows_of_neurons(weight.data)

    def begin(self, device: torch.device) -> bool:
        """Ask for the plan; whether any tokens go over what fires."""
        plan = self._begin(device).plans.get(self.layer.sizes)
        self.plan = "" if plan is None else str(plan)
        return plan is not None


class StockThen(QuantizeMethodBase):
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


class _AsStored(UnquantizedLinearMethod):
    """Leaves the weight as it was loaded: vLLM packs it for a product of its own, on some CPUs."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


def _run(x: Tensor, values: Tensor | None, scales: Tensor | None, place: Tensor) -> Tensor:
    return _ffns[place.item()].compute(x, values, scales)


def _fake(x: Tensor, *rest: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_SCHEMA = "(Tensor x, Tensor? values, Tensor? scales, Tensor place) -> Tensor"
_library = torch.library.Library("twell", "FRAGMENT")
define_operators(_library, "vllm", ("ffn", _SCHEMA, _run, _fake))
_ffn = torch.ops.twell.ffn_vllm.default
