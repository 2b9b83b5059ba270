"""The walk over pairs in large sizes against plain torch, on whole numbers; test_sparse_ffn.py asks
the operator for the rest."""

import pytest
import torch
from on_gpu import HOPPER, whole
from torch import Tensor

from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_launch import device_limits
from twellctl.bundle.twell_walk import plan_walk, walk_gate_ffn
from twellctl.bundle.twell_weights import FFN

pytestmark = HOPPER
SIZES = [(1, 64, 8), (65, 192, 264), (133, 320, 1000), (300, 2048, 520), (257, 4096, 2056)]


def make_ffn(N: int, K: int, biases: bool) -> FFN:
    rest = [whole(n, most=3) if biases else None for n in (N, N, K)]
    ffn = FFN(whole(N, K), whole(N, K), whole(N, K), *rest)
    ffn.w_gate[:, 0] = 1  # channel 0 of x says how many fire
    return ffn


def wanted(x: Tensor, ffn: FFN) -> Tensor:
    """The FFN in float64, rounded where the kernels round."""

    def product(weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.double() @ weight.double().T
        return (y if bias is None else y + bias.double()).bfloat16()

    gate = keep_fired(product(ffn.w_gate, ffn.b_gate))
    hidden = (gate.double() * product(ffn.w_up, ffn.b_up).double()).bfloat16()
    y = hidden.double() @ ffn.w_down.double()
    return (y if ffn.b_down is None else y + ffn.b_down.double()).bfloat16()


def check(kernels, x: Tensor, ffn: FFN) -> Tensor:
    y = walk_gate_ffn(kernels, device_limits(0), x, ffn)
    expected = wanted(x, ffn)
    assert torch.equal(y.isnan(), expected.isnan())
    wrong = (y.nan_to_num() != expected.nan_to_num()).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} differ, in rows {sorted(set(wrong[:, 0].tolist()))[:8]}; the first at "
        f"{wrong[0].tolist()}: {y[tuple(wrong[0])]} for {expected[tuple(wrong[0])]}"
    )
    return y


def fired(x: Tensor, ffn: FFN) -> Tensor:
    """How many fire for each token."""
    return (x.double() @ ffn.w_gate.double().T > 0).sum(-1)


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize(("M", "K", "N"), SIZES)
def test_whole_numbers_are_exact(kernels, M, K, N, biases):
    torch.manual_seed(M + N)
    ffn = make_ffn(N, K, biases)
    x = whole(M, K, most=2)
    x[:, 0] = -int(2 * K**0.5)
    check(kernels, x, ffn)


def test_full_and_one_over(kernels):
    """A token with as many pairs as the list holds, and one with one more, which goes densely."""
    torch.manual_seed(0)
    M, K, N = 130, 2048, 1040
    cap = plan_walk(M, N, K, device_limits(0)).cap
    assert cap < N
    ffn = make_ffn(N, K, False)
    ffn.w_gate.zero_()
    ffn.w_gate[torch.randperm(N, device="cuda")[: cap + 1], 1] = 1
    ffn.w_gate[ffn.w_gate[:, 1].nonzero()[0], 2] = -2
    x = whole(M, K)
    x[:, 1], x[:, 2] = 1, 0
    x[::2, 2] = 1
    found = fired(x, ffn)
    assert set(found.tolist()) == {cap, cap + 1}
    check(kernels, x, ffn)
