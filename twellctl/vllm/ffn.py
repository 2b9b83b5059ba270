"""The gated FFN of a vLLM model over TwELL, its weights in vLLM's own linear layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from twellctl.bundle.twell_ffn import sparse_ffn
from twellctl.bundle.twell_model import by_rows_of_neurons
from twellctl.bundle.twell_train import define_operators
from twellctl.here.own_kernels import own_kernels
from twellctl.vllm.routes import Layer


class TwellFFN(nn.Module):
    """`down(relu(gate(x)) * up(x))`, `[..., K]` to `[..., K]`, in the place of `stock`.

    It takes over the linear layers of `stock`, and so their shards: with tensor parallelism each
    rank has N / ranks neurons, and the results are added up. `begin` is called with the device
    when the weights are loaded.
    """

    def __init__(
        self,
        stock: nn.Module,
        tile: int,
        slots: int,
        density: float,
        begin: Callable[[torch.device], None],
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = stock.gate_up_proj, stock.down_proj
        self.gate_up_proj.quant_method = _AsStored()
        self.down_proj.quant_method = _ByRowsOfNeurons(begin)
        # a tensor: constants would make each layer a graph of its own to compile
        numbers = torch.tensor([tile, slots, density], dtype=torch.float64, device="cpu")
        self.register_buffer("numbers", numbers, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        b_down = down.bias if down.tp_rank == 0 else None  # of all ranks one adds it
        y = _ffn(x, gate_up.weight, down.weight, gate_up.bias, b_down, self.numbers)
        return tensor_model_parallel_all_reduce(y) if down.tp_size > 1 else y

    @property
    def layer(self) -> Layer:
        """What this rank computes of the layer."""
        tile, slots, density = self.numbers.tolist()
        b_down = self.down_proj.bias is not None and self.down_proj.tp_rank == 0
        K, N = self.down_proj.weight.shape
        biases = (self.gate_up_proj.bias is not None, b_down)
        return Layer(K, N, biases, int(tile), int(slots), density)


class _AsStored(UnquantizedLinearMethod):
    """Leaves the weight as it was loaded: vLLM packs it for a product of its own, on some CPUs."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


class _ByRowsOfNeurons(UnquantizedLinearMethod):
    """Lays the weight as the kernels read it."""

    def __init__(self, begin: Callable[[torch.device], None]) -> None:
        super().__init__()
        self.begin = begin

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.begin(layer.weight.device)
        layer.weight.data = by_rows_of_neurons(layer.weight.data)


def _run(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    numbers: Tensor,
) -> Tensor:
    tile, slots, density = numbers.tolist()
    biases = (None, None) if b_gate_up is None else b_gate_up.chunk(2)
    return sparse_ffn(
        *(x, *w_gate_up.chunk(2), w_down, *biases, b_down),
        tile=int(tile),
        slots=int(slots),
        density=density,
        sources=own_kernels(),
    )


def _fake(x: Tensor, w_gate_up: Tensor, w_down: Tensor, *rest: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], w_down.shape[0])


_SCHEMA = (
    "(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor? b_gate_up, Tensor? b_down, "
    "Tensor numbers) -> Tensor"
)
_library = torch.library.Library("twell", "FRAGMENT")
define_operators(_library, "vllm", ("ffn", _SCHEMA, _run, _fake))
_ffn = torch.ops.twell.ffn_vllm.default
