"""few_walk: the host's side agrees with the kernel; and the kernel, emulated on the CPU, is right
whatever the order in which threads and messages go."""

from dataclasses import replace

import emulated_walk as emulated
import pytest
import torch
from compiled import EVERY_CASE, compile_claims
from emulated_kernels import EmulatedKernels, needs_emulator
from launched import Launches, bf16, zero_ffn

from twellctl.bundle import twell_few_walk
from twellctl.bundle.twell_few import few_kernels, few_pairs
from twellctl.bundle.twell_few_walk import (
    LINEAR_TOKENS,
    WALK_TOKENS,
    plan_few_walk,
    suits_few_walk,
    takes_few_walk,
)
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import ENTRY_FILES, KINDS, WALK_SIZES, entry

H200 = Limits(132, 232448, (9, 0))
OTHERS = [Limits(108, 166912, (8, 0)), Limits(148, 232448, (10, 0))]
SOME_SIZES = WALK_SIZES if EVERY_CASE else WALK_SIZES[::2]  # tests behind have 6 and 3
AT_ONCE = {8: 15, 6: 17, 4: 30, 3: 39, 2: 66}  # of 512 threads each, on an H200
SHAPES = [(64, 8), (128, 520), (896, 4864), (2048, 5632), (2048, 32768), (4096, 14336)]
E4M3_SHAPES = [(128, 128), (896, 4864), (1536, 8960), (2048, 32768), (3584, 18944), (4096, 14336)]
OF_ALL = [("bf16", *shape) for shape in SHAPES] + [("e4m3", *shape) for shape in E4M3_SHAPES]


def at_once(name: str, size: int, block: int, smem_bytes: int) -> int:
    return AT_ONCE[size]


def launched(M: int, K: int, N: int, *, full: bool = False, kind: str = "bf16", **how):
    """What few_pairs launches; `full`: with biases, a residual, counts."""
    x, ffn = bf16(M, K), zero_ffn(K, N, full, kind)
    residual = torch.zeros_like(x) if full else None
    counts = torch.zeros(M, dtype=torch.int32) if full else None
    kernels = Launches()
    y = few_pairs(kernels, H200, x, ffn, residual=residual, counts=counts, **how)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    return kernels


# ---- launches ----


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("M", [WALK_TOKENS[0], LINEAR_TOKENS, LINEAR_TOKENS + 1, 64])
@pytest.mark.parametrize(
    ("kind", "K", "N"), [("bf16", 64, 8), ("bf16", 2048, 5632), ("e4m3", 2048, 32768)]
)
def test_the_walk_reads_the_gate_of_the_product_in_front_of_it(kind, K, N, M, full):
    *gate, (name, grid, block, args, smem_bytes) = launched(M, K, N, full=full, kind=kind).made
    by_linear = M <= LINEAR_TOKENS or kind == "e4m3"
    assert [made[0].split("_")[1] for made in gate] == ["linear"] * by_linear
    for made in (name, *(name for name, *_ in gate)):
        assert made.endswith("e4m3") == (kind == "e4m3")
    plan = plan_few_walk(M, N, K, H200, lambda *asked: 30, kind)
    assert (name, grid, block) == (plan.name, (M * plan.size,), plan.threads)
    assert smem_bytes == plan.smem_bytes <= H200.smem_bytes
    if gate:  # it reads what the product wrote
        assert args["gate"] is gate[0][3]["y"]
    assert args["gate"].shape == (M, N)


def test_the_walk_starts_early_and_its_gate_only_if_it_may():
    """Weights may have been written just before the first kernel, not before the second."""
    assert launched(16, 64, 96).overlaps == [False, True]
    assert launched(16, 64, 96, overlap=True).overlaps == [True, True]
    assert launched(LINEAR_TOKENS + 1, 64, 96).overlaps == [False]  # behind torch's product
    assert launched(LINEAR_TOKENS + 1, 128, 128, kind="e4m3").overlaps == [False, True]


def test_clusters_are_as_large_as_all_run_at_the_same_time():
    sizes = [plan_few_walk(M, 5632, 2048, H200, at_once, "bf16").size for M in range(1, 65)]
    assert sizes == [8] * 15 + [6] * 2 + [4] * 13 + [3] * 9 + [2] * 25
    assert plan_few_walk(64, 5632, 2048, H200, lambda *asked: 0, "bf16").size == 2


