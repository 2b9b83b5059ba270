"""Heavy rows: `heavy_down` by itself, exactly; and rows that lists leave out, against float64."""

import pytest
import torch
from ffns import ffn_by_neurons
from on_gpu import HOPPER, whole
from torch import Tensor

from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_launch import device_limits, tensor_map
from twellctl.bundle.twell_plan import HEAVY_SMEM, hopper_cap, product_grid
from twellctl.bundle.twell_sequence import hopper_ffn
from twellctl.bundle.twell_spec import INPUT_BOX_ROWS, PRODUCT_BLOCK, PRODUCT_INNER
from twellctl.bundle.twell_weights import FFN

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
) -> Tensor:
    """y `[M, K]`, over NaN; all rows, or the first `count` of `rows`."""
    (M, N), K = hidden.shape, w_down.shape[1]
    rows = torch.arange(M, dtype=torch.int32, device="cuda") if rows is None else rows
    count = rows.new_tensor([M if count is None else count])
    y = torch.full((M, K), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernels.launch(
        "heavy_down",
        (product_grid(M, K, device_limits(0).num_sms),),
        PRODUCT_BLOCK,
        {
            "hidden_map": tensor_map(hidden, INPUT_BOX_ROWS),
            "down_map": tensor_map(w_down, PRODUCT_INNER),
            "b_down": b_down,
            "heavy_rows": rows,
            "heavy_count": count,
            "window_start": 0,
            "window": M,
            "num_columns": N,
            "num_inner": K,
            "y": y,
        },
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


def test_an_empty_list_writes_nothing(kernels):
    torch.manual_seed(0)
    hidden, w_down = whole(70, 264, most=8), whole(264, 192, most=8)
    assert run_down(kernels, hidden, w_down, count=0).isnan().all()


# ---- rows that lists leave out


TOKENS = 200


def problem(K: int, N: int, heavy: Tensor, biases: bool) -> tuple[Tensor, FFN]:
    """0.5 % fire of each token, of the `heavy` 10 % and 40 %, by channel 0."""
    weights = [(torch.randn(N, K, device="cuda") * K**-0.5).bfloat16() for _ in range(3)]
    weights[0][:, 0] = -2.6
    bias = [torch.randn(n, device="cuda").bfloat16() / 16 if biases else None for n in (N, N, K)]
    x = torch.randn(TOKENS, K, device="cuda").bfloat16()
    x[:, 0] = 1
    x[heavy[::2], 0], x[heavy[1::2], 0] = 0.5, 0.1
    return x, ffn_by_neurons(*weights, *bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double()
    return (y if bias is None else y + bias.double()).bfloat16()


def exact(x: Tensor, ffn: FFN) -> tuple[Tensor, Tensor]:
    """The gate, and y, in float64, rounded where the kernels round."""
    gate, up = (product(x, w.values.t(), w.bias) for w in (ffn.gate, ffn.up))
    hidden = (keep_fired(gate).double() * up.double()).bfloat16()
    return gate, product(hidden, ffn.by_neurons, ffn.down.bias)


@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize("num", [1, 33, TOKENS])
@pytest.mark.parametrize(
    ("K", "N"), [(64, 264), (576, 1536), (2048, 8192), (3584, 18944), (5120, 2056)]
)
def test_any_number_of_heavy_rows(kernels, K, N, num, slots):
    torch.manual_seed(num + slots)
    x, ffn = problem(K, N, torch.randperm(TOKENS, device="cuda")[:num], biases=num > 1)
    given = kernels, device_limits(0), x, ffn, slots
    y = hopper_ffn(*given)
    assert torch.equal(y, hopper_ffn(*given)), "differs from run to run"
    gate, wanted = exact(x, ffn)
    of_rows = wanted.double().norm(dim=1).clamp(min=1e-9)  # for some tokens nothing fires
    errors = (y.double() - wanted.double()).norm(dim=1) / of_rows
    assert errors.max() < 0.01, f"row {int(errors.argmax())}: {errors.max():.3g}"
    if N > 1000:
        assert int(((gate > 0).sum(1) > hopper_cap(N)).sum()) == num


def test_a_graph_holds_as_many_as_come(kernels):
    """The device alone knows how many are heavy, from replay to replay."""
    torch.manual_seed(0)
    x, ffn = problem(1024, 4096, torch.arange(0, device="cuda"), biases=True)
    inputs = x.clone()
    given = kernels, device_limits(0), x, ffn, 64
    hopper_ffn(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hopper_ffn(*given)
    for num in (0, 3, TOKENS):
        x.copy_(inputs)
        x[:num, 0] = 0.1
        y.fill_(torch.nan)
        graph.replay()
        _, wanted = exact(x, ffn)
        error = (y.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 0.01, num
