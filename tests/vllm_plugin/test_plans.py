"""What is planned before an engine serves, and what is said of it; without vLLM and a GPU."""

from dataclasses import replace

import pytest
import torch

from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_measured import Sizes
from twellctl.bundle.twell_plan import Limits
from twellctl.vllm import plans
from twellctl.vllm.plans import Layer, engines_way, plan_layers

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = Sizes(64, 96, (False, False))
LAYERS = [Layer(SIZES, 256, 8, density=0.05), Layer(SIZES, 256, 16, density=0.2)]
BY_VLLM = "densely, by vLLM's own FP8 linear layers:"


def ENGINES(x):
    return engines_way(lambda: x)


OF_BOTH = pytest.mark.parametrize("dense", [None, ENGINES], ids=["bf16", "FP8"])


def planned(device=GPU, layers=LAYERS, dtype=torch.bfloat16, dense=None):
    return plan_layers(layers, 8, device, dtype, "sources", dense)


class Found(dict[Sizes, str]):
    """The plans that measuring finds; `asked`: what for."""

    def __init__(self, plans: dict[Sizes, str]):
        super().__init__(plans)
        self.asked: list[tuple] = []


@pytest.fixture
def found(monkeypatch) -> Found:
    plans_by_sizes = Found({SIZES: "1-4 union, 5+ dense"})

    def plan_of_ffn(sizes, *asked, **how) -> WayPlan:
        plans_by_sizes.asked.append((sizes, *asked, how))
        return WayPlan.parse(plans_by_sizes[sizes])

    monkeypatch.delenv("TWELL_ROUTE", raising=False)
    monkeypatch.setattr(plans, "plan_of_ffn", plan_of_ffn)
    monkeypatch.setattr(plans, "why_not_sizes", lambda *asked: None)
    monkeypatch.setattr(plans, "why_no_kernels", lambda *asked: None)
    return plans_by_sizes


@OF_BOTH
def test_layers_of_the_same_sizes_go_by_one_plan(found, dense):
    """For the mean of their densities, and the most slots."""
    made = planned(dense=dense)
    assert made.how == "by numbers of tokens, as measured: 1-4 union, 5+ dense"
    assert {sizes: str(plan) for sizes, plan in made.plans.items()} == found
    ((sizes, density, *rest, how),) = found.asked
    assert (sizes, density) == (SIZES, pytest.approx(0.125))
    assert rest == [16, GPU, "sources", "auto"]
    assert how == {"most": 8, "dense": dense, "engine": ""}


def test_layers_of_other_sizes_have_plans_of_their_own(found):
    other = replace(SIZES, N=104)
    found[other] = "1+ union"
    made = planned(layers=[*LAYERS, replace(LAYERS[0], sizes=other)])
    assert made.how == "by numbers of tokens, as measured: 1-4 union, 5+ dense; 1+ union"
    assert list(made.plans) == [SIZES, other]


@OF_BOTH
def test_dense_where_nothing_is_faster(found, dense):
    found[SIZES] = "1+ dense"
    made = planned(dense=dense)
    assert made.plans == {}
    assert made.how.startswith("densely, which was measured to be the fastest")


def test_the_route_of_the_variable_is_taken(found, monkeypatch):
    monkeypatch.setenv("TWELL_ROUTE", "twell")
    assert planned().plans
    assert found.asked[0][-2] == "twell"
    monkeypatch.setenv("TWELL_ROUTE", "dense")
    assert (planned().plans, planned().how) == ({}, "densely, as TWELL_ROUTE says")


@OF_BOTH
@pytest.mark.parametrize("why", ["CPU", "dtype", "kernels"])
def test_the_reason_for_going_without_the_kernels_is_said(found, monkeypatch, dense, why):
    how = {}
    if why == "CPU":
        how, said = {"device": CPU}, "the kernels need an NVIDIA GPU"
    elif why == "dtype":
        how, said = {"dtype": torch.float16}, "the kernels take bf16, not float16"
    else:
        said = "no CuPy"
        monkeypatch.setattr(plans, "why_no_kernels", lambda *asked: said)
    made = planned(dense=dense, **how)
    assert (made.plans, found.asked) == ({}, [])
    assert made.how == f"{BY_VLLM if dense else 'densely, in plain PyTorch:'} {said}"


def test_sizes_that_the_kernels_do_not_take_are_said(monkeypatch):
    limits = Limits(132, 232448, (9, 0))
    monkeypatch.setattr("twellctl.bundle.twell_reasons.device_limits", lambda index: limits)
    odd = [replace(LAYERS[0], sizes=Sizes(72, 96, (False, False)))]
    said = "the kernels take a hidden size that is a multiple of 64, not 72"
    assert planned(layers=odd).how == f"densely, in plain PyTorch: {said}"
    in_e4m3 = [replace(LAYERS[0], sizes=Sizes(64, 96, (False, False), "e4m3"))]
    said = "over e4m3 weights the kernels take multiples of 128, not 64 and 96"
    assert planned(layers=in_e4m3, dense=ENGINES).how == f"{BY_VLLM} {said}"


def test_the_way_of_an_engine_is_the_dense_one():
    x = torch.ones(3)
    way = ENGINES(x)
    assert way.run(None, None, x, None, 8) is x
    assert (way.name, way.own, way.by_rows) == ("dense", False, False)
