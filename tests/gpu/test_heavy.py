"""The kernel `heavy_down` by itself: hidden W_down^T with W_down by rows of neurons, exactly."""

import pytest
import torch
from on_gpu import HOPPER, whole
from torch import Tensor

from twellctl.bundle.twell_launch import device_limits, tensor_map
from twellctl.bundle.twell_plan import HEAVY_SMEM, product_grid
from twellctl.bundle.twell_spec import INPUT_BOX_ROWS, PRODUCT_BLOCK, PRODUCT_INNER

pytestmark = HOPPER
# M, N, K: one box and less, ragged in each, whole tiles, more tiles than a wave
SIZES = [
    (1, 8, 64), (64, 64, 64), (100, 72, 320), (256, 64, 256), (300, 520, 192), (513, 1000, 2048),
    (5000, 264, 1088),
]  # fmt: skip


def run_down(
    kernels,
    hidden: Tensor,
    w_down: Tensor,
    b_down: Tensor | None = None,
    rows: Tensor | None = None,
    count: int | None = None,
    few: int = 0,
) -> Tensor:
    """y `[M, K]`, over NaN; all rows unless `count` of `rows` are told."""
    (M, N), K = hidden.shape, w_down.shape[1]
    rows = torch.arange(M, dtype=torch.int32, device="cuda") if rows is None else rows
    count = rows.new_tensor([M if count is None else count])
    y = torch.full((M, K), torch.nan, dtype=torch.bfloat16, device="cuda")
    maps = tensor_map(hidden, INPUT_BOX_ROWS), tensor_map(w_down, PRODUCT_INNER)
    kernels.launch(
        "heavy_down",
        (product_grid(M, K, device_limits(0).num_sms),),
        PRODUCT_BLOCK,
        (*maps, b_down, rows, count, few, 0, M, N, K, y, None),
        HEAVY_SMEM,
    )
    return y


@pytest.mark.parametrize(("N", "K"), [(64, 64), (72, 320), (520, 192), (1000, 2048)])
def test_a_hidden_of_one_neuron_brings_its_row(kernels, N, K):
    """Every element of W_down by itself: what is at a wrong place is named."""
    torch.manual_seed(0)
    w_down = torch.randn(N, K, device="cuda").bfloat16()
    y = run_down(kernels, torch.eye(N, device="cuda").bfloat16(), w_down)
    wrong = (y != w_down).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} of {N} x {K} differ; (neuron, column) {wrong[:8].tolist()} hold what is "
        f"at {[(w_down == y[i, j]).nonzero()[:1].tolist() for i, j in wrong[:8].tolist()]}"
    )


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("M", "N", "K"), SIZES)
def test_whole_numbers_are_exact(kernels, M, N, K, bias):
    torch.manual_seed(0)
    hidden, w_down = whole(M, N, most=8), whole(N, K, most=8)
    b_down = whole(K, most=100) if bias else None
    wanted = hidden.double() @ w_down.double() + (b_down.double() if bias else 0)
    y = run_down(kernels, hidden, w_down, b_down)
    wrong = (y != wanted.bfloat16()).nonzero()
    assert not len(wrong), f"{len(wrong)} differ, the first at (row, column) {wrong[:5].tolist()}"


def test_listed_rows_alone_are_written(kernels):
    torch.manual_seed(0)
    M, N, K, count = 300, 264, 192, 130
    hidden, w_down = whole(M, N, most=8), whole(N, K, most=8)
    rows = torch.randperm(M, device="cuda").int()
    y = run_down(kernels, hidden, w_down, None, rows, count)
    wanted = torch.full_like(y, torch.nan)
    wanted[rows[:count].long()] = (hidden[:count].double() @ w_down.double()).bfloat16()
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.nan_to_num(), wanted.nan_to_num())


def test_as_many_as_are_few_are_left(kernels):
    """They were had before; with one more all are computed."""
    torch.manual_seed(0)
    hidden, w_down = whole(70, 264, most=8), whole(264, 192, most=8)
    rows = torch.randperm(70, device="cuda").int()
    for count, few in ((0, 0), (3, 3), (3, 32)):
        y = run_down(kernels, hidden, w_down, None, rows, count, few)
        assert y.isnan().all()
    y = run_down(kernels, hidden, w_down, None, rows, 33, 32)
    assert y.isfinite().all(1).sum() == 33
