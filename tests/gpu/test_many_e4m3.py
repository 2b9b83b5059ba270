"""The gated FFN of some hundred and many tokens over e4m3 weights, against float64.

Each way that takes a problem is asked, and the operator.

The kernels by themselves are asked in test_lists_e4m3.py.
"""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from on_gpu import HOPPER
from torch import Tensor
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_cache import reasons_said
from twellctl.bundle.twell_e4m3 import BARE_TOKENS, dense_e4m3_ffn, quantise_rows
from twellctl.bundle.twell_ffn import known_choices, sparse_fp8_ffn
from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_fp8 import Fp8Weight, fp8_ffn, joined, round_rows, round_weight
from twellctl.bundle.twell_launch import device_limits, register_sources
from twellctl.bundle.twell_model import gated_ffns
from twellctl.bundle.twell_plan import hopper_cap, make_plan
from twellctl.bundle.twell_sequence import hopper_ffn, launch_gate_pack, packed_buffers
from twellctl.bundle.twell_walk import FEW_HEAVY, plan_walk, takes_walk, walk_gate_ffn
from twellctl.bundle.twell_weights import FFN
from twellctl.convert import convert
from twellctl.export import export
from twellctl.here.resources import kernel_files

pytestmark = HOPPER
DEVICE = "cuda"  # the emulator has another (test_emulated_e4m3.py)


def limits():
    return device_limits(0)


def by_lists(kernels, problem: "Problem") -> Tensor:
    return hopper_ffn(kernels, limits(), problem.x, problem.ffn, problem.slots)


def by_walk_gate(kernels, problem: "Problem") -> Tensor:
    return walk_gate_ffn(kernels, limits(), problem.x, problem.ffn)


def by_dense(kernels, problem: "Problem") -> Tensor:
    """Over W_down as a model stores it."""
    ffn = replace(problem.ffn, w_down=problem.ffn.w_down.t().contiguous().t())
    return dense_e4m3_ffn(kernels, limits(), problem.x, ffn)


ALL_WAYS = (by_lists, by_walk_gate)


