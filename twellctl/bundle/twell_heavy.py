"""Heavy rows on Hopper: tokens that the lists of twell_sequence.py leave out, computed densely.

    heavy_gather -> heavy_hidden -> heavy_down

Only the device knows which rows these are. So the three kernels are launched for each window of
tokens, and do nothing where the window has no heavy row. They stand in kernels/ffn/heavy.cu.
"""

from torch import Tensor

from . import twell_spec as spec
from .twell_launch import KernelSet, tensor_map
from .twell_plan import HEAVY_SMEM, Limits, heavy_window, product_grid
from .twell_weights import FFN


def heavy_products(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    y: Tensor,
    ffn: FFN,
    heavy_rows: Tensor,
    heavy_count: Tensor,
    *,
    training: bool = False,
) -> None:
    """Write the heavy rows of `y` `[M, K]`, computed from those of `x`, window by window.

    `heavy_rows` int32 `[M]` lists them; `heavy_count` int32 `[1]` says how many it lists.
    `training`: smaller windows.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    window = heavy_window(M, N, K, training=training)
    x_rows, hidden = x.new_empty((window, K)), y.new_empty((window, N))
    maps_of_hidden = (
        tensor_map(x_rows, spec.INPUT_BOX_ROWS),
        tensor_map(ffn.gate.values, spec.WEIGHT_BOX_ROWS),
        tensor_map(ffn.up.values, spec.WEIGHT_BOX_ROWS),
    )
    maps_of_down = (
        tensor_map(hidden, spec.INPUT_BOX_ROWS),
        tensor_map(ffn.by_neurons, spec.PRODUCT_INNER),
    )
    for start in range(0, M, window):
        kernels.launch(
            "heavy_gather",
            (min(window, 4 * limits.num_sms),),
            spec.GATHER_BLOCK,
            (x, heavy_rows, heavy_count, start, window, K, x_rows),
        )
        kernels.launch(
            "heavy_hidden",
            (product_grid(window, 2 * N, limits.num_sms),),
            spec.PRODUCT_BLOCK,
            (*maps_of_hidden, ffn.gate.bias, ffn.up.bias, heavy_count, start, window, N, K, hidden),
            HEAVY_SMEM,
        )
        kernels.launch(
            "heavy_down",
            (product_grid(window, K, limits.num_sms),),
            spec.PRODUCT_BLOCK,
            (*maps_of_down, ffn.down.bias, heavy_rows, heavy_count, start, window, N, K, y),
            HEAVY_SMEM,
        )
