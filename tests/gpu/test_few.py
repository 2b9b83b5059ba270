"""The kernels for few tokens, 1 to 64: exact where arithmetic is, and as good as bf16 elsewhere.

Problems of whole numbers, as in test_sparse_ffn.py, have the bits of the same equation in float64,
rounded to bf16 where the kernels round.
"""

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from ffns import ffn_by_neurons, ffn_of
from on_gpu import on_hopper, whole
from torch import Tensor

from twellctl.bundle import twell_ways
from twellctl.bundle.twell_dense import gated_ffn
from twellctl.bundle.twell_few import (
    FEW_TOKENS,
    few_gated,
    few_linear,
    few_pairs,
    few_union,
    takes_few,
    takes_few_dense,
)
from twellctl.bundle.twell_few_walk import takes_few_walk
from twellctl.bundle.twell_ffn import register_sources, sparse_ffn
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_launch import KernelSet, device_limits
from twellctl.bundle.twell_weights import FFN, plain_weight
from twellctl.here.resources import kernel_files

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOKENS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]


@dataclass
class Problem:
    """Inputs of an FFN for few tokens, and what must come out in whole numbers."""

    x: Tensor
    ffn: FFN
    residual: Tensor | None = None

    def __str__(self) -> str:
        biases = ["no" if b is None else "a" for b in (self.ffn.gate.bias, self.ffn.up.bias)]
        density = self.fired.double().mean().item()
        return (
            f"M={self.x.shape[0]} K={self.ffn.K} N={self.ffn.N} "
            f"biases {biases} density {density:.4f} residual {self.residual is not None}"
        )

    @property
    def gate(self) -> Tensor:
        return linear(self.x, self.ffn.gate.values, self.ffn.gate.bias)

    @property
    def fired(self) -> Tensor:
        return fires(self.gate)

    @property
    def hidden(self) -> Tensor:
        up = linear(self.x, self.ffn.up.values, self.ffn.up.bias)
        return (keep_fired(self.gate).double() * up.double()).bfloat16()

    @property
    def y(self) -> Tensor:
        return linear(self.hidden, self.ffn.by_neurons.t(), self.ffn.down.bias, self.residual)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`x W^T + b` in float64, rounded; then the residual, and rounded again."""
    y = x.double() @ weight.double().T
    y = (y if bias is None else y + bias.double()).bfloat16()
    return y if residual is None else (y.double() + residual.double()).bfloat16()


def random_problem(draw: random.Random) -> Problem:
    """Any sizes, any density: by a constant for each token, and by the gate's biases."""
    torch.manual_seed(draw.getrandbits(60))
    M, K = draw.choice([*TOKENS, draw.randint(1, 64)]), 64 * draw.choice([1, 2, 3, 5, 8, 9, 17])
    N = 8 * draw.choice([1, 2, 3, 32, 33, 65, 96, 263, draw.randint(1, 400), draw.randint(1, 400)])
    x, spread = whole(M, K), (2 * K / 9) ** 0.5
    level = draw.choice([-9.0, -4.2, -3.4, -2.5, -2.0, -1.0, 0.0, 1.0, 6.0]) * spread
    x[:, 0] = (
        torch.randn(M, device=DEVICE) * draw.choice([0.0, 0.3, 2.0]) * spread + level
    ).round()
    weights = [whole(N, K), whole(N, K), whole(N, K, most=2)]
    weights[0][:, 0] = 1
    sizes = ((N, draw.choice([3, 30])), (N, 3), (K, 3))
    biases = [whole(n, most=most) if draw.random() < 0.5 else None for n, most in sizes]
    residual = whole(M, K, most=50) if draw.random() < 0.5 else None
    return Problem(x, ffn_by_neurons(*weights, *biases), residual)


def patterned(fired: Tensor) -> Problem:
    """A problem whose gate fires exactly where `fired` `[M, N]`, M <= 128, says so."""
    (M, N), K = fired.shape, 128
    x, w_gate = torch.eye(K, device=DEVICE)[:M].bfloat16(), -whole(N, K).abs()
    values = torch.randint(1, 100, (N, M), device=DEVICE).bfloat16()
    w_gate[:, :M] = torch.where(fired.T, values, w_gate[:, :M])
    return Problem(x, ffn_by_neurons(w_gate, whole(N, K), whole(N, K), None, None, None))


def real(M: int, K: int, N: int, level: float, biases: bool = False) -> Problem:
    """Random numbers; the gate's own are about normal, with `level` added."""
    torch.manual_seed(M + K + N)
    x, *weights = (torch.randn(n, K, device=DEVICE).bfloat16() for n in (M, N, N, N))
    weights = [w * K**-0.5 for w in weights[:2]] + [weights[2] * N**-0.5]
    x[:, 0], weights[0][:, 0] = level, 1
    rest = [torch.randn(n, device=DEVICE).bfloat16() if biases else None for n in (N, N, K)]
    return Problem(x, ffn_by_neurons(*weights, *rest))