@dataclass
class Problem:
    """x `[M, K]` and the weights of an FFN; `slots` of a tile."""

    x: Tensor
    ffn: FFN
    slots: int = 64

    def ways(self) -> tuple:
        """Those of ALL_WAYS that take it."""
        (M, K), N = self.x.shape, self.ffn.N
        walks = takes_walk(M, N, K, limits(), "e4m3")
        return ALL_WAYS if walks else ALL_WAYS[:1]

    def dense(self) -> Tensor:
        """By torch's FP8 products."""
        f = self.ffn
        down = Fp8Weight(f.w_down.t().contiguous(), f.s_down[:, None], f.b_down)
        gate = Fp8Weight(f.w_gate, f.s_gate[:, None], f.b_gate)
        return fp8_ffn(self.x, gate, Fp8Weight(f.w_up, f.s_up[:, None], f.b_up), down)

    def gate(self) -> Tensor:
        """float64, rounded to bf16 as the judge does."""
        return self._product(self.ffn.w_gate, self.ffn.s_gate, self.ffn.b_gate)

    def up(self) -> Tensor:
        """The same."""
        return self._product(self.ffn.w_up, self.ffn.s_up, self.ffn.b_up)

    def hidden(self) -> Tensor:
        """float64, not rounded."""
        return keep_fired(self.gate()) * self.up()

    def exact(self) -> Tensor:
        """float64 `[M, K]` of inputs in e4m3, and of a hidden state that is not rounded."""
        y = self.hidden() @ self.ffn.w_down.double() * self.ffn.s_down.double()
        return y if self.ffn.b_down is None else y + self.ffn.b_down.double()

    def left_open(self) -> Tensor:
        """float64 `[M]`: the norm of what gates may add to y that are off by 2^-11 of their terms.

        Sums of FP8 tensor cores hold some 14 bits, ours and torch's. Near 0 they decide what fires.
        """
        values, of_rows = round_rows(self.x)
        terms = values.double().abs() @ self.ffn.w_gate.double().abs().t()
        off = 2.0**-11 * terms * of_rows.double() * self.ffn.s_gate.double()
        hidden = torch.where(self.gate() > -off, off * self.up().abs(), 0.0)
        return (hidden @ self.ffn.w_down.double().abs() * self.ffn.s_down.double()).norm(dim=1)

    def _product(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        values, of_rows = round_rows(self.x)
        y = values.double() @ weight.double().t() * of_rows.double() * scale.double()
        return (y if bias is None else y + bias.double()).bfloat16().double()


def e4m3_ffn(w_gate: Tensor, w_up: Tensor, w_down: Tensor, *biases: Tensor | None) -> FFN:
    """Of weights `[N, K]`, `[N, K]`, `[K, N]`, and biases."""
    values, scales = zip(*map(round_weight, (w_gate, w_up, w_down)), strict=True)
    *products, down = values
    laid = (*products, down.t().contiguous())
    biases = biases or (None, None, None)
    return FFN(*laid, *biases, *(scale.flatten() for scale in scales))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def random_problem(M: int, K: int, N: int, *, mean: float, bias: bool, decades: float) -> Problem:
    """`mean`: of the gate, in its standard deviations; without a bias all channels 0 are as one."""
    x = normal(M, K)
    w_gate, w_up, w_down = normal(N, K) / K**0.5, normal(N, K) / K**0.5, normal(K, N) / N**0.5
    x[:, 0], w_gate[:, 0] = 8, mean / 8
    x *= 10 ** (decades * (2 * torch.rand(M, 1, device=DEVICE) - 1))
    biases = [normal(n).bfloat16() / 8 if bias else None for n in (N, N, K)]
    return Problem(x.bfloat16(), e4m3_ffn(w_gate, w_up, w_down, *biases))


def patterned(fired: Tensor, slots: int, K: int = 512) -> Problem:
    """A problem whose gate fires exactly where `fired` `[M, N]`, M <= K, says so."""
    M, N = fired.shape
    x = torch.eye(K, device=DEVICE)[:M].bfloat16()
    w_gate = -torch.randint(0, 8, (N, K), device=DEVICE).float()
    values = torch.randint(1, 8, (N, M), device=DEVICE).float()
    w_gate[:, :M] = torch.where(fired.T, values, w_gate[:, :M])
    return Problem(x, e4m3_ffn(w_gate, normal(N, K), normal(K, N)), slots)


def relative_errors(found: Tensor, exact: Tensor) -> Tensor:
    """Of each row, by its norm."""
    size = exact.norm(dim=1).clamp_min(1e-300)
    return (found.double() - exact).norm(dim=1) / size


def check(problem: Problem, kernels, most: float = 0.02) -> None:
    """Each way that takes it, against float64 and torch's FP8 products."""
    for way in problem.ways():
        try:
            check_way(problem, kernels, way, most)
        except AssertionError as error:
            raise AssertionError(f"{way.__name__}: {error}") from error


def check_way(problem: Problem, kernels, way, most: float) -> None:
    found, again = way(kernels, problem), way(kernels, problem)
    assert torch.equal(found.view(torch.int16), again.view(torch.int16)), "differs from run to run"
    exact, largest = problem.exact(), problem.hidden().abs().amax(1)
    # the walks' sums of h, which they do not scale, and of weights up to 448 hold 1e35
    held = ((largest == 0) | (largest > 1e-30)) & (largest < 1e35)
    held &= (exact.abs().amax(1) < 1e37) & (exact.norm(dim=1) > 1e-30)
    assert found[held].isfinite().all()
    ours = relative_errors(found, exact)[held]
    left_open = problem.left_open()
    over = ours - (left_open / exact.norm(dim=1).clamp_min(1e-300))[held]
    assert over.numel() == 0 or over.max() < most, f"row {int(over.argmax())}: {over.max():.3g}"
    silent = left_open == 0
    bias = problem.ffn.b_down
    wanted = torch.zeros_like(found) if bias is None else bias.expand_as(found)
    assert torch.equal(found[silent], wanted[silent])
    if problem.ffn.N % 16 == 0 and ours.numel() > 30:  # by chance one row may be off by more
        dense = relative_errors(problem.dense(), exact)[held].nan_to_num(nan=9.0)
        assert ours.square().mean() <= (1.3 * dense).square().mean()


@pytest.mark.parametrize("num", [1, FEW_HEAVY, FEW_HEAVY + 1])
@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize(("K", "N"), [(256, 2048), (2048, 8192), (4096, 14336)])
def test_few_heavy_rows_and_one_more(kernels, K, N, slots, num):
    """Of them 7 % and 50 % of the neurons fire, of the others 0.5 %."""
    torch.manual_seed(num + slots)
    problem = random_problem(130, K, N, mean=-2.6, bias=num > 1, decades=0.0)
    rows = torch.randperm(130, device=DEVICE)[:num]
    problem.x[rows, 0] *= torch.where(
        torch.arange(num, device=DEVICE) % 2 > 0, 0.57, 0.0
    ).bfloat16()
    assert int(((problem.gate() > 0).sum(1) > hopper_cap(N)).sum()) == num
    check(replace(problem, slots=slots), kernels)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("slots", [8, 64, 256])
def test_gate_pack_holds_what_fires(kernels, short, slots):
    torch.manual_seed(1)
    M, K, N = (100 if short else 20000), 384, 1032
    problem = random_problem(M, K, N, mean=-2.0, bias=True, decades=1.0)
    ffn, gate = problem.ffn, problem.gate()
    values, token_scales = quantise_rows(kernels, limits(), problem.x, ffn)
    plan = make_plan(M, N, ffn.shorts, slots, hopper_cap(N), limits())
    counts, entries, heavy_count = packed_buffers(plan, values.device)
    scales = token_scales, ffn.s_gate
    packed = counts, entries, heavy_count
    launch_gate_pack(kernels, limits(), values, ffn.w_gate, ffn.b_gate, *packed, scales)
    assert (counts >= 0).all()
    fits = (counts <= slots).all(1)
    assert fits.any()
    filled = torch.arange(slots, device=DEVICE) < counts[..., None]
    token, tile, slot = (filled & fits[:, None, None]).nonzero(as_tuple=True)
    words = entries[token, tile, slot]
    column, value = words & 0xFFFF, (words & ~0xFFFF).view(torch.float32).double()
    assert (column // 256 == tile).all()
    found = torch.zeros_like(gate)
    found[token, column] = value
    size = gate[fits].abs().amax(1, keepdim=True)
    error = (found[fits] - keep_fired(gate[fits])).abs()
    assert (error <= 2**-7 * size + 2**-8 * gate[fits].abs()).all()
    assert error.mean() < 2**-8 * gate[fits].abs().mean()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mean", [-3.0, -2.3, -1.0, 3.0])
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 128, 16), (70, 384, 272), (65, 640, 5632), (257, 4096, 2064), (3000, 2048, 5632)],
)
def test_an_ffn_against_float64(kernels, M, K, N, mean, bias):
    torch.manual_seed(2)
    check(random_problem(M, K, N, mean=mean, bias=bias, decades=0.3), kernels)


