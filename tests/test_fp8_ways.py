"""The operator over FP8 weights: which way it takes, and which layout of W_down that gets."""

import copy
from dataclasses import replace

import pytest
import torch
from launched import ways_by_tokens
from test_fp8 import spread, weight_of
from test_ways import A100, H200, L4, as_on_an_h200
from torch import Tensor, nn

from twellctl.bundle import twell_e4m3, twell_ffn, twell_model, twell_reasons
from twellctl.bundle.twell_cache import reasons_said
from twellctl.bundle.twell_dense import gated_ffn
from twellctl.bundle.twell_e4m3 import DTYPE
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_rounded_linear import RoundedLinear
from twellctl.bundle.twell_ways import WAYS, Problem, ways_of
from twellctl.bundle.twell_weights import FFN

B200 = Limits(148, 232448, (10, 0))
K, N = 128, 256


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        (
            H200,
            [
                "1 to 3 tokens: union, dense",
                "4 to 64 tokens: pairs, union, dense",
                "65 and more tokens: dense",
            ],
        ),
        (B200, ["1 to 64 tokens: union, dense", "65 and more tokens: dense"]),
        (L4, ["1 to 32 tokens: union, dense", "33 and more tokens: dense"]),
    ],
)
def test_who_takes_fp8_weights(limits, lines):
    assert list(ways_by_tokens(limits, N=5632, K=2048, kind="e4m3")) == lines
    given = Problem(4096, 5632, 2048, limits, kind="e4m3")
    assert [way.name for way in ways_of("twell", given)] == ["dense"]


class Operator:
    """Calls it on the CPU; `ran`: the ways, with whether W_down came by rows of neurons."""

    def __init__(self):
        self.ran = []
        self.weights = [weight_of(*size, seed=i) for i, size in enumerate([(N, K), (N, K), (K, N)])]

    def __call__(self, M: int, route: str = "auto", *, turned: bool = True, bias=None) -> Tensor:
        gate, up, down = self.weights
        x = spread(M, gate.values.shape[1], seed=9, decades=0.2).bfloat16()
        laid = down.values.t().contiguous() if turned else None
        ffn = FFN(replace(gate, bias=bias), up, down, laid)
        y = twell_ffn._run(x, ffn, 256, 64, -1.0, "a", route)
        assert torch.equal(y, gated_ffn(x, ffn))
        return y


@pytest.fixture
def operator(monkeypatch):
    call = Operator()

    def way(found):
        def run(kernels, limits, x, ffn, slots, overlap=False):
            call.ran.append((found.name, found.by_rows and ffn.by_neurons.is_contiguous()))
            return WAYS[-1].run(kernels, limits, x, ffn, slots)

        return replace(found, run=run)

    as_on_an_h200(monkeypatch, way)
    monkeypatch.setattr(twell_reasons, "device_limits", lambda index: H200)
    monkeypatch.setattr(twell_ffn, "why_no_kernels", lambda *asked: None)
    return call


@pytest.mark.parametrize("turned", [True, False])
def test_kernels_get_rows_of_neurons_and_dense_products_what_is_stored(operator, turned):
    for M, route in ((16, "1+ pairs"), (2, "twell"), (100, "twell"), (17, "auto")):
        operator(M, route, turned=turned)
    assert operator.ran == [("pairs", True), ("union", True), ("dense", False), ("dense", False)]


def test_the_route_dense_and_no_rows_ask_for_no_kernels(operator, monkeypatch):
    monkeypatch.setattr(twell_ffn, "why_no_kernels", lambda *asked: "no kernels")
    with reasons_said() as said:
        assert operator(100, "dense").shape == (100, K)
        assert operator(0).shape == (0, K)
    assert (operator.ran, said) == ([], [])


def test_many_tokens_do_not_reach_the_operator(monkeypatch):
    """So torch.compile sees into their dense products."""
    called = []
    monkeypatch.setattr(twell_ffn, "_gated_ffn_op", lambda *given: called.append(len(given[0])))
    monkeypatch.setattr(twell_ffn, "gated_ffn", lambda x, ffn: x)
    gate, up, down = (weight_of(*size, seed=1) for size in [(N, K), (N, K), (K, N)])

    class OnCuda(Tensor):
        is_cuda = True

    for M in (64, 65):
        x = torch.zeros(M, K).as_subclass(OnCuda)
        twell_ffn.sparse_ffn(x, FFN(gate, up, down), sources="a")
    assert called == [64]


def test_what_the_kernels_do_not_take_is_said(operator, monkeypatch):
    with reasons_said() as said:
        operator(100, bias=torch.zeros(N))
        monkeypatch.setattr(twell_ffn, "why_no_kernels", twell_reasons.why_no_kernels)
        monkeypatch.setattr(twell_reasons, "device_limits", lambda index: A100)
        operator(100)
        operator.weights = [weight_of(*s, seed=1) for s in [(N, 64), (N, 64), (64, N)]]
        operator(100)
    assert operator.ran == []
    assert [text.split(": ", 1)[1] for text in said] == [
        "the kernels take biases in bf16",
        "kernels over e4m3 weights need compute capability 8.9 or newer",
        "over e4m3 weights the kernels take multiples of 128, not 64 and 256",
    ]


def test_no_kernel_reads_beyond_what_does_not_fit_together(operator):
    weights = operator.weights
    with reasons_said() as said:
        for wrong in (weights[0], replace(weights[2], scales=weights[2].scales[:64])):
            operator.weights = [*weights[:2], wrong]
            with pytest.raises(RuntimeError):  # torch's own, of the dense form
                operator(100)
    assert len(said) == 1
    assert "a scale for each row" in said[0]
    assert operator.ran == []


