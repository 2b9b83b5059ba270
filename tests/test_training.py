"""Training without a GPU: what is launched, plans, and the plain path's gradients."""

import functools
import itertools

import pytest
import torch
from launched import Launches, Map, bf16, zero_ffn
from torch import Tensor

from twellctl.bundle import twell_heavy, twell_reasons, twell_sequence, twell_training
from twellctl.bundle.twell_ffn import takes_training, train_ffn
from twellctl.bundle.twell_grad_plan import make_grad_plan, training_cap
from twellctl.bundle.twell_heavy_grads import heavy_grads, listed_rows, sent_to_host
from twellctl.bundle.twell_plan import Limits, make_plan
from twellctl.bundle.twell_training import DOWN, GATE_UP, Wanted, backward, forward
from twellctl.bundle.twell_weights import FFN, plain_weight

H200 = Limits(132, 232448, (9, 0))
SHAPES = [
    (1, 64, 8), (300, 64, 520), (9000, 128, 6144), (300, 64, 16384), (20000, 64, 264),
    (900, 64, 6152),
]  # fmt: skip


@pytest.fixture(autouse=True)
def heavy(monkeypatch) -> list[int]:
    """The rows that are heavy, since no kernel runs here that would say so."""
    rows: list[int] = []
    for module in (twell_sequence, twell_heavy):
        monkeypatch.setattr(module, "tensor_map", Map)
    monkeypatch.setattr(twell_training, "listed_rows", lambda *listed: torch.tensor(rows).long())
    return rows