def test_large_sizes(kernels):
    torch.manual_seed(3)
    for M, K, N in ((2500, 4096, 14336), (5000, 1536, 8960), (300, 128, 65536)):
        check(random_problem(M, K, N, mean=-2.3, bias=False, decades=0.3), kernels)


def test_random_problems(kernels):
    """Fresh ones each time."""
    seed = random.SystemRandom().getrandbits(32)
    for number in range(200):
        draw = random.Random(seed + number)
        torch.manual_seed(seed + number)
        M, K, N = draw.randint(1, 700), 128 * draw.randint(1, 8), 8 * draw.randint(1, 300)
        bias, decades = draw.random() < 0.5, draw.choice([0.0, 3.0])
        mean = draw.uniform(-4.0, 2.0)
        problem = random_problem(M, K, N, mean=mean, bias=bias and decades == 0, decades=decades)
        problem.slots = draw.choice([1, 2, 8, 37, 64, 256])
        try:
            check(problem, kernels, most=0.05)
        except Exception as error:
            raise AssertionError(f"seed {seed + number}: {error}") from error


@pytest.mark.parametrize("N", [16, 256, 272, 1008])
@pytest.mark.parametrize("slots", [1, 64, 256])
def test_nothing_fires_and_everything_fires(kernels, N, slots):
    torch.manual_seed(4)
    for fired in (torch.zeros, torch.ones):
        check(patterned(fired(100, N, device=DEVICE).bool(), slots), kernels)


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("slots", [1, 8, 37, 64])
def test_exactly_full_and_one_over(kernels, slots, over):
    torch.manual_seed(5)
    fired = torch.zeros(130, 608, device=DEVICE, dtype=torch.bool)
    for row in range(0, 130, 3):  # in any tile, at any columns
        first, last = (0, 256) if row % 2 else (512, 608)
        fired[row, first + torch.randperm(last - first)[: slots + over]] = True
    check(patterned(fired, slots), kernels)


