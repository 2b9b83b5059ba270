"""The kernels for few tokens over e4m3 weights: whole numbers exactly, others by float64.

Problems of whole numbers, with powers of two for scales, have the bits of the same equation in
float64, rounded to bf16 where the kernels round.
"""

from dataclasses import replace

import pytest
import torch
from ffns import ffn_by_neurons
from on_gpu import on_e4m3
from torch import Tensor

from twellctl.bundle.twell_dense import rounded_weight
from twellctl.bundle.twell_few import few_gated, few_linear, few_pairs, few_union
from twellctl.bundle.twell_few_walk import takes_few_walk
from twellctl.bundle.twell_format import fires
from twellctl.bundle.twell_launch import KernelSet, device_limits
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_weights import FFN, Weight

pytestmark = [pytest.mark.gpu, on_e4m3]
DEVICE = "cuda"
TOKENS = [1, 2, 3, 8, 9, 16, 17, 33, 64]
# K, N; K of the last is longer than stays beside 16 tokens
SIZES = [(128, 8), (1024, 24), (2176, 136), (4096, 1400), (16384, 520)]


def limits() -> Limits:
    return device_limits(0)


class Problem:
    """An FFN in e4m3 and inputs `x` `[M, K]`; what is wanted: float64, rounded as kernels round."""

    def __init__(self, x: Tensor, ffn: FFN, residual: Tensor | None):
        self.x, self.ffn, self.residual = x, ffn, residual
        self.gate = self.linear(x, ffn.gate)
        self.fired = fires(self.gate)
        up = self.linear(x, ffn.up)
        self.hidden = torch.where(self.fired, self.gate.double() * up.double(), 0).bfloat16()
        self.y = self.linear(self.hidden, ffn.down, residual)

    @staticmethod
    def linear(x: Tensor, weight: Weight, residual: Tensor | None = None) -> Tensor:
        y = x.double() @ (weight.values.double() * weight.scales.double()).t()
        y = (y if weight.bias is None else y + weight.bias.double()).bfloat16()
        return y if residual is None else (y.double() + residual.double()).bfloat16()


def whole(*shape: int, most: int) -> Tensor:
    return torch.randint(-most, most + 1, shape, device=DEVICE).bfloat16()


def powers(num: int) -> Tensor:
    """Scales: 1/2, 1 or 2."""
    return 2.0 ** torch.randint(-1, 2, (num,), device=DEVICE)


def of_whole_numbers(M: int, K: int, N: int, level: float, full: bool) -> Problem:
    """`level`: of the gates' mean, in their standard deviations."""
    x = whole(M, K, most=1)
    weights = [whole(N, K, most=1), whole(N, K, most=1), whole(N, K, most=2)]
    x[:, 0], weights[0][:, 0] = round(level * (4 * K / 9) ** 0.5), 1
    e4m3 = [weight.to(torch.float8_e4m3fn) for weight in weights]
    biases = [whole(num, most=3) if full else None for num in (N, N, K)]
    residual = whole(M, K, most=50) if full else None
    return Problem(x, ffn_by_neurons(*e4m3, *biases, powers(N), powers(N), powers(K)), residual)


def of_any_numbers(M: int, K: int, N: int) -> Problem:
    x = torch.randn(M, K, device=DEVICE).bfloat16()
    gate, up, down = (
        rounded_weight(
            "e4m3",
            torch.randn(*shape, device=DEVICE) / shape[1] ** 0.5,
            torch.randn(shape[0], device=DEVICE).bfloat16(),
        )
        for shape in ((N, K), (N, K), (K, N))
    )
    ffn = FFN(gate, up, down, turned=down.values.t().contiguous())
    return Problem(x, ffn, torch.randn_like(x))


def forms_for(M: int, N: int, K: int) -> dict:
    """The forms of the FFN that take so many tokens here, by name."""
    pairs = {"few_pairs": few_pairs} if takes_few_walk(M, N, K, limits(), "e4m3") else {}
    return {"few_union": few_union} | pairs


