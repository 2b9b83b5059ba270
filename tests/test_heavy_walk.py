"""heavy_walk: the host's side agrees with the kernels, and they are right on a CPU (emulator)."""

from dataclasses import dataclass, replace

import pytest
import torch
from emulated_kernels import EmulatedKernels, needs_emulator
from launched import Launches
from torch import Tensor

from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import HEAVY_WALK_SIZE, KINDS
from twellctl.bundle.twell_walk import FEW_HEAVY, Heavy, launch_heavy_walk, plan_heavy_walk
from twellctl.bundle.twell_weights import FFN

H200 = Limits(132, 232448, (9, 0))
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS)
OF_GATE = pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])


@dataclass(frozen=True)
class Problem:
    """Whole numbers, of which every order of sums gives the same bits. `scales`: of tokens."""

    x: Tensor
    ffn: FFN
    scales: Tensor | None

    @property
    def gate(self) -> Tensor:
        return self._product(self.x, self.ffn.w_gate, self.ffn.s_gate, self.ffn.b_gate)

    @property
    def y(self) -> Tensor:
        """In float64, rounded where the kernels round."""
        ffn = self.ffn
        up = self._product(self.x, ffn.w_up, ffn.s_up, ffn.b_up).double()
        gate = keep_fired(self.gate).double()
        hidden = torch.where(fires(self.gate), gate * up, 0).bfloat16().double()
        y = hidden @ ffn.w_down.double()
        y = y if ffn.s_down is None else y * ffn.s_down.double()
        return (y if ffn.b_down is None else y + ffn.b_down.double()).bfloat16()

    def _product(self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None):
        y = x.double() @ weight.double().t()
        if scale is not None:
            y = y * scale.double() * self.scales[:, :1].double()
        return (y if bias is None else y + bias.double()).bfloat16()


def random_problem(M: int, K: int, N: int, kind: str, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int, most: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).bfloat16()

    def powers(*shape: int) -> Tensor | None:
        return 2.0 ** torch.randint(-1, 2, shape, generator=generator) if kind == "e4m3" else None

    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.bfloat16
    biases = [whole(n, most=3) if seed % 2 else None for n in (N, N, K)]
    weights = [whole(N, K, most=most).to(dtype) for most in (1, 1, 2)]
    ffn = FFN(*weights, *biases, *(powers(n) for n in (N, N, K)))
    return Problem(whole(M, K, most=1).to(dtype), ffn, powers(M, 2))


class OnCpu(EmulatedKernels):
    """Knows the cluster, which is compiled in; what the kernel in front writes comes late."""

    late: tuple = ()

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        assert overlap
        super().launch(
            *(name, grid, block, args, smem_bytes), cluster=HEAVY_WALK_SIZE, from_previous=self.late
        )


def pack(gate: Tensor, counts: Tensor, entries: Tensor) -> None:
    """What gate_pack leaves of `gate` bf16 `[M, N]`; slots behind the count are anything."""
    entries.fill_(-1)
    for tile, part in enumerate(gate.split(256, 1)):
        fired = fires(part)
        counts[:, tile] = fired.sum(1) | (~part.isfinite()).any(1).int() << 30
        for token, row in enumerate(fired):
            columns = row.nonzero().flatten()
            columns = columns[torch.randperm(len(columns))][: entries.shape[2]]
            bits = part[token, columns].view(torch.int16).int() << 16
            entries[token, tile, : len(columns)] = bits | (256 * tile + columns.int())