def test_as_many_pairs_as_a_token_may_have_and_one_more(kernels):
    torch.manual_seed(6)
    fired = torch.zeros(40, 1536, device=DEVICE, dtype=torch.bool)
    for row in range(40):
        fired[row, torch.randperm(1536)[: hopper_cap(1536) + row % 3 - 1]] = True
    check(patterned(fired, 256), kernels)


def test_rows_of_any_size(kernels):
    torch.manual_seed(7)
    check(random_problem(500, 512, 1024, mean=-2.0, bias=False, decades=18.0), kernels)
    problem = random_problem(300, 512, 1024, mean=-2.0, bias=False, decades=0.0)
    problem.x[5] = 0
    problem.x[6] *= 1e-30
    check(problem, kernels)


@pytest.mark.parametrize("count", [-1, 0, 1])
def test_as_many_pairs_as_a_walk_lists_and_one_more(kernels, count):
    """512 are the most, whatever N is."""
    torch.manual_seed(12)
    M, K, N = 40, 512, 16384
    cap = plan_walk(M, N, K, limits(), "e4m3").cap
    assert cap == 512 < hopper_cap(N)
    fired = torch.zeros(M, N, device=DEVICE, dtype=torch.bool)
    for row in range(0, M, 2):
        fired[row, torch.randperm(N)[: cap + count]] = True
    check(patterned(fired, 256), kernels)


@pytest.mark.parametrize("way", [*ALL_WAYS, by_dense])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(kernels, value, way):
    torch.manual_seed(8)
    problem = random_problem(300, 512, 1024, mean=-2.0, bias=False, decades=0.0)
    wanted, odd = way(kernels, problem), torch.tensor([0, 7, 64, 299], device=DEVICE)
    problem.x[odd, 3] = value
    found = way(kernels, problem)
    assert found[odd].isnan().all()
    others = torch.ones(300, dtype=torch.bool, device=DEVICE)
    others[odd] = False
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("way", [*ALL_WAYS, by_dense])
def test_a_cuda_graph_holds_it(kernels, way):
    torch.manual_seed(9)
    problem = random_problem(700, 256, 1024, mean=-2.3, bias=True, decades=0.0)
    problem.x[17, 0] *= -1  # heavy
    wanted = way(kernels, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = way(kernels, problem)
    for _ in range(3):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("M", "K", "N"), [(257, 128, 256), (300, 640, 1024), (300, 2048, 5632), (2000, 4096, 14336)]
)
def test_the_way_dense_is_torchs_own_bit_for_bit(kernels, M, K, N, bias):
    """Its products are the same calls, and both round x and h to the same bits."""
    torch.manual_seed(13)
    problem = random_problem(M, K, N, mean=-1.0, bias=bias, decades=4.0)
    problem.x[M // 2] = 0
    found = by_dense(kernels, problem)
    assert torch.equal(found.view(torch.int16), problem.dense().view(torch.int16))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 128, 256), (65, 2048, 5632), (256, 640, 1024), (128, 4096, 14336)]
)
def test_the_way_dense_of_few_tokens_errs_as_torch(kernels, M, K, N, bias):
    """Its products have their scales behind them; sums are rounded once more, to bf16."""
    torch.manual_seed(13)
    problem = random_problem(M, K, N, mean=-1.0, bias=bias, decades=4.0)
    problem.x[M // 2] = 0
    exact = problem.exact()
    ours, torchs = (
        relative_errors(y, exact).mean() for y in (by_dense(kernels, problem), problem.dense())
    )
    assert ours <= 1.1 * torchs + 2e-3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 128, 256), (65, 2048, 5632), (300, 640, 1024)])