def equal(found: Tensor, wanted: Tensor, where: object) -> None:
    """The same numbers; where one is NaN, so is the other."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), where
    odd = found.isnan() != wanted.isnan()
    assert not odd.any(), f"{where}: NaN differs at (token, column) {odd.nonzero()[:5].tolist()}"
    found, wanted = found.double().nan_to_num(nan=0), wanted.double().nan_to_num(nan=0)
    differ = (found != wanted).nonzero()
    assert not len(differ), (
        f"{where}: {len(differ)} differ, (token, column) {differ[:5].tolist()}: "
        f"{found[tuple(differ[0])]} instead of {wanted[tuple(differ[0])]}"
    )


def forms_for(M: int, N: int, K: int) -> dict:
    """The forms of the FFN that take so many tokens here, by name."""
    limits = device_limits(0)
    takes = {
        few_union: takes_few(M, N, limits, "bf16"),
        few_pairs: takes_few_walk(M, N, K, limits, "bf16"),
    }
    return {form.__name__: form for form, taken in takes.items() if taken}


def check(problem: Problem, kernels: KernelSet) -> None:
    """All forms of the FFN with their counts, few_gated and few_linear."""
    limits, M, ffn = device_limits(0), problem.x.shape[0], problem.ffn
    here, first = (kernels, limits, problem.x, ffn), torch.arange(M, device=DEVICE).int()
    for name, form in forms_for(M, ffn.N, ffn.K).items():
        counts, where = first.clone(), f"{name}, {problem}"
        y = form(*here, residual=problem.residual, counts=counts)
        equal(y, problem.y, where)
        equal((counts - first)[None], problem.fired.sum(-1).int()[None], where)
        again = form(*here, residual=problem.residual)
        assert torch.equal(again.view(torch.int16), y.view(torch.int16)), where
    if takes_few_dense(M, limits, "bf16"):
        counts = first.clone()
        hidden = few_gated(*here, counts=counts)
        equal(hidden, problem.hidden, f"few_gated, {problem}")
        equal((counts - first)[None], problem.fired.sum(-1).int()[None], f"few_gated, {problem}")
        equal(few_gated(*here), hidden, f"few_gated without counts, {problem}")
        by_silu = F.silu(problem.gate) * linear(problem.x, ffn.up.values, ffn.up.bias)
        found = few_gated(*here, is_silu=True)
        near = {"rtol": 2**-6, "atol": 1e-2, "equal_nan": True}
        torch.testing.assert_close(found, by_silu, **near)
        down = replace(ffn.down, values=ffn.down.values.contiguous())
        y = few_linear(kernels, limits, problem.x, ffn.gate)
        wide = few_linear(kernels, limits, problem.x, ffn.gate, wide=True)
        assert wide.dtype == torch.float32
        equal(wide.bfloat16(), y, f"few_linear wide, {problem}")
        equal(y, problem.gate, f"few_linear, {problem}")
        if ffn.N % 64 == 0:
            y = few_linear(kernels, limits, hidden, down, residual=problem.residual)
            equal(y, problem.y, f"few_linear, {problem}")


@pytest.mark.parametrize("N", [2048, 6144, 6152])
@pytest.mark.parametrize("M", [1, 5, 16])
def test_the_builds_of_few_linear_agree(kernels, M, N):
    """With few stages and with many: a 1.5B model's o, and its q, k and v."""
    torch.manual_seed(M)
    x, weight, bias, residual = (
        torch.randn(*shape, device=DEVICE).bfloat16()
        for shape in ((M, 2048), (N, 2048), (N,), (M, N))
    )
    given = (kernels, device_limits(0), x, plain_weight(weight, bias))
    plain, ahead = (few_linear(*given, residual=residual, ahead=which) for which in (False, True))
    assert torch.equal(plain, ahead)
    product = (x.double() @ weight.double().T + bias.double()).bfloat16()
    torch.testing.assert_close(plain, product + residual, rtol=2**-6, atol=0.05)


def test_a_thousand_random_problems(kernels):
    seed = random.SystemRandom().getrandbits(32)
    for number in range(1000):
        try:
            check(random_problem(random.Random(seed + number)), kernels)
        except Exception as error:
            raise AssertionError(f"random.Random({seed + number}): {error}") from error


