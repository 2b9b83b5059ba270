"""`few_walk` (kernels/ffn/few_walk.cuh) on a CPU, by emulated_kernels.py, and a judge.

Weights are bf16, or e4m3 with powers of two for scales.
"""

from dataclasses import dataclass

import torch
from emulated_kernels import EmulatedKernels
from torch import Tensor

from twellctl.bundle.twell_few_walk import FewWalkPlan
from twellctl.bundle.twell_format import fires


@dataclass(frozen=True)
class Problem:
    """Whole numbers, of which every order of sums gives the same bits; the gate may be anything."""

    x: Tensor
    gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None
    residual: Tensor | None
    s_up: Tensor | None = None
    s_down: Tensor | None = None

    @property
    def fired(self) -> Tensor:
        return fires(self.gate)

    @property
    def y(self) -> Tensor:
        """In float64, rounded where the kernel rounds."""
        up = _product(self.x, self.w_up, self.s_up, self.b_up).double()
        hidden = (self.gate.double() * up).bfloat16().double()
        hidden = torch.where(self.fired, hidden, 0)
        y = _product(hidden, self.w_down.t(), self.s_down, self.b_down)
        return y if self.residual is None else (y.double() + self.residual.double()).bfloat16()


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().t()
    y = y if scale is None else y * scale.double()
    return (y if bias is None else y + bias.double()).bfloat16()


def random_problem(M: int, K: int, N: int, level: float, seed: int, kind: str = "bf16") -> Problem:
    """`level`: of the gate's mean, in its standard deviations; `kind`: of weights."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int, most: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).bfloat16()

    def powers(num: int) -> Tensor | None:
        return 2.0 ** torch.randint(-1, 2, (num,), generator=generator) if kind == "e4m3" else None

    full, dtype = bool(seed % 2), torch.float8_e4m3fn if kind == "e4m3" else torch.bfloat16
    gate = ((torch.randn(M, N, generator=generator) + level) * 8).round().bfloat16()
    return Problem(
        whole(M, K, most=1),
        gate,
        whole(N, K, most=1).to(dtype),
        whole(N, K, most=2).to(dtype),
        whole(N, most=3) if full else None,
        whole(K, most=3) if full else None,
        whole(M, K, most=50) if full else None,
        powers(N),
        powers(K),
    )


def emulate(kernels: EmulatedKernels, plan: FewWalkPlan, problem: Problem, seed: int):
    """(y, counts that began as 0, 1, ..) of one launch by `plan`, behind the gate's product."""
    (M, K), N = problem.x.shape, problem.gate.shape[1]
    counts, y = torch.arange(M, dtype=torch.int32), torch.full_like(problem.x, 7)
    kernels.launch(
        plan.name,
        (M * plan.size,),
        plan.threads,
        {
            "x": problem.x,
            "w_up": problem.w_up,
            "w_down": problem.w_down,
            "b_up": problem.b_up,
            "b_down": problem.b_down,
            "gate": problem.gate,
            "residual": problem.residual,
            "columns": plan.columns,
            "N": N,
            "K": K,
            "cap": plan.cap,
            "ways": plan.ways,
            "warps": plan.warps,
            "counts": counts,
            "y": y,
            "up_scale": problem.s_up,
            "down_scale": problem.s_down,
        },
        plan.smem_bytes,
        cluster=plan.size,
        seed=seed,
        from_previous=[problem.gate],
    )
    return y, counts