@pytest.mark.parametrize("wrong", ["scales", "weights"])
def test_no_kernel_reads_other_dtypes(operator, wrong):
    gate, *rest = operator.weights
    other = {
        "scales": {"scales": gate.scales.bfloat16()},
        "weights": {"values": gate.values.float()},
    }
    operator.weights = [replace(gate, **other[wrong]), *rest]
    with reasons_said() as said:
        operator(100)
    assert len(said) == 1
    assert said[0].endswith("the kernels take e4m3 weights with scales in float32")
    assert operator.ran == []


def test_an_engine_has_a_dense_way_of_its_own(operator, monkeypatch):
    """It stands in for PyTorch's, also where no kernels run."""
    ran = []

    def run(kernels, limits, x, ffn, slots):
        ran.append(len(x))
        return gated_ffn(x, ffn)

    own = replace(WAYS[-1], run=run)
    ffn = FFN(*operator.weights, operator.weights[-1].values.t().contiguous())
    numbers = {"tile": 256, "slots": 64, "sources": "a", "density": 0.02}
    numbers |= {"plan": "1 union, 2-3 dense, 4-64 pairs, 65+ dense"}
    for M in (1, 2, 16):
        x = spread(M, K, seed=9, decades=0.2).bfloat16()
        y = twell_ffn.sparse_ffn_of_engine(own, x, ffn, **numbers)
        assert torch.equal(y, gated_ffn(x, ffn))
    assert operator.ran == [("union", True), ("pairs", True)]
    assert ran == [2]
    monkeypatch.setattr(twell_ffn, "why_no_kernels", lambda *asked: "no CuPy")
    with reasons_said() as said:
        twell_ffn.sparse_ffn_of_engine(own, x, ffn, **numbers)
    assert len(said) == 1
    assert ran == [2, 16]


# ---- how weights lie


def bare_ffn() -> nn.Module:
    """An FFN of FP8 layers."""
    ffn = nn.Module()
    sizes = {"gate_proj": (32, 6), "up_proj": (32, 6), "down_proj": (6, 32)}
    for i, (name, size) in enumerate(sizes.items()):
        linear = RoundedLinear("e4m3", *size, bias=False)
        weight = weight_of(*size[::-1], seed=i)
        linear.weight.data, linear.weight_scale.data = weight.values, weight.scales
        ffn.add_module(name, linear)
    return ffn


def as_if_on_a_gpu(
    monkeypatch, route: str = "auto", reads=lambda weight: True, ffn: nn.Module | None = None
) -> nn.Module:
    """`ffn`, else `bare_ffn`, over TwELL, its weights laid; `reads` None: by what the CPU is."""
    ffn = bare_ffn() if ffn is None else ffn
    ffn.twell_sources, ffn.twell_route = "a", route
    if reads is not None:
        monkeypatch.setattr(twell_model, "_kernels_read_rounded", reads)
    twell_model.lay_weights(nn.ModuleList([ffn]))
    return ffn


def test_an_fp8_layer_keeps_both_layouts_and_stores_one(monkeypatch):
    down = as_if_on_a_gpu(monkeypatch).down_proj
    assert down.weight.is_contiguous()
    assert down.turned.is_contiguous()
    assert torch.equal(down.turned.t().float(), down.weight.float())
    assert set(down.state_dict()) == {"weight", "weight_scale"}
    assert copy.deepcopy(down).turned.shape == (6, 32)


def test_all_layers_keep_their_values(monkeypatch):
    ffn = bare_ffn()
    was = {name: t.clone() for name, t in ffn.state_dict().items()}
    as_if_on_a_gpu(monkeypatch, ffn=ffn)
    now = ffn.state_dict()
    assert now.keys() == was.keys()
    assert all(torch.equal(now[name].float(), was[name].float()) for name in was)


def test_a_layer_that_moves_drops_the_second_layout(monkeypatch):
    down = as_if_on_a_gpu(monkeypatch).down_proj
    down.to(torch.bfloat16)
    assert down.turned is None


def test_the_second_layout_follows_values_that_are_loaded(monkeypatch):
    down = as_if_on_a_gpu(monkeypatch).down_proj
    values = spread(32, 6, seed=2).to(DTYPE)
    down.load_state_dict(down.state_dict() | {"weight": values})
    assert torch.equal(down.turned.float(), values.t().float())


def test_on_the_cpu_there_is_one_layout(monkeypatch):
    assert as_if_on_a_gpu(monkeypatch, reads=None).down_proj.turned is None


def test_where_dense_is_asked_for_there_is_one_layout(monkeypatch):
    assert as_if_on_a_gpu(monkeypatch, route="dense").down_proj.turned is None
    monkeypatch.setenv("TWELL_ROUTE", "dense")
    assert as_if_on_a_gpu(monkeypatch).down_proj.turned is None


@pytest.mark.parametrize(
    ("capability", "cuda", "after"),
    [((9, 0), "13.0", True), ((9, 0), "12.8", False), ((8, 9), "13.0", False)],
)
def test_where_a_bias_is_added_after_the_product(monkeypatch, capability, cuda, after):
    limits = replace(H200, capability=capability)
    monkeypatch.setattr(twell_e4m3, "device_limits", lambda index: limits)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert twell_e4m3._adds_biases_after(0) == after
