"""`few_walk` (kernels/ffn/few_walk.cuh) on a CPU, over emulated_step.py's emulator; a judge."""

import ctypes
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from emulated_step import EMULATOR, copy_kernels
from torch import Tensor

from twellctl.bundle.twell_few_walk import FewWalkPlan
from twellctl.bundle.twell_format import fires


@functools.cache
def library(folder: Path, size: int, all_: bool) -> ctypes.CDLL:
    """`few_walk` of clusters of `size` blocks, built in `folder`."""
    copy_kernels(folder)
    made = folder / f"few_walk_{size}_{all_}.so"
    defines = [f"-DWALK_SIZE={size}", f"-DWALK_ALL={str(all_).lower()}"]
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", *defines, "-I", str(folder)]
    paths = ["-I", str(EMULATOR), str(EMULATOR / "few_walk.cpp"), "-o", str(made)]
    subprocess.run([*command, *paths], check=True)
    return ctypes.CDLL(str(made))


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

    @property
    def fired(self) -> Tensor:
        return fires(self.gate)

    @property
    def y(self) -> Tensor:
        """In float64, rounded where the kernel rounds."""
        up = _product(self.x, self.w_up, self.b_up).double()
        hidden = (self.gate.double() * up).bfloat16().double()
        y = _product(torch.where(self.fired, hidden, 0), self.w_down.t(), self.b_down)
        return y if self.residual is None else (y.double() + self.residual.double()).bfloat16()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().t()
    return (y if bias is None else y + bias.double()).bfloat16()


def random_problem(M: int, K: int, N: int, level: float, seed: int) -> Problem:
    """`level`: of the gate's mean, in its standard deviations."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int, most: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).bfloat16()

    full = bool(seed % 2)
    gate = ((torch.randn(M, N, generator=generator) + level) * 8).round().bfloat16()
    return Problem(
        whole(M, K, most=1),
        gate,
        whole(N, K, most=1),
        whole(N, K, most=2),
        whole(N, most=3) if full else None,
        whole(K, most=3) if full else None,
        whole(M, K, most=50) if full else None,
    )


def emulate(walk: ctypes.CDLL, plan: FewWalkPlan, problem: Problem, seed: int):
    """(y, counts that began as 0, 1, ..) of one launch by `plan`."""
    (M, K), N = problem.x.shape, problem.gate.shape[1]
    counts, y = torch.arange(M, dtype=torch.int32), torch.full_like(problem.x, 7)
    inputs = problem.x, problem.w_up, problem.w_down, problem.b_up, problem.b_down
    status = walk.few_walk_of(
        *(M, plan.threads, -(-plan.smem_bytes // 16) * 16, seed),
        *(_pointer(t) for t in (*inputs, problem.gate, problem.residual)),
        *(N, K, plan.cap, plan.ways, plan.warps, plan.columns),
        *(_pointer(t) for t in (counts, y)),
    )
    assert status == 1, "some threads wait forever"
    return y, counts


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