def walked(
    kernels: OnCpu, problem: Problem, rows: list[int], packed: bool, slots: int = 64
) -> Tensor:
    """y, 7 where nothing was written, of a list that names `rows`."""
    M, N = len(problem.x), problem.ffn.N
    gate, count = (problem.gate,), torch.tensor([len(rows)], dtype=torch.int32)
    if packed:
        tiles = M, -(-N // 256)
        gate = torch.empty(tiles, dtype=torch.int32), torch.empty((*tiles, slots)).int()
        pack(problem.gate, *gate)
    listed = torch.full((M,), -1, dtype=torch.int32)
    listed[: len(rows)] = torch.tensor(rows)
    y = torch.full((M, problem.ffn.K), 7).bfloat16()
    kernels.late = listed, count
    given = problem.x, problem.ffn, gate, Heavy(listed, count), y, problem.scales
    assert launch_heavy_walk(kernels, H200, *given, overlap=True).few == min(M, FEW_HEAVY)
    return y


def check(problem: Problem, y: Tensor, rows: list[int]) -> None:
    wanted = torch.full_like(y, 7)
    wanted[rows] = problem.y[rows]
    wrong = (y != wanted).any(1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong} differ"


@pytest.fixture(scope="module")
def kernels():
    return OnCpu()


# ragged tiles, more tiles than blocks, several batches of a way, two ways and one, more than 512
# inputs of a block's columns
@needs_emulator
@OF_GATE
@OF_EACH_KIND
@pytest.mark.parametrize(
    ("K", "N", "slots"), [(128, 264, 64), (128, 2312, 256), (2176, 520, 40), (640, 8, 1)]
)
def test_listed_rows_alone_are_written_exactly(kernels, K, N, slots, kind, packed):
    problem, rows = random_problem(4, K, N, kind, seed=N), [3, 1]
    check(problem, walked(kernels, problem, rows, packed, slots), rows)


@needs_emulator
@OF_EACH_KIND
def test_tiles_that_overflowed_are_multiplied_anew(kernels, kind):
    """None, some and all of a row's; one that is exactly full."""
    problem = random_problem(3, 128, 776, kind, seed=5)
    fullest = fires(problem.gate).int().split(256, 1)
    of_tiles = torch.stack([part.sum(1) for part in fullest], 1)[1].tolist()
    for slots in (1, min(of_tiles), max(of_tiles) - 1, max(of_tiles)):
        check(problem, walked(kernels, problem, [1], True, slots), [1])


@needs_emulator
@OF_GATE
@OF_EACH_KIND
def test_rows_of_which_all_or_none_fire(kernels, kind, packed):
    problem = random_problem(2, 128, 520, kind, seed=4)
    for value in (-1, 1):  # channel 0 decides
        weights = problem.ffn.w_gate.float()
        weights[:, 0] = 100 * value
        x = problem.x.float()
        x[:, 0] = 1
        ffn = replace(problem.ffn, w_gate=weights.to(problem.ffn.w_gate.dtype))
        changed = replace(problem, ffn=ffn, x=x.to(problem.x.dtype))
        assert fires(changed.gate).float().mean() == (value > 0)
        check(changed, walked(kernels, changed, [0, 1], packed), [0, 1])


@needs_emulator
@OF_GATE
def test_a_row_that_is_not_finite_makes_no_other_so(kernels, packed):
    problem = random_problem(3, 128, 264, "", seed=2)
    problem.x[0, 5], problem.x[2, 9] = torch.nan, torch.inf
    y = walked(kernels, problem, [0, 1, 2], packed)
    assert not y[[0, 2]].isfinite().any()
    assert torch.equal(y[1], problem.y[1])


@needs_emulator
@OF_GATE
def test_gates_of_minus_infinity_bring_what_the_dense_equation_has(kernels, packed):
    """relu of them is 0; and 0 times an up that is not finite is NaN."""
    problem = random_problem(2, 128, 264, "", seed=2)
    problem.ffn.w_gate[:, 0], problem.x[0, 0] = 1, -torch.inf
    assert (problem.gate[0] == -torch.inf).all()
    assert walked(kernels, problem, [0], packed)[0].isnan().all()


@needs_emulator
def test_gates_of_minus_infinity_add_nothing_where_up_is_finite(kernels):
    """They are as any that do not fire."""
    problem = random_problem(2, 128, 264, "", seed=2)
    found = []
    for value in (-torch.inf, -1):
        gate = problem.gate.clone()
        gate[0, 5:9] = value
        listed, y = Heavy(torch.zeros(2).int(), torch.ones(1).int()), torch.empty(2, 128).bfloat16()
        kernels.late = ()
        given = problem.x, problem.ffn, (gate,), listed, y
        launch_heavy_walk(kernels, H200, *given, overlap=True)
        found.append(y[0])
    assert found[0].isfinite().all()
    assert torch.equal(*found)


@needs_emulator
@pytest.mark.parametrize(("kind", "packed"), [("bf16", True), ("e4m3", False)])
@pytest.mark.parametrize("num", [0, FEW_HEAVY, FEW_HEAVY + 1])
def test_no_row_all_that_are_few_and_one_more(kernels, num, kind, packed):
    problem = random_problem(FEW_HEAVY + 2, 128, 8, kind, seed=3)
    rows = list(range(num))
    y = walked(kernels, problem, rows, packed)
    check(problem, y, rows if num <= FEW_HEAVY else [])


@OF_GATE
@OF_EACH_KIND
@pytest.mark.parametrize(
    ("N", "K"), [(8, 64), (4864, 896), (14336, 4096), (18944, 3584), (65536, 4096)]
)
def test_plans(N, K, kind, packed):
    plan = plan_heavy_walk(N, K, H200, kind, packed=packed)
    assert plan.threads <= 512
    assert plan.threads * (16 if kind == "e4m3" else 8) >= K * plan.ways
    assert plan.size * plan.columns >= K
    assert plan.size * plan.cap >= N
    assert plan.smem_bytes < H200.smem_bytes


@OF_EACH_KIND
def test_what_it_does_not_take_goes_densely(kind):
    most = 8192 if kind == "e4m3" else 4096
    assert plan_heavy_walk(5632, most, H200, kind, packed=True)
    assert plan_heavy_walk(5632, most + 128, H200, kind, packed=True) is None
    assert plan_heavy_walk(5632, 2048, replace(H200, smem_bytes=8192), kind, packed=True) is None
    kernels, heavy = Launches(), Heavy(torch.zeros(3).int(), torch.zeros(1).int())
    problem = random_problem(1, most + 128, 8, kind, seed=1)
    gate = problem.gate
    given = problem.x, problem.ffn, (gate,), heavy, torch.empty_like(gate), problem.scales
    assert launch_heavy_walk(kernels, H200, *given) is heavy
    assert not kernels.made
