"""Few heavy rows in each way over bf16 that has any, against float64."""

import pytest
import torch
from on_gpu import HOPPER
from torch import Tensor

from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_launch import device_limits
from twellctl.bundle.twell_plan import hopper_cap
from twellctl.bundle.twell_sequence import hopper_ffn
from twellctl.bundle.twell_walk import FEW_HEAVY, plan_heavy_walk, walk_gate_ffn
from twellctl.bundle.twell_weights import FFN

pytestmark = HOPPER
M = 200


def by_gate(kernels, limits, x: Tensor, ffn: FFN, slots: int) -> Tensor:
    return walk_gate_ffn(kernels, limits, x, ffn)


WAYS = pytest.mark.parametrize("way", [by_gate, hopper_ffn])


def problem(K: int, N: int, heavy: Tensor, biases: bool) -> tuple[Tensor, FFN]:
    """0.5 % fire of each token, of the `heavy` 10 % and 40 %, by channel 0."""
    weights = [(torch.randn(N, K, device="cuda") * K**-0.5).bfloat16() for _ in range(3)]
    weights[0][:, 0] = -2.6
    bias = [torch.randn(n, device="cuda").bfloat16() / 16 if biases else None for n in (N, N, K)]
    x = torch.randn(M, K, device="cuda").bfloat16()
    x[:, 0] = 1
    x[heavy[::2], 0], x[heavy[1::2], 0] = 0.5, 0.1
    return x, FFN(*weights, *bias)


def exact(x: Tensor, ffn: FFN) -> Tensor:
    """float64, rounded where the kernels round."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.double() @ weight.double()
        return (y if bias is None else y + bias.double()).bfloat16()

    gate, up = product(x, ffn.w_gate.t(), ffn.b_gate), product(x, ffn.w_up.t(), ffn.b_up)
    hidden = (keep_fired(gate).double() * up.double()).bfloat16()
    return product(hidden, ffn.w_down, ffn.b_down)


@WAYS
@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize("num", [1, FEW_HEAVY, FEW_HEAVY + 1])
@pytest.mark.parametrize(
    ("K", "N"), [(64, 264), (576, 1536), (2048, 8192), (3584, 18944), (4096, 14336), (5120, 2056)]
)
def test_few_heavy_rows_and_one_more(kernels, way, K, N, num, slots):
    torch.manual_seed(num + slots)
    heavy = torch.randperm(M, device="cuda")[:num]
    x, ffn = problem(K, N, heavy, biases=num > 1)
    limits = device_limits(0)
    taken = plan_heavy_walk(N, K, limits, packed=way is not by_gate)
    assert (taken is not None) == (K <= 4096)
    given = kernels, limits, x, ffn, slots
    y = way(*given)
    assert torch.equal(y, way(*given)), "differs from run to run"
    wanted = exact(x, ffn).double()
    errors = (y.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
    assert errors.max() < 0.01, f"row {int(errors.argmax())}: {errors.max():.3g}"
    if N > 1000:
        fired = (exact_gate(x, ffn) > 0).sum(1)
        assert int((fired > hopper_cap(N)).sum()) == num


def exact_gate(x: Tensor, ffn: FFN) -> Tensor:
    gate = x.double() @ ffn.w_gate.double().t()
    return gate if ffn.b_gate is None else gate + ffn.b_gate.double()


@WAYS
def test_a_graph_holds_as_many_as_come(kernels, way):
    """The device alone knows how many are heavy, from replay to replay."""
    torch.manual_seed(0)
    x, ffn = problem(1024, 4096, torch.arange(0, device="cuda"), biases=True)
    inputs = x.clone()
    given = kernels, device_limits(0), x, ffn, 64
    way(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = way(*given)
    for num in (0, 5, FEW_HEAVY + 8, 1, M):
        x.copy_(inputs)
        x[:num, 0] = 0.3
        y.fill_(torch.nan)
        graph.replay()
        wanted = exact(x, ffn).double()
        errors = (y.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
        assert errors.max() < 0.01, f"{num} heavy rows: {errors.max():.3g}"
