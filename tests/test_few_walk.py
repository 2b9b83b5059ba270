"""few_walk: the host's side agrees with the kernel; and the kernel, emulated on the CPU, is right
whatever the order in which threads and messages go."""

from dataclasses import replace

import emulated_walk as emulated
import pytest
import torch
from compiled import EVERY_CASE, compile_claims
from emulated_kernels import EmulatedKernels, needs_emulator
from launched import Launches, assert_taken, bf16, zero_ffn

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
from twellctl.bundle.twell_spec import E4M3_END, ENTRY_FILES, WALK_SIZES

H200 = Limits(132, 232448, (9, 0))
OTHERS = [Limits(108, 166912, (8, 0)), Limits(148, 232448, (10, 0))]
SOME_SIZES = WALK_SIZES if EVERY_CASE else WALK_SIZES[::2]  # tests behind have 6 and 3
AT_ONCE = {8: 15, 6: 17, 4: 30, 3: 39, 2: 66}  # of 512 threads each, on an H200
SHAPES = [(64, 8), (128, 520), (896, 4864), (2048, 5632), (2048, 32768), (4096, 14336)]
E4M3_SHAPES = [(128, 128), (896, 4864), (1536, 8960), (2048, 32768), (3584, 18944), (4096, 14336)]
ENDS = ["", E4M3_END]
OF_ALL = [("", *shape) for shape in SHAPES] + [(E4M3_END, *shape) for shape in E4M3_SHAPES]


def at_once(name: str, size: int, block: int, smem_bytes: int) -> int:
    return AT_ONCE[size]


def launched(M: int, K: int, N: int, *, full: bool = False, end: str = "", **how):
    """What few_pairs launches; `full`: with biases, a residual, counts."""
    x, ffn = bf16(M, K), zero_ffn(K, N, full, end)
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
    ("end", "K", "N"), [("", 64, 8), ("", 2048, 5632), (E4M3_END, 2048, 32768)]
)
def test_arguments_are_the_parameters_of_the_kernel(end, K, N, M, full):
    *gate, (name, grid, block, args, smem_bytes) = launched(M, K, N, full=full, end=end).made
    by_linear = M <= LINEAR_TOKENS or bool(end)
    assert [made[0].split("_")[1] for made in gate] == ["linear"] * by_linear
    for entry, given in ((name, args), *((made[0], made[3]) for made in gate)):
        assert entry.endswith(E4M3_END) == bool(end)
        assert_taken(entry, given)
    plan = plan_few_walk(M, N, K, H200, lambda *asked: 30, end)
    assert (name, grid, block) == (plan.name, (M * plan.size,), plan.threads)
    assert smem_bytes == plan.smem_bytes <= H200.smem_bytes
    if gate:  # it reads what the product wrote
        assert args[5] is gate[0][3][-3]
    assert args[5].shape == (M, N)


def test_the_walk_starts_early_and_its_gate_only_if_it_may():
    """Weights may have been written just before the first kernel, not before the second."""
    assert launched(16, 64, 96).overlaps == [False, True]
    assert launched(16, 64, 96, overlap=True).overlaps == [True, True]
    assert launched(LINEAR_TOKENS + 1, 64, 96).overlaps == [False]  # behind torch's product
    assert launched(LINEAR_TOKENS + 1, 128, 128, end=E4M3_END).overlaps == [False, True]


def test_clusters_are_as_large_as_all_run_at_the_same_time():
    sizes = [plan_few_walk(M, 5632, 2048, H200, at_once).size for M in range(1, 65)]
    assert sizes == [8] * 15 + [6] * 2 + [4] * 13 + [3] * 9 + [2] * 25
    assert plan_few_walk(64, 5632, 2048, H200, lambda *asked: 0).size == 2


@pytest.mark.parametrize(("end", "K", "N"), OF_ALL)
def test_all_columns_have_a_thread_and_all_lists_room(end, K, N):
    own = 16 if end else 8
    for M in (8, 64):
        plan = plan_few_walk(M, N, K, H200, at_once, end)
        assert plan.threads <= 512
        assert plan.ways in ((1, 2, 4) if end else (1, 2))  # batches go by turns: powers of two
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
    taken = [M for M in range(1, 70) if takes_few_walk(M, N, K, H200)]
    assert taken == list(WALK_TOKENS)
    assert not suits_few_walk(16, N, K, None)
    for M, most in ((4, 0.0216), (8, 0.043), (16, 0.086), (64, 0.086)):
        assert suits_few_walk(M, N, K, most)
        assert not suits_few_walk(M, N, K, most + 0.001)
    assert not takes_few_walk(16, N, 4160, H200)  # more columns than threads
    assert not any(takes_few_walk(16, N, K, limits, end) for limits in OTHERS for end in ENDS)
    assert not takes_few_walk(16, 65536, K, replace(H200, smem_bytes=99 << 10))
    of_e4m3 = [M for M in range(1, 70) if takes_few_walk(M, N, K, H200, E4M3_END)]
    assert of_e4m3 == list(WALK_TOKENS)
    assert not takes_few_walk(16, N, 5120, H200, E4M3_END)
    # of pairs with half the bytes twice as many
    assert suits_few_walk(16, N, K, 2 * 0.086, E4M3_END)
    assert not suits_few_walk(16, N, K, 2 * 0.087, E4M3_END)


