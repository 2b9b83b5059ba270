"""One layer's fit: least squares, steps and map, against float64 and autograd."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from twellctl.fitting import layer as layers
from twellctl.fitting.ffn import FfnText, GatedFfn
from twellctl.fitting.layer import HowToFit, find_direction, fit_layer
from twellctl.fitting.least_squares import NotSolved, Products, solved
from twellctl.fitting.steps import Steps, _gradients

N, K = 96, 32


def drawn_ffn(seed=0, biases=False):
    torch.manual_seed(seed)
    weights = [torch.randn(N, K) / 6, torch.randn(N, K) / 6, torch.randn(K, N) / 10]
    if biases:
        weights += [torch.randn(N) / 10, torch.randn(N) / 10, torch.randn(K) / 10]
    return GatedFfn(*weights)


def drawn_text(ffn, tokens=3000, seed=1):
    torch.manual_seed(seed)
    z = torch.randn(tokens, K) + torch.linspace(1, 2, K)
    hidden = F.silu(ffn.gates(z)) * ffn.ups(z)
    wanted = F.linear(hidden, ffn.down, ffn.down_bias)
    return FfnText(z, torch.rand(tokens) + 0.5, lambda tokens: wanted[tokens])


def error_of(ffn, text):
    away = text.wanted(slice(None)) - ffn(text.z)
    return float((away.square().sum(1) * text.weights).sum())


def test_least_squares_are_those_of_float64():
    torch.manual_seed(0)
    features, rest = torch.randn(500, 12), torch.randn(500, 5)
    products = Products(12, 5, features.device)
    for part in (slice(0, 200), slice(200, 500)):
        products.add(features[part].T, rest[part].T)
    products.over_processes()
    f, y = features.double(), rest.double()
    gram = f.T @ f
    means = torch.cat([gram.diagonal()[:8].mean().expand(8), gram.diagonal()[8:].mean().expand(4)])
    torch.testing.assert_close(products.gram.double(), gram, rtol=1e-4, atol=1e-3)
    expected = torch.linalg.solve(gram + torch.diag(0.01 * means), f.T @ y)
    found = solved(products, (8, 4), 0.01)
    assert found.is_contiguous()  # GPUs send nothing else to each other
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_the_ridge_of_a_block_is_a_share_of_its_own_squares():
    """Blocks of very different scale, as neurons and what an FFN reads are, are solved as one."""
    torch.manual_seed(0)
    features, rest = torch.randn(500, 12), torch.randn(500, 5)
    found = []
    for scale in (1, 1e3):
        scales = torch.cat([torch.full((8,), 1.0), torch.full((4,), float(scale))])
        products = Products(12, 5, features.device)
        products.add((features * scales).T, rest.T)
        products.over_processes()
        found.append(solved(products, (8, 4), 0.5) * scales[:, None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    small = found[0][:8].norm()
    assert small > 0.1 * found[0].norm()


def test_products_through_a_map_are_those_of_mapped_features():
    torch.manual_seed(0)
    features, rest, last = torch.randn(300, 12), torch.randn(300, 5), torch.randn(2, 4)
    products, mapped = Products(12, 5, features.device), Products(10, 5, features.device)
    products.add(features.T, rest.T)
    mapped.add(torch.cat([features[:, :8], features[:, 8:] @ last.T], 1).T, rest.T)
    products.over_processes(), mapped.over_processes()
    through = products.through(last)
    torch.testing.assert_close(through.gram, mapped.gram, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(through.right, mapped.right, rtol=1e-4, atol=1e-3)


def test_equations_without_a_solution_name_the_ridge_that_has_one():
    products = Products(3, 1, torch.device("cpu"))
    products.gram += torch.tensor([[1.0, 1, 0], [1, 1 - 1e-5, 0], [0, 0, 1]])
    with pytest.raises(NotSolved, match="--ridge 1e-05 would do"):
        solved(products, (3,), 1e-7)
    products.gram *= float("nan")
    with pytest.raises(NotSolved, match="not finite"):
        solved(products, (3,), 1e-7)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rank", [0, 4, 32])
def test_a_layer_is_nearer_than_any_other_of_its_gates(rank, biases):
    """Of those with the same gates, ups and map inputs the fitted down is the best."""
    ffn = drawn_ffn(biases=biases)
    text = drawn_text(ffn)
    made, fired = fit_layer(ffn, text, 0.0, HowToFit(rank, 1e-9, torch.float32, None))
    assert made.gate.shape == (N + rank, K)
    assert 0.2 < fired < 0.8
    assert torch.equal(made.gate[:N], ffn.gate)
    hidden = (made.gates(text.z).relu() * made.ups(text.z)).double()
    root = text.weights.double().sqrt()[:, None]
    wanted = text.wanted(slice(None)).double()
    if biases:
        wanted = wanted - ffn.down_bias.double()
    gram, right = (hidden * root).T @ (hidden * root), (hidden * root).T @ (wanted * root)
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())  # some never fire
    best = torch.linalg.solve(gram, right)
    least = float(((wanted - hidden @ best) * root).square().sum())
    assert error_of(made, text) == pytest.approx(least, rel=1e-3)
    assert error_of(made, text) < error_of(ffn, text)


def test_the_map_carries_what_a_linear_layer_gives():
    ffn = drawn_ffn()
    z = drawn_text(ffn).z + 8
    linear = torch.randn(K, K) / 5
    text = FfnText(z, torch.ones(len(z)), lambda t: z[t] @ linear.T)
    made, _ = fit_layer(ffn, text, 0.0, HowToFit(K, 1e-6, torch.float32, None))
    away = (text.wanted(slice(None)) - made(z)).norm() / (z @ linear.T).norm()
    assert away < 0.02


@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_a_threshold_moves_each_gate_by_what_its_neuron_is_worth(threshold):
    ffn = drawn_ffn()
    text = drawn_text(ffn)
    made, fired = fit_layer(ffn, text, threshold, HowToFit(8, 1e-6, torch.float32, None))
    direction, _ = find_direction(text)
    moved = ffn.gate - made.gate[:N]
    ups = (text.z @ ffn.up.T).square() * text.weights[:, None]
    expected = threshold / (ups.mean(0).sqrt() * ffn.down.norm(dim=0))
    expected = expected.minimum((text.z @ ffn.gate.T).amax(0).clamp(min=0))  # it fires no more
    some = slice(None, None, max(1, len(text.z) // 8192))
    assert some.step == 1
    torch.testing.assert_close(moved, expected[:, None] * direction, rtol=1e-3, atol=1e-6)
    assert fired < fit_layer(ffn, text, 0.0, HowToFit(8, 1e-6, torch.float32, None))[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("nothing", ["gate", "up", "down"])
def test_a_neuron_that_gives_nothing_moves_nothing(nothing, dtype):
    """Nor does it fire: the layer is as near as without it, also after steps."""
    ffn = drawn_ffn()
    ffn = replace(ffn, **{nothing: getattr(ffn, nothing).clone()})
    (ffn.down[:, :2] if nothing == "down" else getattr(ffn, nothing)[:2])[:] = 0
    without = GatedFfn(ffn.gate[2:], ffn.up[2:], ffn.down[:, 2:])
    text, held_out = drawn_text(ffn), drawn_text(ffn, seed=2)
    how = HowToFit(8, 1e-3, dtype, Steps(30, 512, 0.01, seed=0))
    (made, fired), (other, others) = (fit_layer(one, text, 0.2, how) for one in (ffn, without))
    assert error_of(made, held_out) == pytest.approx(error_of(other, held_out), rel=0.05)
    assert fired * N == pytest.approx(others * (N - 2), rel=0.03)
    assert made.gate.abs().max() < 2 * ffn.gate.abs().max()
    assert (made.gates(text.z)[:, :2] > 0).float().mean() < 0.01


@pytest.mark.parametrize("nothing", ["up", "down", "gate", "z"])
@pytest.mark.parametrize("steps", [None, Steps(3, 64, 0.01, seed=0)])
def test_a_layer_that_gives_nothing_stays_one(nothing, steps):
    ffn = drawn_ffn()
    if nothing != "z":
        ffn = replace(ffn, **{nothing: torch.zeros_like(getattr(ffn, nothing))})
    text = drawn_text(ffn)
    if nothing == "z":
        text = FfnText(torch.zeros(3000, K), text.weights, lambda t: torch.zeros(3000, K)[t])
    made, _ = fit_layer(ffn, text, 0.1, HowToFit(8, 1e-3, torch.bfloat16, steps))
    assert made(text.z).abs().max() == 0


@pytest.mark.parametrize("biases", [False, True])
def test_gradients_are_those_of_autograd(biases):
    ffn = drawn_ffn(biases=biases)
    text, direction = drawn_text(ffn, 64), torch.randn(K) / 5
    weights = {name: w for name, w in vars(ffn).items() if w is not None}
    weights["map"] = torch.randn(K, K) / 5
    picked, scale, price = torch.arange(0, 64, 2), torch.tensor(7.0), torch.tensor(0.01)
    found, fired = _gradients(weights, direction, text, picked, scale, price)
    leaves = {name: w.double().requires_grad_() for name, w in weights.items()}
    z, zeros = text.z[picked].double(), torch.zeros(1, dtype=torch.float64)
    gate = F.linear(z, leaves["gate"], leaves.get("gate_bias", zeros))
    up = F.linear(z, leaves["up"], leaves.get("up_bias", zeros))
    soft = torch.sigmoid(gate / 0.05)
    straight = gate * soft + (gate.relu() - gate * soft).detach()  # ReLU, with that gradient
    mapped = z * (z @ direction.double()).relu()[:, None]
    out = (straight * up) @ leaves["down"].T + mapped @ leaves["map"].T
    out = out + leaves.get("down_bias", zeros)
    away = (out - text.wanted(picked).double()).square().sum(1)
    loss = (away * text.weights[picked].double()).sum() / 7 + 0.01 * soft.sum()
    loss.backward()
    assert fired == pytest.approx(float((gate > 0).double().mean()))
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name].double(), leaf.grad, rtol=1e-3, atol=1e-5)


def test_sums_in_front_of_steps_are_of_every_third_part(monkeypatch):
    monkeypatch.setattr("twellctl.fitting.ffn.AT_ONCE", 100)
    ffn, direction = drawn_ffn(biases=True), torch.randn(K) / 5
    text, kept = drawn_text(ffn, 1000), torch.arange(1000).view(10, 100)[::3].flatten()
    some = FfnText(text.z[kept], text.weights[kept], lambda t: text.wanted(kept[t]))
    found, expected = (
        layers._products(ffn, torch.zeros(K, K), direction, of, stride)
        for of, stride in ((text, 3), (some, 1))
    )
    assert torch.equal(found[0].gram, expected[0].gram)
    assert torch.equal(found[0].right, expected[0].right)
    assert found[1] == expected[1]
    for several, stride in ((0, 1), (1, 1), (3, 3), (9, 4)):
        assert layers.stride_before_steps(several * 16 * (N + K), N, K) == stride


@pytest.mark.parametrize("biases", [False, True])
def test_steps_bring_a_layer_nearer_and_hold_its_density(biases):
    ffn = drawn_ffn(biases=biases)
    text = drawn_text(ffn, 6000)
    with torch.no_grad():
        how = HowToFit(16, 1e-6, torch.float32, None)
        without, fired = fit_layer(ffn, text, 0.3, how)
        steps = Steps(400, 512, 0.03, 0)
        stepped, fires = fit_layer(ffn, text, 0.3, HowToFit(16, 1e-6, torch.float32, steps))
    assert error_of(stepped, text) < 0.8 * error_of(without, text)
    assert fires == pytest.approx(fired, rel=0.15)
