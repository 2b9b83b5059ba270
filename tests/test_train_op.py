"""The operators of training as autograd and torch.compile see them, plain torch for kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle import twell_train
from twellctl.bundle.twell_ffn import train_ffn
from twellctl.bundle.twell_model import TwellFFN

CALLS: list[str] = []


def forward(x, w_gate, w_up, w_down, b_down, penalty, slots, sources):
    """What `train_ffn` returns; nothing of it is an input."""
    gate = F.linear(x, w_gate).relu()
    hidden = gate * F.linear(x, w_up)
    lists = (x.new_zeros(2, dtype=torch.int32) for _ in twell_train._LISTS)
    return F.linear(hidden, w_down, b_down), (gate != 0).sum(), *lists


def backward(grad_y, x, w_gate, w_up, w_down, b_down, *rest):
    """What `train_ffn_grads` returns."""
    CALLS.append("grads")
    rows, grad_y = x.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1])
    gate, up = F.linear(rows, w_gate), F.linear(rows, w_up)
    fired, grad_h = gate > 0, grad_y @ w_down
    kept = torch.where(fired, gate, 0)
    of_gate, of_up = torch.where(fired, grad_h * up, 0), grad_h * kept
    of_x = (of_gate @ w_gate + of_up @ w_up).view(x.shape)
    return of_x, of_gate.t() @ rows, of_up.t() @ rows, (kept * up).t() @ grad_y


@pytest.fixture(scope="module")
def op():
    """`train_ffn`, defined once more, over these."""
    with pytest.MonkeyPatch.context() as patch:
        for name, plain in (("_train_ffn", forward), ("_train_ffn_grads", backward)):
            patch.setattr(twell_train, name, plain)
            patch.setattr(twell_train, name.replace("_train", "_fake_train", 1), plain)
        library = torch.library.Library("twell", "FRAGMENT")
        twell_train.define_training(library, "of_tests")
    CALLS.clear()
    yield torch.ops.twell.train_ffn_of_tests.default
    library._destroy()


def problem(*rows: int) -> list[Tensor]:
    """x, the weights and the bias of down: K = 8, N = 16."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(*rows, 8), (16, 8), (16, 8), (8, 16), (8,)]
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def test_gradients_go_to_their_inputs(op):
    leaves = problem(2, 5)
    y = op(*leaves, None, 8, "")[0]
    found = torch.autograd.grad((y**2).sum(), leaves)
    wanted = torch.autograd.grad((forward(*leaves, None, 8, "")[0] ** 2).sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_one_row_without_a_dimension_of_rows(op):
    leaves = problem()
    op(*leaves, None, 8, "")[0].backward(torch.ones(8))
    torch.testing.assert_close(leaves[4].grad, torch.ones(8))


def test_what_is_kept_holds_no_graph(op):
    _, fired, *lists = op(*problem(5), None, 8, "")
    assert not any(tensor.requires_grad for tensor in (fired, *lists))


def test_second_derivatives_are_refused(op):
    leaves = problem(5)
    y = op(*leaves, None, 8, "")[0]
    (of_x,) = torch.autograd.grad((y**2).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        of_x.sum().backward()


def test_the_bias_of_down_needs_no_kernels(op):
    leaves = [t.detach() for t in problem(5)]
    bias = leaves[4].requires_grad_()
    CALLS.clear()
    op(*leaves, None, 8, "")[0].sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((8,), 5.0))
    assert not CALLS


def test_autograd_compiles_with_it(op):
    leaves = problem(5)
    compiled = torch.compile(lambda *t: op(*t, None, 8, "")[0], fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves).sum(), leaves[:4])
    wanted = torch.autograd.grad(op(*leaves, None, 8, "")[0].sum(), leaves[:4])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


class PlainFFN(nn.Module):
    """A gated FFN as transformers has it."""

    def __init__(self):
        super().__init__()
        self.act_fn = nn.ReLU()
        self.gate_proj = nn.Linear(16, 32, bias=False)
        self.up_proj = nn.Linear(16, 32, bias=False)
        self.down_proj = nn.Linear(32, 16, bias=False)


class FFN(TwellFFN, PlainFFN):
    twell_tile = 256
    twell_slots = 64


def test_layers_compile_one_by_one_whatever_their_slots():
    torch._dynamo.reset()
    for slots in (64, 32):
        layer, x = FFN(), torch.randn(4, 16, requires_grad=True)
        layer.twell_slots = slots
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        wanted = layer(x)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        (grad,) = torch.autograd.grad(wanted.sum(), x)
        torch.testing.assert_close(x.grad, grad)


def test_a_penalty_of_several_numbers_is_refused():
    with pytest.raises(ValueError, match=r"penalty must be one number, got \[2\]"):
        train_ffn(*problem(5)[:4], penalty=torch.ones(2))