@pytest.mark.parametrize("M", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize(("K", "N"), [(2048, 5632), (4096, 14336), (896, 4864), (64, 65528)])
def test_real_sizes(kernels, K, N, M):
    torch.manual_seed(0)
    x, weights = whole(M, K), [whole(N, K) for _ in range(3)]
    x[:, 0], weights[0][:, 0] = round(-2.5 * (4 * K / 9) ** 0.5), 1
    check(Problem(x, ffn_by_neurons(*weights, None, None, None)), kernels)


@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize("N", [8, 16, 24, 128, 264, 3000])
def test_nothing_fires_and_everything_fires(kernels, M, N):
    torch.manual_seed(0)
    for fired in (torch.zeros, torch.ones):
        check(patterned(fired(M, N, device=DEVICE).bool()), kernels)


@pytest.mark.parametrize("M", TOKENS)
def test_any_number_of_neurons_fires(kernels, M):
    """The list of few_down ends anywhere in a step of its blocks, or anew."""
    torch.manual_seed(0)
    N = 4504
    for num in (1, 2, 15, 16, 17, 127, 128, 129, 511, 513, 1024, 2047, 2048, 2049, 4097, 4503):
        fired = torch.zeros(M, N, device=DEVICE, dtype=torch.bool)
        neurons = torch.randperm(N, device=DEVICE)[:num]
        fired[torch.randint(M, (num,), device=DEVICE), neurons] = True
        check(patterned(fired), kernels)


@pytest.mark.parametrize("M", [1, 2, 8, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(kernels, M, value):
    """They are as in plain torch, and the others as they were."""
    torch.manual_seed(0)
    K, N = 192, 520
    problem = Problem(
        whole(M, K), ffn_by_neurons(whole(N, K), whole(N, K), whole(N, K), *[None] * 3)
    )
    problem.x[:, 0], problem.ffn.gate.values[:, 0] = -25, 1
    for row in {0, M // 2, M - 1}:
        problem.x[row, row % K + 1] = value
    check(problem, kernels)


@pytest.mark.parametrize("M", [1, 5])
def test_gates_at_0(kernels, M):
    """0 does not fire, nor does -0; the least above does; a NaN in the bias does."""
    gates = torch.tensor([-0.5, 0.5, -0.0, 0.0, torch.nan, torch.inf, -torch.inf, 2.0**-126])
    problem = Problem(
        torch.zeros(M, 64, device=DEVICE).bfloat16(),
        ffn_by_neurons(
            whole(8, 64), whole(8, 64), whole(8, 64), gates.to(DEVICE).bfloat16(), None, None
        ),
    )
    assert problem.fired[0].tolist() == [False, True, False, False, True, True, False, True]
    check(problem, kernels)
    finite = torch.where(problem.ffn.gate.bias.isfinite(), problem.ffn.gate.bias, 0)
    up = torch.ones(8, device=DEVICE).bfloat16()
    values = [weight.values for weight in problem.ffn.weights]
    ffn = ffn_of(*values, finite, up)
    check(Problem(problem.x, ffn), kernels)


@pytest.fixture(params=["few_union", "few_pairs"])
def form(request, M):
    """A form of the FFN that takes `M` tokens."""
    return forms_for(M, 1024, 512).get(request.param) or pytest.skip("not for so many tokens here")


@pytest.mark.parametrize("M", [1, 8, 16, 32, 64])
def test_a_cuda_graph_holds_it(kernels, form, M):
    limits = device_limits(0)
    problem = real(M, 256, 1024, -2.0)
    inputs = [problem.x.clone(), problem.x.flip(0) + 0.25, torch.zeros_like(problem.x)]
    wanted = [form(kernels, limits, x, problem.ffn) for x in inputs]
    assert not torch.equal(*wanted[:2])
    counts = torch.zeros(M, dtype=torch.int32, device=DEVICE)
    graph, x = torch.cuda.CUDAGraph(), inputs[0].clone()
    with torch.cuda.graph(graph):
        y = form(kernels, limits, x, problem.ffn, counts=counts)
    for given, expected in zip(inputs * 2, wanted * 2, strict=True):
        x.copy_(given)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("graphed", [False, True], ids=["one by one", "in a graph"])
@pytest.mark.parametrize("M", [1, 2, 8, 16, 32, 64])
def test_launches_that_overlap_have_the_bits_of_those_that_do_not(kernels, M, graphed, form):
    """A chain as in a decoder: each kernel needs what the one just before, or earlier, wrote."""
    limits = device_limits(0)
    problems = [real(M, 512, 1536, level, biases=True) for level in (-2.5, -1.5, 0.0, -3.0) * 3]
    if not takes_few_dense(M, limits, "bf16"):
        pytest.skip("too little shared memory")

    def chain(overlap: bool) -> list[Tensor]:
        x, made = problems[0].x, []
        counts = torch.zeros(M, dtype=torch.int32, device=DEVICE)
        for problem in problems:
            here, values = (kernels, limits), problem.ffn.by_neurons.view(512, 1536)
            up, down = plain_weight(problem.ffn.up.values[:512]), plain_weight(values)
            how = {"residual": x, "counts": counts, "overlap": overlap}
            y = form(*here, x, problem.ffn, **how)
            y = few_linear(*here, y, up, residual=x, overlap=overlap)
            gated = few_gated(*here, y, problem.ffn, counts=counts, overlap=overlap)
            x = few_linear(*here, gated, down, overlap=overlap)
            x = x / x.float().norm(dim=-1, keepdim=True).bfloat16() * 20  # torch's own kernels too
            made += [y, gated, x]
        return [*made, counts.clone()]

    wanted = chain(False)
    assert wanted[-1].sum() > 0
    run = _graphed(lambda: chain(True)) if graphed else lambda: chain(True)
    for _ in range(50):
        for a, b in zip(run(), wanted, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def _graphed(run):
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()

    def replay():
        graph.replay()
        return made

    return replay


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("level", [-2.5, -1.5, 0.0])
@pytest.mark.parametrize("M", [1, 2, 8, 16, 33, 64])
def test_errors_are_those_of_bf16(kernels, M, level, biases):
    """Against the equation in float64 without any rounding, as torch's own products in bf16."""
    limits = device_limits(0)
    problem = real(M, 2048, 5632, level, biases)
    x, ffn = problem.x, problem.ffn
    biases = [0 if b is None else b.double() for b in (ffn.gate.bias, ffn.up.bias, ffn.down.bias)]
    gate = x.double() @ ffn.gate.values.double().T + biases[0]
    hidden = gate.relu() * (x.double() @ ffn.up.values.double().T + biases[1])
    wanted = hidden @ ffn.by_neurons.double() + biases[2]
    forms = forms_for(M, 5632, 2048).items()
    made = {name: form(kernels, limits, x, ffn) for name, form in forms}
    made["dense"] = gated_ffn(x, ffn)
    errors = {
        name: ((found.double() - wanted).norm() / wanted.norm()).item()
        for name, found in made.items()
    }
    assert max(errors.values()) <= 1.3 * errors["dense"], errors


# ---- in the operator ----


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("way", ["pairs", "union"])
def test_the_operator_takes_them(sources, way):
    """Up to FEW_TOKENS tokens, whatever the strides of w_down."""
    torch.manual_seed(0)
    taken = [M for M in TOKENS if f"few_{way}" in forms_for(M, 520, 128)]
    assert taken
    for M in (*TOKENS, FEW_TOKENS + 1):
        weights = whole(520, 128), whole(520, 128), whole(520, 128)
        problem = Problem(whole(M, 128), ffn_by_neurons(*weights))
        for laid in (weights[2].t(), weights[2].t().contiguous()):
            ffn = ffn_of(*weights[:2], laid)
            if M in taken:
                y = sparse_ffn(problem.x, ffn, sources=sources, plan=f"1+ {way}")
                equal(y, problem.y, problem)
            else:
                with pytest.raises(ValueError, match=f"does not take {M} tokens here"):
                    sparse_ffn(problem.x, ffn, sources=sources, plan=f"1+ {way}")


@pytest.mark.usefixtures("kernels", "no_fallback")
def test_a_capture_that_comes_after_many_tokens_loads_nothing(monkeypatch, tmp_path):
    """All kernels are there after the first call, also those that it does not need."""
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    new = register_sources(kernel_files() | {"new.txt": b""})  # a set that nothing has loaded
    ffn = ffn_of(whole(96, 64), whole(96, 64), whole(64, 96))
    many, few = (Problem(whole(M, 64), ffn) for M in (300, 5))
    sparse_ffn(many.x, ffn, sources=new, route="twell")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse_ffn(few.x, ffn, sources=new, route="twell")
    graph.replay()
    equal(y, few.y, few)


@on_hopper
@pytest.mark.usefixtures("no_fallback")
def test_the_long_sequence_still_takes_few_tokens(sources, monkeypatch):
    """Which it does where a GPU has too little shared memory for the others."""
    monkeypatch.setattr(twell_ways, "takes_few", lambda *sizes: False)
    plan_anew = twell_ways.plan_by_rule.__wrapped__  # else plans of other tests are remembered
    monkeypatch.setattr(twell_ways, "plan_by_rule", plan_anew)
    for seed in range(200):
        problem = random_problem(random.Random(seed))
        ffn = problem.ffn
        y = sparse_ffn(problem.x, ffn, sources=sources, route="twell")
        equal(y, Problem(problem.x, ffn).y, problem)