def passes(M: int, K: int, N: int, wanted: Wanted, dtype=torch.bfloat16):
    """Launches of both passes, and the gradients."""
    kernels, x, penalty = Launches(), bf16(M, K), torch.zeros(1)
    ffn = zero_ffn(K, N, biases=False)
    y, _, kept = forward(kernels, H200, x, ffn, 16)
    assert y.shape == x.shape
    run = functools.partial(backward, kernels, H200, x, ffn, torch.zeros_like(x), penalty, kept)
    return kernels.made, run(16, wanted, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_have_room_for_all_pairs(shape):
    M, K, N = shape
    plan = make_plan(M, N, K, 16, training_cap(N), H200, training=True)
    grad_plan = make_grad_plan(plan, H200)
    assert plan.most == N  # rows are heavy for want of room alone
    assert grad_plan.token_panels * grad_plan.panel_tiles >= plan.num_tiles
    assert max(grad_plan.token_panel_rows, plan.panel_rows) <= 8192  # 13 bits of a code
    lists = grad_plan.neuron_fours * grad_plan.token_panels
    assert grad_plan.neuron_rounds >= plan.num_pairs // 16 + 8 * lists
    lists = grad_plan.token_fours * grad_plan.x_panels
    assert grad_plan.token_rounds >= plan.num_pairs // 16 + 8 * lists
    assert grad_plan.x_panels * grad_plan.x_panel_rows >= N
    assert grad_plan.x_panel_rows % 8 == 0
    assert grad_plan.x_chunk % 4 == 0 or grad_plan.x_chunk == M
    assert 4 * grad_plan.token_fours >= M


def test_the_order():
    names = [launch[0] for launch in passes(300, 64, 520, Wanted())[0]]
    up = names.index("up", names.index("up") + 1)
    assert names[up:] == [
        *("up", "grad_pairs", "list_neurons", "grad_gate_up", "grad_down"),
        *("list_tokens", "grad_x"),
    ]


@pytest.mark.parametrize("slots", [16, 64])
def test_both_passes_stay_within_their_memory(slots, monkeypatch):
    """What is alive at most in addition to x, grad_y and the weights, results included."""
    M, K, N = 16384, 2048, 5632
    x = torch.empty(M, K, dtype=torch.bfloat16)
    grad_y = torch.empty_like(x)
    ffn, penalty = zero_ffn(K, N, biases=False), torch.zeros(1)
    kernels = Launches()
    monkeypatch.setattr(kernels, "launch", lambda *args, **how: None)  # it holds no arguments
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        y, _, kept = forward(kernels, H200, x, ffn, slots)
        grads = backward(kernels, H200, x, ffn, grad_y, penalty, kept, slots, Wanted())
    assert y.shape == grads.x.shape
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak = max(itertools.accumulate(sizes))
    assert 200 << 20 < peak <= 330 << 20


def test_what_is_not_wanted_is_not_computed():
    made, found = passes(300, 64, 520, Wanted(w_gate=False, w_up=False, w_down=False))
    assert not {"list_neurons", "grad_gate_up", "grad_down"} & {launch[0] for launch in made}
    assert (found.w_gate, found.w_down) == (None, None)
    assert found.x.shape == (300, 64)
    made, found = passes(300, 64, 520, Wanted(x=False, w_gate=False, w_up=False))
    assert not {"list_tokens", "grad_gate_up", "grad_x"} & {launch[0] for launch in made}
    assert found.x is None
    assert found.w_down.shape == (520, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_the_weights(dtype):
    _, found = passes(300, 64, 520, Wanted(), dtype)
    assert {grad.dtype for grad in (found.w_gate, found.w_up, found.w_down)} == {dtype}
    assert found.x.dtype == torch.bfloat16


# ---- heavy rows


WEIGHTS = (*GATE_UP, *DOWN)


def sums_of(args: dict[str, dict]) -> tuple[Tensor | None, ...]:
    """Of gate, up and down, by what each kernel was launched with."""
    gate_up = args["grad_gate_up"]
    return gate_up["sums_gate"], gate_up["sums_up"], args["grad_down"]["sums"]


def whole_numbers(*shape: int, most: int = 1) -> Tensor:
    return torch.randint(-most, most + 1, shape).bfloat16()


def heavy_problem(M: int, K: int, N: int) -> tuple[Tensor, Tensor, FFN]:
    """x and grad_y, and weights of an FFN; a third of the neurons fires."""
    torch.manual_seed(M + N)
    gate, up = (plain_weight(whole_numbers(N, K)) for _ in range(2))
    return (
        whole_numbers(M, K),
        whole_numbers(M, K),
        FFN(gate, up, plain_weight(whole_numbers(K, N))),
    )


def by_autograd(x: Tensor, grad_y: Tensor, ffn: FFN, penalty: float) -> list[Tensor]:
    """Gradients of x and the weights, all `[N, K]`, in float64."""
    weights = ffn.gate.values, ffn.up.values, ffn.by_neurons
    leaves = [t.double().requires_grad_() for t in (x, *weights)]
    x, w_gate, w_up, w_down = leaves
    hidden = (x @ w_gate.t()).relu() * (x @ w_up.t())
    loss = (hidden @ w_down * grad_y.double()).sum() + penalty * hidden.abs().sum()
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("num", [1, 15, 16, 17, 70])
def test_gradients_of_any_number_of_heavy_rows(num):
    x, grad_y, ffn = heavy_problem(70, 64, 96)
    rows = torch.randperm(70)[:num].sort().values
    found = heavy_grads(x, grad_y, ffn, rows, torch.full((1,), 0.5), 16, WEIGHTS)
    wanted = by_autograd(x[rows], grad_y[rows], ffn, 0.5)
    grads = {"x": found.x, **found.sums}
    for name, want in zip(("x", *WEIGHTS), wanted, strict=True):
        error = (grads[name].double() - want).norm() / want.norm()
        assert error < 0.01, name
    sums = {grad.dtype for grad in found.sums.values()}
    assert (sums, found.x.dtype) == ({torch.float32}, torch.bfloat16)


@pytest.mark.parametrize("names", [(), DOWN, GATE_UP], ids=str)
def test_only_sums_that_are_wanted_are_made(names):
    given = heavy_problem(70, 64, 96)
    found, whole = (heavy_grads(*given, torch.arange(9), None, 16, of) for of in (names, WEIGHTS))
    assert tuple(found.sums) == names
    assert all(torch.equal(found.sums[name], whole.sums[name]) for name in names)
    assert torch.equal(found.x, whole.x)


def test_what_did_not_fire_has_no_gradient_even_if_up_is_not_finite():
    x, grad_y, ffn = heavy_problem(3, 64, 96)
    gate, up = ffn.gate.values, ffn.up.values
    gate[5], up[5] = -100 * x[1], 3e38 * x[1]
    assert (x[1] @ up[5]).isinf()
    found = heavy_grads(x, grad_y, ffn, torch.tensor([1]), None, 16, WEIGHTS)
    assert all(grad.isfinite().all() for grad in (found.x, *found.sums.values()))
    assert not found.sums["w_gate"][5].any()


def test_heavy_rows_are_listed_in_order_and_as_many_as_there_are():
    listed = torch.tensor([7, 3, 5, -1, 99], dtype=torch.int32)
    for num, rows in ((0, []), (1, [7]), (3, [3, 5, 7])):
        count = torch.tensor([num], dtype=torch.int32)
        assert listed_rows(listed, count, sent_to_host(count)).tolist() == rows


def test_a_number_that_is_not_on_the_host_yet_is_read_from_the_device():
    """Also if what was kept for the backward pass was copied before it came."""
    count, on_host = torch.tensor([2]), torch.full((1,), -1, dtype=torch.int32)
    assert listed_rows(torch.tensor([4, 1, 0]), count, on_host).tolist() == [1, 4]


def test_gradients_of_heavy_rows_are_part_of_the_pass(heavy):
    """The kernels' sums begin with theirs, and their x gets them in place of what lists leave."""
    heavy += [2, 40]
    kernels, penalty = Launches(), torch.full((1,), 0.5)
    x, grad_y, ffn = heavy_problem(300, 64, 520)
    _, _, kept = forward(kernels, H200, x, ffn, 16)
    found = backward(kernels, H200, x, ffn, grad_y, penalty, kept, 16, Wanted(), torch.bfloat16)
    own = heavy_grads(x, grad_y, ffn, torch.tensor(heavy), penalty, 16, WEIGHTS)
    assert own.x.any()
    assert torch.equal(found.x[heavy], own.x)
    args = {name: args for name, _, _, args, _ in kernels.made}
    for given, name in zip(sums_of(args), WEIGHTS, strict=True):
        assert own.sums[name].any()
        assert torch.equal(given, own.sums[name])


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(w_gate=False, w_up=False, w_down=False), ()),  # as of a LoRA's FFN
        (Wanted(w_gate=False, w_up=False), DOWN),
        (Wanted(w_up=False, w_down=False), GATE_UP),  # one kernel makes both
    ],
)
def test_a_pass_makes_sums_of_heavy_rows_that_are_wanted(heavy, monkeypatch, wanted, names):
    heavy += [2, 40]
    asked = []

    def noted(*given):
        asked.append(tuple(given[-1]))
        return heavy_grads(*given)

    monkeypatch.setattr(twell_training, "heavy_grads", noted)
    passes(300, 64, 520, wanted)
    assert asked == [names]