def test_it_is_loaded_where_it_may_be_launched():
    for end in ENDS:
        taken = [M for M in range(1, 65) if takes_few_walk(M, 128, 128, H200, end)]
        assert taken == list(WALK_TOKENS)
        wanted = {entry for entry, file in ENTRY_FILES.items() if file == f"ffn/few_walk{end}.cu"}
        linear = {f"few_linear_{num}{end}" for num in (1, 2, 4, 8)}
        assert wanted | linear <= set(few_kernels(H200, end))
        for limits in OTHERS:
            assert not (wanted | linear) & set(few_kernels(limits, end))
            assert not any(takes_few_walk(M, 128, 128, limits, end) for M in range(1, 65))


def test_shared_memory_is_what_the_kernel_asks_for():
    claims = ["few_walk::kWays<few_walk::Bf16> == 2 && few_walk::kWays<few_walk::E4m3> == 4"]
    for end, K, N in OF_ALL:
        for size in WALK_SIZES:
            plan = twell_few_walk._plan(N, K, size, end)
            sizes = f"{{{N}, {K}, {plan.cap}, {plan.ways}, {plan.warps}, {plan.columns}}}"
            claims.append(f"few_walk::Sizes{sizes}.bytes({size}) == {plan.smem_bytes}")
    compile_claims("ffn/few_walk.cuh", claims, "sm_90a")


# ---- the kernel ----


def check(problem, size, ways=None, seeds=(1,)):
    (M, K), N = problem.x.shape, problem.gate.shape[1]
    plan = twell_few_walk._plan(N, K, size, E4M3_END if problem.s_up is not None else "")
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
    ("end", "M", "K", "N", "level", "size"),
    [
        *(("", 2, 576, 520, -1.5, size) for size in SOME_SIZES),
        *(("", 1, 1088, 264, 0.0, size) for size in WALK_SIZES[::3]),
        *((E4M3_END, 2, 640, 520, -1.5, size) for size in SOME_SIZES),
        *((E4M3_END, 1, 1152, 264, 0.0, size) for size in WALK_SIZES[::3]),
    ],
)
def test_it_is_exact_on_whole_numbers(end, M, K, N, level, size):
    check(emulated.random_problem(M, K, N, level, 1 + WALK_SIZES.index(size) % 2, end), size)
    if size == WALK_SIZES[0]:
        check(emulated.random_problem(M, K, N, level, 3, end), size, ways=2 if end else 1)


@needs_emulator
@pytest.mark.parametrize(
    ("end", "K", "N"),
    [("", 64, 8), ("", 128, 16), ("", 192, 2104), (E4M3_END, 128, 128), (E4M3_END, 256, 1544)],
)
def test_nothing_fires_and_everything_fires(end, K, N):
    for level, seed in ((-9.0, 1), (9.0, 2)):
        problem = emulated.random_problem(2, K, N, level, seed, end)
        assert problem.fired.float().mean().item() == (level > 0)
        check(problem, 8)
        check(problem, 3)


@needs_emulator
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("num", [1, 8, 9, 63, 65])
def test_lists_end_anywhere(num, end):
    problem = emulated.random_problem(2, 128, 136, -9.0, num, end)
    problem.gate[0, torch.randperm(136)[:num]] = 3
    problem.gate[1, :num] = 3
    check(problem, 2, seeds=(1, 2))
    check(problem, 6)


@needs_emulator
@pytest.mark.parametrize("end", ENDS)
def test_gates_at_0_and_not_finite(end):
    problem = emulated.random_problem(2, 128, 24, -9.0, 1, end)
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
    problem = emulated.random_problem(3, 256, 264, -1.0, 1, E4M3_END)
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
        EmulatedKernels(), twell_few_walk._plan(264, 256, 3, E4M3_END), problem, 1
    )
    wanted = problem.y.double()
    errors = (y.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert errors.max() < 2**-8, errors