@pytest.mark.parametrize(("kind", "K", "N"), OF_ALL)
def test_all_columns_have_a_thread_and_all_lists_room(kind, K, N):
    own = 16 if kind == "e4m3" else 8
    for M in (8, 64):
        plan = plan_few_walk(M, N, K, H200, at_once, kind)
        assert plan.threads <= 512
        assert plan.ways in ((1, 2, 4) if kind == "e4m3" else (1, 2))  # powers of two
        assert plan.warps % 2 == 0  # sums of two warps are added up at a time
        assert own * 32 * plan.warps >= K
        assert plan.size * plan.columns >= K
        assert plan.columns % own == 0
        assert 4 * plan.threads >= plan.columns  # a thread adds up four
        if "_all" in plan.name:
            assert plan.size * plan.cap >= N
        else:
            assert plan.cap >= max(
                8 * (N // 8 * (rank + 1) // plan.size - N // 8 * rank // plan.size)
                for rank in range(plan.size)
            )


def test_it_is_taken_where_few_fire_on_hopper():
    K, N = 2048, 5632
    taken = [M for M in range(1, 70) if takes_few_walk(M, N, K, H200, "bf16")]
    assert taken == list(WALK_TOKENS)
    assert not suits_few_walk(16, N, K, None, "bf16")
    for M, most in ((4, 0.0216), (8, 0.043), (16, 0.086), (64, 0.086)):
        assert suits_few_walk(M, N, K, most, "bf16")
        assert not suits_few_walk(M, N, K, most + 0.001, "bf16")
    assert not takes_few_walk(16, N, 4160, H200, "bf16")  # more columns than threads
    assert not any(takes_few_walk(16, N, K, limits, kind) for limits in OTHERS for kind in KINDS)
    assert not takes_few_walk(16, 65536, K, replace(H200, smem_bytes=99 << 10), "bf16")
    of_e4m3 = [M for M in range(1, 70) if takes_few_walk(M, N, K, H200, "e4m3")]
    assert of_e4m3 == list(WALK_TOKENS)
    assert not takes_few_walk(16, N, 5120, H200, "e4m3")
    # of pairs with half the bytes twice as many
    assert suits_few_walk(16, N, K, 2 * 0.086, "e4m3")
    assert not suits_few_walk(16, N, K, 2 * 0.087, "e4m3")


def test_it_is_loaded_where_it_may_be_launched():
    for kind in KINDS:
        taken = [M for M in range(1, 65) if takes_few_walk(M, 128, 128, H200, kind)]
        assert taken == list(WALK_TOKENS)
        source = f"{entry('ffn/few_walk', kind)}.cu"
        wanted = {name for name, file in ENTRY_FILES.items() if file == source}
        linear = {entry(f"few_linear_{num}", kind) for num in (1, 2, 4, 8)}
        assert wanted | linear <= set(few_kernels(H200, kind))
        for limits in OTHERS:
            assert not (wanted | linear) & set(few_kernels(limits, kind))
            assert not any(takes_few_walk(M, 128, 128, limits, kind) for M in range(1, 65))


def test_shared_memory_is_what_the_kernel_asks_for():
    claims = ["few_walk::kWays<Bf16> == 2 && few_walk::kWays<E4m3> == 4"]
    for kind, K, N in OF_ALL:
        for size in WALK_SIZES:
            plan = twell_few_walk._plan(N, K, size, kind)
            sizes = f"{{{N}, {K}, {plan.cap}, {plan.ways}, {plan.warps}, {plan.columns}}}"
            claims.append(f"few_walk::Sizes{sizes}.bytes({size}) == {plan.smem_bytes}")
    compile_claims("ffn/few_walk.cuh", claims, "sm_90a")


# ---- the kernel ----


def check(problem, size, ways=None, seeds=(1,)):
    (M, K), N = problem.x.shape, problem.gate.shape[1]
    plan = twell_few_walk._plan(N, K, size, "e4m3" if problem.s_up is not None else "bf16")
    if ways is not None and ways < plan.ways:
        of_way = plan.warps * 512 + 4 * plan.size * plan.columns
        fewer = plan.smem_bytes - (plan.ways - ways) * of_way
        plan = replace(plan, ways=ways, smem_bytes=fewer)
    wanted = problem.y
    for seed in seeds:
        y, counts = emulated.emulate(EmulatedKernels(), plan, problem, seed)
        assert (counts - torch.arange(M)).tolist() == problem.fired.sum(-1).tolist()
        assert torch.equal(y.isnan(), wanted.isnan())
        wrong = (y.nan_to_num(0) != wanted.nan_to_num(0)).nonzero()
        assert not len(wrong), f"{len(wrong)} differ, the first at {wrong[0].tolist()}"


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "M", "K", "N", "level", "size"),
    [
        *(("bf16", 2, 576, 520, -1.5, size) for size in SOME_SIZES),
        *(("bf16", 1, 1088, 264, 0.0, size) for size in WALK_SIZES[::3]),
        *(("e4m3", 2, 640, 520, -1.5, size) for size in SOME_SIZES),
        *(("e4m3", 1, 1152, 264, 0.0, size) for size in WALK_SIZES[::3]),
    ],
)
def test_it_is_exact_on_whole_numbers(kind, M, K, N, level, size):
    check(emulated.random_problem(M, K, N, level, 1 + WALK_SIZES.index(size) % 2, kind), size)
    if size == WALK_SIZES[0]:
        ways = 2 if kind == "e4m3" else 1
        check(emulated.random_problem(M, K, N, level, 3, kind), size, ways=ways)


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "K", "N"),
    [
        ("bf16", 64, 8),
        ("bf16", 128, 16),
        ("bf16", 192, 2104),
        ("e4m3", 128, 128),
        ("e4m3", 256, 1544),
    ],
)
def test_nothing_fires_and_everything_fires(kind, K, N):
    for level, seed in ((-9.0, 1), (9.0, 2)):
        problem = emulated.random_problem(2, K, N, level, seed, kind)
        assert problem.fired.float().mean().item() == (level > 0)
        check(problem, 8)
        check(problem, 3)


