"""What is settled before an engine serves, and what is said of it; without vLLM and a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from popular_shapes import SHAPES

from twellctl.bundle.twell_cache import say_once
from twellctl.bundle.twell_dense import gated_ffn
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_route import Choice, Kind, density_bucket, token_bucket
from twellctl.bundle.twell_ways import Problem, ways_of
from twellctl.vllm import routes
from twellctl.vllm.routes import Layer, engines_way, settle, token_counts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
H200 = Limits(132, 232448, (9, 0))
LAYERS = [
    Layer(64, 96, biases=(False, False), tile=32, slots=8, density=0.05),
    Layer(64, 96, biases=(False, False), tile=32, slots=16, density=0.2),
]


def ENGINES(x):
    return engines_way(lambda: x)


def settled(device=GPU, layers=LAYERS, counts=(1, 8), **how):
    return settle(layers, counts, device, torch.bfloat16, "sources", **how)


@pytest.fixture
def chosen(monkeypatch):
    """`chosen({(layer, tokens): (eager, graph)})`: what measuring finds, in place of measuring.

    `last`: the dense way that was measured.
    """

    def choose(found: dict, last: str = "dense") -> None:
        choices = {
            Kind(
                device="a GPU",
                K=layer.K,
                N=layer.N,
                biases=False,
                tokens=token_bucket(tokens),
                density=density_bucket(layer.density),
                slots=layer.slots,
                kernels="",
                ways=("union", last),
            ): Choice(*ways)
            for (layer, tokens), ways in found.items()
        }
        monkeypatch.setattr(routes, "_run", lambda *args: None)
        monkeypatch.setattr(routes, "known_choices", lambda: choices)

    monkeypatch.delenv("TWELL_ROUTE", raising=False)
    return choose


def test_all_numbers_of_tokens_that_may_come():
    assert token_counts([1, 6], 20) == [1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 20]
    assert token_counts([], 1) == [1]
    assert token_counts([], 8) == [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_number_of_tokens_is_of_a_kind_that_is_settled(shape):
    def kinds(counts):
        problems = (Problem(M, shape.N, shape.K, H200) for M in counts)
        return {
            (token_bucket(problem.M), tuple(way.name for way in ways_of("auto", problem)))
            for problem in problems
        }

    assert kinds(range(1, 4200)) == kinds(token_counts([], 4199))


BY_VLLM = "densely, by vLLM's own FP8 linear layers:"
OF_BOTH = pytest.mark.parametrize("dense", [None, ENGINES], ids=["bf16", "FP8"])


@OF_BOTH
def test_without_a_gpu_it_is_dense(dense):
    how = f"{BY_VLLM if dense else 'densely, in plain PyTorch:'} the kernels need an NVIDIA GPU"
    assert settled(CPU, dense=dense) == (True, how)


def test_ways_are_said_by_numbers_of_tokens(chosen):
    one, other = LAYERS
    chosen(
        {
            (one, 1): ("union", "pairs"),
            (other, 1): ("dense", "pairs"),
            (one, 2): ("union", "pairs"),
            (one, 8): ("union", "union"),
            (other, 8): ("dense", "dense"),
            (one, 100): ("dense", "dense"),
            (replace(one, K=128), 1): ("other", "other"),  # of another model
        }
    )
    said = "over the kernels as measured: "
    assert settled() == (
        False,
        f"{said}1-2 tokens pairs; 3-8 tokens dense, union; 9-128 tokens dense",
    )
    eager = "1-1 tokens dense, union; 2-2 tokens union; 3-8 tokens dense, union; 9-128 tokens dense"
    assert settled(graphs=False) == (False, said + eager)


@OF_BOTH
def test_dense_where_nothing_is_faster(chosen, dense):
    ways, last = (("vllm", "vllm"), "vllm") if dense else (("union", "dense"), "dense")
    chosen({(layer, tokens): ways for layer in LAYERS for tokens in (1, 8)}, last=last)
    densely, how = settled(dense=dense)
    assert densely
    assert how.startswith("densely, which was measured to be the fastest")


@pytest.mark.parametrize(("route", "densely"), [("dense", True), ("twell", False)])
def test_a_route_that_was_asked_for_is_said(chosen, monkeypatch, route, densely):
    chosen({})
    monkeypatch.setenv("TWELL_ROUTE", route)
    assert settled() == (densely, f"on the route {route}, as TWELL_ROUTE says")


@OF_BOTH
def test_the_reason_for_going_without_the_kernels_is_said(monkeypatch, dense):
    monkeypatch.setattr(routes, "_run", lambda *args: say_once("no CuPy"))
    how = BY_VLLM if dense else "densely: TwELL kernels are not used, plain PyTorch is:"
    assert settled(dense=dense) == (True, f"{how} no CuPy")


def test_it_measures_what_fires_as_profiled(monkeypatch):
    ran = []
    monkeypatch.setattr(routes, "sparse_ffn", lambda *args, **how: ran.append((args, how)))
    layer = Layer(64, 512, biases=(True, False), tile=64, slots=8, density=0.03)
    routes._run(layer, [1, 2, 300], CPU, torch.float32, "sources")
    for (_, ffn), how in ran:
        sizes = [(512, 64), (512, 64), (64, 512)]
        assert [tuple(weight.values.shape) for weight in ffn.weights] == sizes
        assert (ffn.gate.bias.shape, ffn.up.bias.shape, ffn.down.bias) == ((512,), (512,), None)
        assert how == {"tile": 64, "slots": 8, "density": 0.03, "sources": "sources"}
    assert [len(args[0]) for args, _ in ran] == [1, 2, 300]
    x, ffn = ran[-1][0]
    fired = (F.linear(x, ffn.gate.values, ffn.gate.bias) > 0).float().mean()
    assert fired == pytest.approx(0.03, rel=0.2)


def test_layers_of_similar_density_are_measured_once(monkeypatch):
    ran = []
    monkeypatch.setattr(routes, "_run", lambda layer, *args: ran.append(layer))
    monkeypatch.setenv("TWELL_ROUTE", "twell")
    one, other = LAYERS
    near = replace(one, density=1.001 * one.density)
    settled(layers=[one, near, other, one])
    assert [layer.slots for layer in ran] == [one.slots, other.slots]


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_layers_that_never_or_always_fire_are_measured_too(monkeypatch, density):
    ran = []
    monkeypatch.setattr(routes, "sparse_ffn", lambda *args, **how: ran.append((args, how)))
    routes._run(Layer(64, 96, (False, False), 32, 8, density), [4], CPU, torch.float32, "")
    assert [how["density"] for _, how in ran] == [density]
    x, ffn = ran[0][0]
    assert all(tensor.isfinite().all() for tensor in (x, *(w.values for w in ffn.weights)))


# ---- weights in FP8


def test_ways_over_fp8_are_said_and_those_over_bf16_are_not(chosen):
    _, other = LAYERS
    found = {(layer, tokens): ("union", "union") for layer in LAYERS for tokens in (1, 8)}
    chosen(found)
    densely, _ = settled(dense=ENGINES)
    assert densely
    chosen(found | {(other, 8): ("vllm", "vllm")}, last="vllm")
    said = "over the kernels as measured: 1-1 tokens union; 2-8 tokens union, vllm"
    assert settled(dense=ENGINES) == (False, said)
    more = f"{said}; 9-64 tokens vllm"  # where there is no other way, and nothing is measured
    assert settled(dense=ENGINES, counts=(1, 8, 64)) == (False, more)
    assert settled()[0]


@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_it_measures_fp8_weights_that_fire_as_profiled(monkeypatch, biases):
    ran = []
    monkeypatch.setattr(
        routes, "sparse_ffn_of_engine", lambda *args, **how: ran.append((args, how))
    )
    layer = Layer(128, 512, biases=biases, tile=64, slots=8, density=0.03)
    routes._run(layer, [1, 300], CPU, torch.bfloat16, "sources", ENGINES)
    for (dense, x, ffn), how in ran:
        assert dense.run() is x
        assert [tuple(w.values.shape) for w in ffn.weights] == [(512, 128)] * 2 + [(128, 512)]
        assert [w.bias is not None for w in ffn.weights] == [biases[0], *biases]
        assert ffn.turned.is_contiguous()
        assert torch.equal(ffn.turned.t().float(), ffn.down.values.float())
        assert how == {"tile": 64, "slots": 8, "density": 0.03, "sources": "sources"}
        assert gated_ffn(x, ffn).isfinite().all()
    assert [len(args[1]) for args, _ in ran] == [1, 300]
    gate = ffn.gate.values.float() * ffn.gate.scales
    fired = (ran[-1][0][1].float() @ gate.t() > 0).float().mean()
    assert fired == pytest.approx(0.03, rel=0.25)