def computed(kernels: KernelSet, problem: Problem) -> dict[str, tuple[Tensor, Tensor]]:
    """What each kernel gives, and what is wanted; counts too."""
    x, ffn = problem.x, problem.ffn
    here, first = (kernels, limits(), x), torch.arange(len(x), device=DEVICE).int()
    dense_counts, fired = first.clone(), first + problem.fired.sum(-1).int()
    gate = few_linear(*here, ffn.gate)
    wide = few_linear(*here, ffn.gate, wide=True)
    ahead = few_linear(*here, ffn.gate, ahead=True)
    made = {}
    for name, form in forms_for(len(x), ffn.N, ffn.K).items():
        counts = first.clone()
        made[name] = form(*here, ffn, residual=problem.residual, counts=counts), problem.y
        made[f"counts of {name}"] = counts, fired
    return made | {
        "few_linear": (gate, problem.gate),
        "few_linear, wide": (wide.bfloat16(), gate),
        "few_linear, ahead": (ahead, gate),
        "few_gated": (few_gated(*here, ffn, counts=dense_counts), problem.hidden),
        "counts of few_gated": (dense_counts, fired),
    }


@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N"), SIZES)
@pytest.mark.parametrize(("level", "full"), [(-2.0, True), (0.0, False), (-99.0, True)])
def test_whole_numbers_are_exact(kernels, M, K, N, level, full):
    torch.manual_seed(M + K + N)
    problem = of_whole_numbers(M, K, N, max(level, -256 / K**0.5), full)
    for what, (found, wanted) in computed(kernels, problem).items():
        assert torch.equal(found, wanted), what


@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N"), SIZES)
def test_numbers_err_as_bf16_rounds(kernels, M, K, N):
    problem = of_any_numbers(M, K, N)
    for what, (found, wanted) in computed(kernels, problem).items():
        if found.dtype == torch.bfloat16:
            error = (found.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < 2**-8, f"{what}: {error}"


@pytest.mark.parametrize("M", [1, 8, 16])
def test_rows_of_any_size(kernels, M):
    """Each warp takes its part of a row in f16, times a power of two, where all of it stays."""
    problem = of_any_numbers(M, 1024, 136)
    x = problem.x * 10.0 ** torch.randint(-20, 21, (M, 1), device=DEVICE)
    weight = replace(problem.ffn.gate, bias=None)
    found = few_linear(kernels, limits(), x.bfloat16(), weight)
    wanted = Problem.linear(x.bfloat16(), weight)
    error = (found.double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)
    assert error.max() < 2**-8


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite(kernels, M, bad):
    problem = of_any_numbers(M, 1024, 136)
    x = problem.x.clone()
    x[0, 700] = bad
    weight = replace(problem.ffn.gate, bias=None)
    found = few_linear(kernels, limits(), x, weight)
    wanted = Problem.linear(x, weight)
    assert torch.equal(found[0].isfinite(), wanted[0].isfinite())
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("M", [5, 40])
def test_the_same_bits_each_time(kernels, M):
    problem = of_any_numbers(M, 2176, 1400)
    first, again = computed(kernels, problem), computed(kernels, problem)
    assert all(torch.equal(first[what][0], again[what][0]) for what in first)


# ---- pairs: as tests/gpu/test_few.py asks of bf16


def same(found: Tensor, wanted: Tensor) -> None:
    """The same numbers; where one is NaN, so is the other."""
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0), wanted.nan_to_num(0))


def by_pairs(kernels: KernelSet, problem: Problem, **how) -> Tensor:
    M, K = problem.x.shape
    if not takes_few_walk(M, problem.ffn.N, K, limits(), "e4m3"):
        pytest.skip("pairs are Hopper's")
    return few_pairs(kernels, limits(), problem.x, problem.ffn, residual=problem.residual, **how)