@pytest.mark.parametrize(
    ("M", "dtype", "are_there"),
    [(300, torch.bfloat16, False), (300, torch.float32, True), (20000, torch.bfloat16, True)],
)
def test_sums_lie_where_panels_leave_them_or_they_are_the_result(M, dtype, are_there):
    plan = make_plan(M, 264, 64, 16, training_cap(264), H200, training=True)
    assert (make_grad_plan(plan, H200).token_panels > 1) == (M > 300)
    args = {name: args for name, _, _, args, _ in passes(M, 64, 264, Wanted(), dtype)[0]}
    assert [given is not None for given in sums_of(args)] == [are_there] * 3


# ---- the plain path


def plain_problem() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(10, 64), (96, 64), (96, 64), (64, 96), (96,), (96,), (64,)]
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [tensor.requires_grad_() for tensor in made]


def gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


def test_the_penalty_is_as_good_as_part_of_the_loss():
    leaves = plain_problem()
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = leaves
    y, fired = train_ffn(*leaves, penalty=torch.tensor(0.3))
    found = gradients((y**2).sum(), leaves)
    gate = x @ w_gate.t() + b_gate
    hidden = gate.relu() * (x @ w_up.t() + b_up)
    loss = ((hidden @ w_down.t() + b_down) ** 2).sum() + 0.3 * hidden.abs().sum()
    for one, wanted in zip(found, gradients(loss, leaves), strict=True):
        torch.testing.assert_close(one, wanted)
    assert fired.item() == (gate > 0).sum().item()


def test_when_gradients_go_over_the_kernels():
    assert takes_training("twell", 1, None)
    assert not takes_training("dense", 1 << 20, 0.001)
    work = 16384 * 5632 * 2048
    assert takes_training("auto", work, 0.005)
    assert not takes_training("auto", work, None)
    assert not takes_training("auto", work, 0.1)
    assert not takes_training("auto", work // 2, 0.005)


def test_biases_of_gate_and_up_are_trained_densely(monkeypatch):
    monkeypatch.setattr(twell_reasons, "takes_hopper_kernels", lambda index: True)
    shapes = ((96, 64), (96, 64), (64, 96), (96,), None, None)
    said = twell_reasons._why_training_does_not_take(
        "", 0, 64, 96, 256, "torch.bfloat16", shapes, True
    )
    assert said == "those of training take no biases of gate and up"


def test_slots_that_the_format_does_not_have():
    with pytest.raises(ValueError, match="1 <= slots <= tile, got 300 of 256"):
        train_ffn(*plain_problem(), slots=300)
