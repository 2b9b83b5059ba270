"""The kernels on a GPU against plain torch: exact where arithmetic is; on Hopper.

Most problems are of small whole numbers. There every product and every sum is exact in float32, in
whatever order, so that the result must have the bits of the reference: of the same equation in
float64, rounded to bf16 where the kernels round.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from ffns import ffn_of
from on_gpu import CAPABILITY, on_hopper, whole
from torch import Tensor

from twellctl.bundle import twell_ffn, twell_ways
from twellctl.bundle.twell_config import ROUTES, TILE
from twellctl.bundle.twell_ffn import register_sources, sparse_ffn
from twellctl.bundle.twell_format import fires, keep_fired, pack
from twellctl.bundle.twell_launch import device_limits, kernels_for
from twellctl.bundle.twell_sequence import launch_gate_pack
from twellctl.convert import convert
from twellctl.export import export
from twellctl.here.resources import kernel_files

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]
DEVICE = "cuda"
TOLERANCE = 2e-2  # of numbers that are not whole, relative to the largest of a row


@pytest.fixture
def way(request) -> str:
    """The way of few tokens, of problems that it takes; of others that of the rule."""
    if CAPABILITY != (9, 0):
        pytest.skip(f"not a Hopper GPU: compute capability {CAPABILITY}")
    return getattr(request, "param", "by rule")


# of problems with up to 64 tokens; more take lists whatever is named
by_both_ways = pytest.mark.parametrize("way", ["pairs", "union"], indirect=True)


@dataclass
class Problem:
    """An FFN and its input; `exact` if all is whole numbers."""

    x: Tensor
    weights: tuple[Tensor | None, ...]  # gate, up, down, and their biases
    slots: int
    exact: bool = True

    def run(self, sources: str, way: str) -> Tensor:
        """By a way, or a route; a way that does not take so many tokens here is not asked for."""
        x, ffn = self.x, ffn_of(*self.weights)
        M, limits = x.numel() // ffn.K, device_limits(x.device.index)
        here = twell_ways.Problem(M, ffn.N, ffn.K, limits)
        takes = [one.name for one in twell_ways.WAYS if one.takes(here)]
        how = {"slots": self.slots, "sources": sources, "plan": f"1+ {way}" if way in takes else ""}
        return sparse_ffn(x, ffn, **how, route=way if way in ROUTES else "twell")

    def __str__(self) -> str:
        N, K = self.weights[0].shape
        biases = ["no" if b is None else "a" for b in self.weights[3:]]
        density = fires(gate_of(self)).double().mean().item()
        return (
            f"M={self.x.shape[0]} K={K} N={N} slots={self.slots} "
            f"biases {biases} density {density:.4f} {'whole' if self.exact else 'real'} numbers"
        )


def gate_of(problem: Problem) -> Tensor:
    """The dense gate, bf16."""
    w_gate, b_gate = problem.weights[0], problem.weights[3]
    gate = problem.x.double() @ w_gate.double().T
    return (gate if b_gate is None else gate + b_gate.double()).bfloat16()


def reference(problem: Problem) -> Tensor:
    """The FFN in float64, rounded where the kernels round."""
    _, w_up, w_down, _, b_up, b_down = problem.weights
    up = problem.x.double() @ w_up.double().T
    up = (up if b_up is None else up + b_up.double()).bfloat16()
    hidden = (keep_fired(gate_of(problem)).double() * up.double()).bfloat16()
    y = hidden.double() @ w_down.double().T
    return (y if b_down is None else y + b_down.double()).bfloat16()


def by_neurons(w_down: Tensor) -> Tensor:
    """The same `[K, N]`, lying as the kernels read it; of others each call makes a copy."""
    return w_down.t().contiguous().t()


def check(problem: Problem, sources: str, way: str) -> None:
    found, wanted = problem.run(sources, way), reference(problem)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    odd = found.isnan() != wanted.isnan()
    assert not odd.any(), f"{problem}: NaN differs at {odd.nonzero()[:5].tolist()}"
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    if problem.exact:
        differ = (found != wanted).nonzero()
        assert not len(differ), (
            f"{problem}: {len(differ)} differ, in {len(set(differ[:, 0].tolist()))} rows; "
            f"(row, column) {differ[:5].tolist()}: {found[tuple(differ[0])]} "
            f"instead of {wanted[tuple(differ[0])]}"
        )
    else:
        scale = wanted.abs().amax(-1, keepdim=True).clamp(min=wanted.abs().mean() + 1e-6)
        error = ((found - wanted).abs() / scale).max().item()
        assert error < TOLERANCE, f"{problem}: relative error {error:.1e}"


def random_problem(draw: random.Random) -> Problem:
    """Any sizes, any density: by a constant for each token, and by biases for each tile."""
    torch.manual_seed(draw.getrandbits(60))
    M = draw.choice([1, 2, 7, 8, 9, 63, 65, 127, 129, 200, 257, draw.randint(1, 1200)])
    K = 64 * draw.choice([1, 1, 2, 3, 5, 8])
    N = 8 * draw.choice([1, 2, 12, 31, 32, 33, 65, 96, draw.randint(1, 200)])
    exact = draw.random() < 0.8
    x, w_gate, w_up = whole(M, K), whole(N, K), whole(N, K)
    w_down = whole(K, N, most=2)
    if not exact:
        x, w_gate, w_up, w_down = (torch.randn_like(t) for t in (x, w_gate, w_up, w_down))
        w_gate, w_up, w_down = (w * w.shape[1] ** -0.5 for w in (w_gate, w_up, w_down))
    if draw.random() < 0.5:
        w_down = by_neurons(w_down)
    spread = (2 * K / 9) ** 0.5 if exact else 0.7
    level = draw.choice([-8.0, -4.2, -3.8, -3.4, -3.0, -2.5, -2.0, -1.0, 0.0, 8.0]) * spread
    tokens = torch.randn(M, device=DEVICE) * draw.choice([0.0, 0.3, 2.0]) * spread + level
    x[:, 0] = tokens.round() if exact else tokens
    w_gate[:, 0] = 1
    biases: list[Tensor | None] = [None, None, None]
    if draw.random() < 0.5:
        tiles = torch.randn(-(-N // TILE), device=DEVICE) * spread * 2
        b_gate = tiles.repeat_interleave(TILE)[:N]
        biases[0] = (b_gate.round() if exact else b_gate).bfloat16()
    if draw.random() < 0.5:
        biases[1] = whole(N, most=3)
    if draw.random() < 0.5:
        biases[2] = whole(K, most=3)
    slots = draw.choice([1, 2, 8, 24, 37, 64, 128, 256])
    return Problem(x, (w_gate, w_up, w_down, *biases), slots, exact)


def patterned(fired: Tensor, slots: int) -> Problem:
    """A problem whose gate fires exactly where `fired` `[M, N]`, M <= 512, says so."""
    (M, N), K = fired.shape, 512
    x, w_gate = torch.eye(K, device=DEVICE)[:M].bfloat16(), -whole(N, K).abs()
    values = torch.randint(1, 100, (N, M), device=DEVICE).bfloat16()
    w_gate[:, :M] = torch.where(fired.T, values, w_gate[:, :M])
    return Problem(x, (w_gate, whole(N, K), whole(K, N), None, None, None), slots)


@by_both_ways
def test_a_thousand_random_problems(sources, way):
    seed = random.SystemRandom().getrandbits(32)
    for number in range(1000):
        problem = random_problem(random.Random(seed + number))
        try:
            check(problem, sources, way)
        except Exception as error:
            raise AssertionError(f"random.Random({seed + number}): {error}") from error


@pytest.mark.parametrize("N", [2048, 5632, 16384, 65536])
def test_real_sizes(sources, way, N):
    torch.manual_seed(0)
    K, M = (2048, 1000) if N < 65536 else (64, 300)
    x, w_gate, w_up = whole(M, K), whole(N, K), whole(N, K)
    x[:, 0], w_gate[:, 0] = -70 if K == 2048 else -12, 1
    w_down = whole(K, N)
    check(Problem(x, (w_gate, w_up, w_down, None, None, None), 64), sources, way)


@pytest.mark.parametrize("N", [8, 256, 264, 1000])
@pytest.mark.parametrize("slots", [1, 64, 256])
def test_nothing_fires_and_everything_fires(sources, way, N, slots):
    torch.manual_seed(0)
    for fired in (torch.zeros, torch.ones):
        check(patterned(fired(100, N, device=DEVICE).bool(), slots), sources, way)


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("slots", [1, 8, 37, 64])
def test_exactly_full_and_one_over(sources, way, slots, over):
    torch.manual_seed(0)
    fired = torch.zeros(130, 600, device=DEVICE, dtype=torch.bool)
    for row in range(0, 130, 3):  # in any tile, at any columns
        first, last = (0, 256) if row % 2 else (512, 600)
        fired[row, first + torch.randperm(last - first)[: slots + over]] = True
    check(patterned(fired, slots), sources, way)


@by_both_ways
def test_as_many_pairs_as_a_token_may_have_and_one_more(sources, way):
    torch.manual_seed(0)
    cap = 64  # of 1536 neurons
    fired = torch.zeros(40, 1536, device=DEVICE, dtype=torch.bool)
    for row in range(40):
        fired[row, torch.randperm(1536)[: cap + row % 3 - 1]] = True
    check(patterned(fired, 256), sources, way)


@pytest.mark.parametrize("same", [True, False], ids=["same neurons", "one bank class"])
def test_neurons_that_crowd(sources, way, same):
    """All tokens fire on the same neurons, or on those of one bank class alone."""
    torch.manual_seed(0)
    fired = torch.zeros(300, 1024, device=DEVICE, dtype=torch.bool)
    fired[:, torch.randperm(1024)[:20] if same else torch.arange(0, 320, 8)] = True
    check(patterned(fired, 64), sources, way)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(sources, way, value):
    torch.manual_seed(0)
    x, weights = whole(70, 128), (whole(520, 128), whole(520, 128), whole(128, 520))
    x[:, 0], weights[0][:, 0] = -20, 1
    for row in (0, 13, 69):
        x[row, row % 128] = value
    check(Problem(x, (*weights, None, None, None), 64), sources, way)


@by_both_ways
@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 3, 64), (2, 0, 64)])
def test_leading_shapes_and_strides(sources, way, shape):
    torch.manual_seed(0)
    weights = (whole(96, 64), whole(96, 64), whole(64, 96), None, None, None)
    x = whole(*shape)
    wanted = reference(Problem(x.reshape(-1, 64), weights, 64)).view(shape)
    assert torch.equal(Problem(x, weights, 64).run(sources, way), wanted)
    strided = torch.stack([x, x], -1)[..., 0]  # every other number
    assert torch.equal(Problem(strided, weights, 64).run(sources, way), wanted)
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)  # not aligned to 16 bytes
    assert torch.equal(Problem(shifted, weights, 64).run(sources, way), wanted)


@by_both_ways
def test_halves_of_a_fused_weight(sources, way):
    torch.manual_seed(0)
    fused = whole(192, 64)
    problem = Problem(whole(50, 64), (*fused.chunk(2), whole(64, 96), None, None, None), 64)
    check(problem, sources, way)


def test_any_layout_of_w_down_gives_the_same(sources, way):
    problem = real_problem(M=200)
    w_gate, w_up, w_down, *biases = problem.weights
    wanted = problem.run(sources, way)
    padded = torch.cat([w_down, w_down], 1)[:, : w_down.shape[1]]
    spread = torch.stack([w_down, w_down], -1)[..., 0]
    shifted = torch.cat([w_down.t().flatten()[:1], w_down.t().flatten()])[1:]  # not aligned
    shifted = shifted.view(w_down.shape[1], -1).t()
    for laid in (w_down.contiguous(), padded, spread, shifted):
        problem.weights = (w_gate, w_up, laid, *biases)
        assert torch.equal(problem.run(sources, way), wanted)


def real_problem(M: int = 700) -> Problem:
    torch.manual_seed(0)
    K, N = 256, 1024
    shapes = ((M, K), (N, K), (N, K), (K, N))
    x, *weights = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    weights = [weight * weight.shape[1] ** -0.5 for weight in weights]
    x[:, 0] = -torch.linspace(1, 4, M, device=DEVICE)
    weights[0][:, 0] = 1
    weights[2] = by_neurons(weights[2])
    return Problem(x, (*weights, None, None, None), 64, exact=False)


def test_results_do_not_depend_on_time(sources, way):
    problem = real_problem()
    first = problem.run(sources, way)
    for _ in range(20):
        assert torch.equal(problem.run(sources, way), first)


def test_a_cuda_graph_holds_it(sources, way):
    problem = real_problem()
    inputs = [problem.x.clone(), problem.x.flip(0), torch.zeros_like(problem.x), problem.x + 0.25]
    wanted = []
    for x in inputs:
        problem.x = x
        wanted.append(problem.run(sources, way))
    problem.x = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = problem.run(sources, way)
    for x, expected in zip(inputs, wanted, strict=True):
        problem.x.copy_(x)
        graph.replay()
        assert torch.equal(y, expected)


@by_both_ways
def test_threads_with_streams_of_their_own(sources, way):
    problems = [random_problem(random.Random(seed)) for seed in range(8)]
    wanted = [problem.run(sources, way) for problem in problems]
    torch.cuda.synchronize()
    failures, start = [], threading.Barrier(len(problems))

    def work(problem: Problem, expected: Tensor) -> None:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                if not torch.equal(problem.run(sources, way), expected):
                    failures.append(str(problem))

    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(work, problems, wanted))
    assert not failures


def test_two_sets_of_kernels(sources, way):
    other = register_sources(kernel_files() | {"another.txt": b""})
    assert other != sources
    problem = random_problem(random.Random(1))
    for kernels in (sources, other, sources, other):
        check(problem, kernels, way)


def test_two_gpus(sources, way):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    problem = real_problem()
    wanted = problem.run(sources, way)
    for device in ("cuda:1", "cuda:0", "cuda:1"):  # the current one stays cuda:0
        weights = tuple(None if w is None else w.to(device) for w in problem.weights)
        moved = Problem(problem.x.to(device), weights, 64)
        found = moved.run(sources, way)
        assert found.device == torch.device(device)
        if torch.cuda.get_device_name(device) == torch.cuda.get_device_name(0):
            assert torch.equal(found.to(DEVICE), wanted)


def test_what_the_kernels_do_not_take_is_computed_plainly(sources, monkeypatch):
    reasons = []
    monkeypatch.setattr(twell_ffn, "say_once", reasons.append)
    problem = real_problem(M=20)
    wanted = reference(problem).float()
    for dtype in (torch.float16, torch.float32):
        weights = [None if w is None else w.to(dtype) for w in problem.weights]
        found = sparse_ffn(problem.x.to(dtype), ffn_of(*weights), sources=sources)
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=2e-2)
    weights = whole(96, 100), whole(96, 100), whole(100, 96), None, None, None
    odd = Problem(whole(20, 100), weights, 64)
    assert torch.equal(odd.run(sources, "auto"), reference(odd))
    assert reasons == [
        "the kernels take bf16, not float16",
        "the kernels take bf16, not float32",
        "the kernels take a hidden size that is a multiple of 64, not 100",
    ]


@pytest.mark.parametrize("asked", ["dense", "auto", "twell"])
def test_other_routes(sources, asked):
    if asked == "twell" and CAPABILITY != (9, 0):
        pytest.skip("not a Hopper GPU")
    for M in (40, 700):
        check(real_problem(M), sources, asked)


@by_both_ways
def test_a_compiled_model_of_an_export(make_model, sources, way, tmp_path):
    from twellctl.bundle.twell_model import twell_class

    sizes = {"hidden_size": 128, "intermediate_size": 520}
    convert(make_model("llama", **sizes), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    model = twell_class("LlamaForCausalLM").from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, twell_route="twell"
    )
    model.to(DEVICE)
    for layer in model.model.layers:
        layer.mlp.twell_plan = f"1-3 union, 4-64 {way}, 65+ lists"
    for layer in model.model.layers:
        assert layer.mlp.down_proj.weight.stride() == (1, 128)
    ids = ((torch.arange(34).view(2, 17) * 37) % 512).to(DEVICE)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        found = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    scale = wanted.float().abs().max()
    assert (found.float() - wanted.float()).abs().max() / scale < 5e-2


# ---- gate_pack ----

_NOT_FINITE = 1 << 30  # in a count


@on_hopper
@pytest.mark.parametrize("slots", [1, 37, 64, 256])
@pytest.mark.parametrize("seed", range(12))
def test_gate_pack_is_the_plain_form(sources, slots, seed):
    problem = random_problem(random.Random(1000 + seed))
    while not problem.exact:
        seed += 12
        problem = random_problem(random.Random(1000 + seed))
    w_gate, b_gate = problem.weights[0], problem.weights[3]
    if seed % 3 == 0:
        problem.x[0, 1] = torch.inf
    wanted = pack(gate_of(problem), TILE, slots)
    counts = torch.empty_like(wanted.counts, dtype=torch.int32)
    entries, heavy_count = counts.new_empty(*counts.shape, slots), counts.new_empty(1)
    here = kernels_for(sources, 0), device_limits(0)
    launch_gate_pack(*here, problem.x, w_gate, b_gate, counts, entries, heavy_count)
    finite = gate_of(problem).isfinite()
    tiles = torch.nn.functional.pad(finite, (0, -finite.shape[1] % TILE), value=True)
    odd = ~tiles.view(*counts.shape, TILE).all(-1)
    assert torch.equal((counts & _NOT_FINITE) != 0, odd), problem
    assert torch.equal(counts & ~_NOT_FINITE, wanted.counts), problem
    filled = torch.arange(slots, device=DEVICE) < wanted.counts[..., None]
    fits = filled & (wanted.counts <= slots)[..., None] & ~wanted.overflowed[:, None, None]
    by_column = (entries.long() & 0xFFFF).masked_fill(~filled, 1 << 20)
    ordered = entries.gather(-1, by_column.argsort(-1))
    assert torch.equal(ordered[fits], wanted.entries[fits]), problem