def patterned(fired: Tensor) -> Problem:
    """A problem whose gate fires exactly where `fired` `[M, N]`, M <= 128, says so."""
    (M, N), K = fired.shape, 128
    x, w_gate = torch.eye(K, device=DEVICE)[:M].bfloat16(), -whole(N, K, most=4).abs()
    values = torch.randint(1, 9, (N, M), device=DEVICE).bfloat16()
    w_gate[:, :M] = torch.where(fired.T, values, w_gate[:, :M])
    weights = [
        w.to(torch.float8_e4m3fn) for w in (w_gate, whole(N, K, most=4), whole(N, K, most=4))
    ]
    return Problem(x, ffn_by_neurons(*weights, *[None] * 3, powers(N), powers(N), powers(K)), None)


@pytest.mark.parametrize("M", [4, 8, 16, 17, 32, 64])
@pytest.mark.parametrize(("K", "N"), [(2048, 5632), (4096, 14336), (3584, 18944), (896, 4864)])
def test_pairs_of_real_sizes(kernels, K, N, M):
    torch.manual_seed(M)
    problem = of_whole_numbers(M, K, N, -2.5, full=True)
    same(by_pairs(kernels, problem), problem.y)


@pytest.mark.parametrize("M", [4, 17, 64])
@pytest.mark.parametrize("N", [8, 128, 3000])
def test_no_pairs_and_all_pairs(kernels, M, N):
    torch.manual_seed(0)
    for fired in (torch.zeros, torch.ones):
        problem = patterned(fired(M, N, device=DEVICE).bool())
        assert problem.fired.float().mean() == (fired is torch.ones)
        same(by_pairs(kernels, problem), problem.y)


@pytest.mark.parametrize("M", [4, 40])
@pytest.mark.parametrize("num", [1, 2, 15, 16, 17, 127, 129, 513, 2049, 4097])
def test_any_number_of_pairs(kernels, M, num):
    torch.manual_seed(num)
    fired = torch.zeros(M, 4504, device=DEVICE, dtype=torch.bool)
    fired[torch.randint(M, (num,), device=DEVICE), torch.randperm(4504, device=DEVICE)[:num]] = True
    problem = patterned(fired)
    same(by_pairs(kernels, problem), problem.y)


@pytest.mark.parametrize("M", [4, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_pairs_of_rows_that_are_not_finite(kernels, M, bad):
    """They are as in float64, and the others as they were."""
    torch.manual_seed(0)
    problem = of_whole_numbers(M, 256, 520, -1.0, full=False)
    for row in {0, M // 2, M - 1}:
        problem.x[row, row % 256 + 1] = bad
    problem = Problem(problem.x, problem.ffn, None)
    same(by_pairs(kernels, problem), problem.y)


@pytest.mark.parametrize("M", [4, 16])
def test_pairs_of_rows_of_any_size(kernels, M):
    """x and h become f16, times powers of two."""
    torch.manual_seed(M)
    drawn = of_any_numbers(M, 1024, 136)
    x = drawn.x * 10.0 ** torch.randint(-15, 16, (M, 1), device=DEVICE)
    gate, up, down = (replace(weight, bias=None) for weight in drawn.ffn.weights)
    problem = Problem(x.bfloat16(), FFN(gate, up, down, drawn.ffn.turned), None)
    found, wanted = by_pairs(kernels, problem).double(), problem.y.double()
    assert ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < 2**-8


@pytest.mark.parametrize("M", [4, 16, 33, 64])
def test_pairs_that_overlap_in_a_cuda_graph(kernels, M):
    """A chain: each kernel needs what the one just before wrote."""
    torch.manual_seed(M)
    problems = [of_any_numbers(M, 512, 1408) for _ in range(6)]

    def chain(overlap: bool) -> Tensor:
        x = problems[0].x
        for problem in problems:
            given = Problem.__new__(Problem)
            given.x, given.ffn, given.residual = x, problem.ffn, x
            y = by_pairs(kernels, given, overlap=overlap)
            x = (y / y.float().norm(dim=-1, keepdim=True) * 20).bfloat16()
        return x

    wanted = chain(False)
    graph = torch.cuda.CUDAGraph()
    chain(True)
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(found, wanted)
