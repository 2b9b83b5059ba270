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
    of_gather = {"x": x, "heavy_rows": heavy_rows, "num_inner": K, "x_rows": x_rows}
    of_hidden = {
        "x_map": tensor_map(x_rows, spec.INPUT_BOX_ROWS),
        "gate_map": tensor_map(ffn.gate.values, spec.WEIGHT_BOX_ROWS),
        "up_map": tensor_map(ffn.up.values, spec.WEIGHT_BOX_ROWS),
        "b_gate": ffn.gate.bias,
        "b_up": ffn.up.bias,
        "num_columns": N,
        "num_inner": K,
        "hidden": hidden,
    }
    of_down = {
        "hidden_map": tensor_map(hidden, spec.INPUT_BOX_ROWS),
        "down_map": tensor_map(ffn.by_neurons, spec.PRODUCT_INNER),
        "b_down": ffn.down.bias,
        "heavy_rows": heavy_rows,
        "num_columns": N,
        "num_inner": K,
        "y": y,
    }
    gather_grid = min(window, 4 * limits.num_sms)
    hidden_grid = product_grid(window, 2 * N, limits.num_sms)
    down_grid = product_grid(window, K, limits.num_sms)
    for start in range(0, M, window):
        at = {"heavy_count": heavy_count, "window_start": start, "window": window}
        kernels.launch("heavy_gather", (gather_grid,), spec.GATHER_BLOCK, of_gather | at)
        kernels.launch(
            "heavy_hidden", (hidden_grid,), spec.PRODUCT_BLOCK, of_hidden | at, HEAVY_SMEM
        )
        kernels.launch("heavy_down", (down_grid,), spec.PRODUCT_BLOCK, of_down | at, HEAVY_SMEM)