@needs_emulator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 8, 9, 63, 65])
def test_lists_end_anywhere(num, kind):
    problem = emulated.random_problem(2, 128, 136, -9.0, num, kind)
    problem.gate[0, torch.randperm(136)[:num]] = 3
    problem.gate[1, :num] = 3
    check(problem, 2, seeds=(1, 2))
    check(problem, 6)


@needs_emulator
@pytest.mark.parametrize("kind", KINDS)
def test_gates_at_0_and_not_finite(kind):
    problem = emulated.random_problem(2, 128, 24, -9.0, 1, kind)
    odd = [-0.5, 0.5, -0.0, 0.0, torch.nan, torch.inf, -torch.inf, 2.0**-126]
    problem.gate[0, 8:16] = torch.tensor(odd)
    problem.gate[1, 3:5] = torch.tensor([0.0, 0.5])
    assert problem.fired[0, 8:16].tolist() == [False, True, False, False, True, True, False, True]
    check(problem, 4)
    problem.x[1, 5] = torch.inf
    check(problem, 4)


@needs_emulator
def test_numbers_of_any_size_over_e4m3():
    """x and h become f16 times powers of two: tokens, quads of lanes and pairs differ by much."""
    problem = emulated.random_problem(3, 256, 264, -1.0, 1, "e4m3")
    generator = torch.Generator().manual_seed(1)
    size = 10.0 ** torch.tensor([-15.0, 0.0, 15.0])[:, None]
    x = torch.randn(problem.x.shape, generator=generator) * size
    x[:, :64] *= 1e-6
    pairs = 10.0 ** torch.randint(-4, 5, problem.gate.shape, generator=generator)
    problem = replace(
        problem,
        x=x.bfloat16(),
        gate=(problem.gate.float() * pairs).bfloat16(),
        b_up=None,
        b_down=None,
        residual=None,
    )
    y, _ = emulated.emulate(
        EmulatedKernels(), twell_few_walk._plan(264, 256, 3, "e4m3"), problem, 1
    )
    wanted = problem.y.double()
    errors = (y.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert errors.max() < 2**-8, errors