def test_the_way_dense_takes_gate_and_up_at_once(kernels, M, K, N, bias):
    """Where one lies behind the other, as loaded models have them."""
    torch.manual_seed(14)
    problem = random_problem(M, K, N, mean=-1.0, bias=bias, decades=4.0)
    wanted, ffn = by_dense(kernels, problem), problem.ffn
    (gate, up), (s_gate, s_up) = (
        torch.cat(two).chunk(2) for two in ((ffn.w_gate, ffn.w_up), (ffn.s_gate, ffn.s_up))
    )
    b_gate, b_up = torch.cat((ffn.b_gate, ffn.b_up)).chunk(2) if bias else (None, None)
    of_gate, of_up = (
        Fp8Weight(*one) for one in ((gate, s_gate[:, None], b_gate), (up, s_up[:, None], b_up))
    )
    assert joined(of_gate, of_up) is not None
    problem.ffn = FFN(gate, up, ffn.w_down, b_gate, b_up, ffn.b_down, s_gate, s_up, ffn.s_down)
    assert relative_errors(by_dense(kernels, problem), wanted.double()).max() < 0.02


# ---- the operator


@pytest.mark.parametrize("M", [1, 16, 64, 65, 700])
@pytest.mark.parametrize("route", ["twell", "auto", "dense"])
def test_the_operator(kernels, M, route, tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    torch.manual_seed(10)
    problem = random_problem(M, 256, 1024, mean=-2.0, bias=True, decades=0.0)
    f, sources = problem.ffn, register_sources(kernel_files())
    down = Fp8Weight(f.w_down.t().contiguous(), f.s_down[:, None], f.b_down)
    gate, up = (
        Fp8Weight(w, scale[:, None], bias)
        for w, scale, bias in ((f.w_gate, f.s_gate, f.b_gate), (f.w_up, f.s_up, f.b_up))
    )
    for turned in (f.w_down, None):
        with reasons_said() as said:
            found = sparse_fp8_ffn(
                problem.x.view(1, M, 256), gate, up, down, turned, sources=sources, route=route
            )
        assert (said, found.shape) == ([], (1, M, 256))
        if route == "dense" and M > BARE_TOKENS:
            assert torch.equal(found[0], problem.dense())
        elif route == "dense":  # sums are rounded to bf16 before their scales, too
            assert relative_errors(found[0], problem.dense().double()).mean() < 0.02
        # up to 64 tokens the inputs are not rounded, but for the dense way
        assert relative_errors(found[0], problem.exact()).mean() < (0.2 if M <= 64 else 0.04)


def test_an_export_in_fp8_takes_the_ways_of_fp8(make_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    source = make_model("llama", hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    convert(source, tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out", quantize="fp8")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, dtype=torch.bfloat16
    ).to(DEVICE)
    ids = torch.arange(200, device="cuda").view(2, 100) % 512
    with torch.no_grad(), reasons_said() as said:
        assert model(ids).logits.isfinite().all()
    assert said == []
    (ways,) = {kind.ways for kind in known_choices() if "e4m3" in kind.kernels and kind.K == 128}
    assert ways == ("walk_gate", "lists", "dense")
    assert all(ffn.down_proj.turned is not None for ffn in gated_ffns(model))
