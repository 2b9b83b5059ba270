"""The table of ways: who takes what, in which order, and what is taken unmeasured."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ffns import ffn_by_neurons
from launched import ways_by_tokens

from twellctl.bundle import twell_ways
from twellctl.bundle.twell_config import requested
from twellctl.bundle.twell_model import twell_class
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_ways import (
    WAYS,
    Problem,
    by_rule,
    plan_by_rule,
    run_by_plan,
    tops_of,
    ways_of,
)

H200 = Limits(132, 232448, (9, 0))
A100 = Limits(108, 166912, (8, 0))
L4 = Limits(58, 101376, (8, 9))
OF_HOPPER = ["1 to 3 tokens: union, dense", "4 to 64 tokens: pairs, union, dense"]
OF_HOPPER += ["65 and more tokens: lists, dense"]
OF_OTHERS = ["1 to 64 tokens: union, dense", "65 and more tokens: dense"]


def problem(M: int, **more) -> Problem:
    return Problem(M, 5632, 2048, **{"limits": H200} | more)


def names(route: str, given: Problem) -> list[str]:
    return [way.name for way in ways_of(route, given)]


def ruled(M: int, density: float | None, route: str = "twell", **more) -> str:
    given = problem(M, **more)
    return by_rule(ways_of(route, given), given, density).name


def test_who_takes_what_in_order():
    for limits, lines in ((H200, OF_HOPPER), (A100, OF_OTHERS), (L4, OF_OTHERS)):
        assert list(ways_by_tokens(limits, N=5632, K=2048)) == lines, limits


@pytest.mark.parametrize("M", [1, 3, 4, 64, 65, 4096, 131072])
def test_each_route_has_ways(M):
    for given in (problem(M), problem(M, limits=A100), problem(M, limits=L4)):
        every = names("auto", given)
        assert every == list(dict.fromkeys(way.name for way in WAYS if way.name in every))
        assert every[-1] == "dense"
        own = names("twell", given)
        assert own == ([name for name in every if name != "dense"] or ["dense"])
    assert names("dense", problem(M)) == ["dense"]


def test_where_few_tokens_do_not_fit_others_take_them():
    little = 16 << 10
    assert names("auto", problem(64, limits=replace(L4, smem_bytes=little))) == ["dense"]
    assert names("twell", problem(64, limits=replace(H200, smem_bytes=little)))[-1] == "lists"


def test_the_rule_of_few_tokens():
    """By pairs where a profile tells that few fire; densely where it tells that many do."""
    assert [ruled(M, 0.005) for M in (1, 3, 4, 64)] == ["union", "union", "pairs", "pairs"]
    assert [ruled(M, None) for M in (1, 4, 64)] == ["union"] * 3
    assert [ruled(16, density) for density in (0.08, 0.09, 1.0)] == ["pairs", "union", "union"]
    several = [ruled(16, density, "auto") for density in (0.08, 0.09, 0.1)]
    assert several == ["pairs", "union", "dense"]
    assert [ruled(M, None, "auto") for M in (1, 16, 17, 64)] == ["union", "union", "dense", "dense"]
    assert ruled(64, 0.005, "auto") == "pairs"
    assert ruled(64, 0.005, limits=A100) == "union"


def test_where_w_down_must_be_copied_few_tokens_are_no_reason():
    assert ruled(1, 0.01, "auto") == "union"
    assert ruled(1, 0.01, "auto", in_place=False) == "dense"
    assert ruled(4096, 0.01, "auto", in_place=False) == "lists"


def test_the_rule_of_more_tokens():
    """Over what fires where a profile tells that very little does."""
    assert [ruled(M, 0.001) for M in (65, 4096, 4097)] == ["lists"] * 3
    assert [ruled(M, 0.001, "auto") for M in (65, 2048, 2049)] == ["dense", "dense", "lists"]
    unlike = [ruled(8192, density, "auto") for density in (0.019, 0.02, None)]
    assert unlike == ["lists", "dense", "dense"]


def test_the_rule_as_a_plan():
    plans = {
        ("auto", 0.005): "1-3 union, 4-64 pairs, 65-2048 dense, 2049+ lists",
        ("auto", None): "1-16 union, 17+ dense",
        ("auto", 0.15): "1+ dense",
        ("twell", 0.15): "1-64 union, 65+ lists",
        ("dense", 0.005): "1+ dense",
    }
    found = {of: str(plan_by_rule(of[0], problem(1), of[1])) for of in plans}
    assert found == plans
    assert str(plan_by_rule("twell", problem(1, limits=A100), 0.15)) == "1-64 union, 65+ dense"


@pytest.mark.parametrize("limits", [H200, A100, replace(A100, smem_bytes=64 << 10)])
def test_one_way_serves_all_numbers_up_to_each_top(limits):
    """A plan that is measured at the tops takes no number of tokens that its way does not take."""
    tops = tops_of(problem(1, limits=limits))
    assert {1, 2, 64, 8192} <= set(tops)
    for route in ("auto", "twell"):
        first = 1
        for top in tops:
            at_top = names(route, problem(top, limits=limits))
            for M in range(first, min(top, first + 70) + 1):
                assert names(route, problem(M, limits=limits)) == at_top, (M, top)
            first = top + 1


# ---- the operator ----


@pytest.fixture
def operator(monkeypatch):
    """`operator(M, route...)`: the way that the operator takes on an H200, without kernels."""
    ran = []

    def way(found):
        def run(kernels, limits, x, ffn, slots, **how):
            ran.append(found.name)
            call.how = how
            return x

        return replace(found, run=run)

    def call(M: int, route="auto", density=-1.0, dense=None) -> str:
        x, w = torch.zeros(M, 64).bfloat16(), torch.zeros(96, 64).bfloat16()
        run_by_plan(x, ffn_by_neurons(w, w, w), 8, density, "a", route, dense=dense)
        return ran[-1]

    as_on_an_h200(monkeypatch, way)
    return call


def as_on_an_h200(monkeypatch, way: Callable) -> None:
    """By `way` each of the ways, in the place of kernels."""
    monkeypatch.setattr(twell_ways, "WAYS", tuple(map(way, WAYS)))
    monkeypatch.setattr(twell_ways, "device_limits", lambda index: H200)
    monkeypatch.setattr(twell_ways, "kernels_for", lambda sources, index: None)


def test_without_a_plan_it_goes_by_the_rule_of_its_route(operator):
    assert [operator(M) for M in (1, 16, 17, 100)] == ["union", "union", "dense", "dense"]
    assert operator(16, "twell", 0.001) == operator(16, density=0.001) == "pairs"
    assert operator(5000, density=0.001) == "lists"
    assert operator(3, "twell", 0.001) == "union"  # pairs takes four and more
    assert operator(16, "dense") == "dense"


def test_it_goes_by_the_plan_that_it_is_given(operator):
    plan = "1-3 dense, 4-64 pairs, 65+ lists"
    taken = {M: operator(M, plan) for M in (1, 3, 4, 64, 65)}
    assert taken == {1: "dense", 3: "dense", 4: "pairs", 64: "pairs", 65: "lists"}
    with pytest.raises(ValueError, match="the way 'pairs' does not take 3 tokens here"):
        operator(3, "1+ pairs")
    with pytest.raises(ValueError, match="the way 'fast' does not take 3 tokens here"):
        operator(3, "1+ fast")
    with pytest.raises(ValueError, match="a plan is written like"):
        operator(3, "pairs")


def test_kernels_for_few_tokens_overlap_in_an_engine_alone(operator):
    """Its weights do not change just before they are read."""
    dense = replace(WAYS[-1], run=lambda kernels, limits, x, ffn, slots: x)
    for M, given, how in ((1, dense, {"overlap": True}), (100, dense, {}), (1, None, {})):
        assert operator(M, "twell", dense=given) in ("union", "lists")
        assert operator.how == how


def test_an_engine_has_a_dense_way_of_its_own(operator):
    ran = []
    dense = replace(WAYS[-1], run=lambda kernels, limits, x, ffn, slots: ran.append(len(x)) or x)
    operator(1)
    operator(100, dense=dense)
    assert ran == [100]


def test_who_decides(monkeypatch):
    monkeypatch.delenv("TWELL_ROUTE", raising=False)
    assert requested("auto") == "auto"
    monkeypatch.setenv("TWELL_ROUTE", "dense")
    assert requested("auto") == "dense"
    assert requested("twell") == "twell"
    monkeypatch.setenv("TWELL_ROUTE", "fast")
    with pytest.raises(ValueError, match=r"TWELL_ROUTE must be one of auto, .*, got 'fast'"):
        requested("auto")
    with pytest.raises(ValueError, match=r"^route must be one of auto, .*, got 'slow'"):
        requested("slow")
    # a model refuses it before it loads
    with pytest.raises(ValueError, match=r"twell_route must be one of auto, .*, got 'fast'"):
        twell_class("LlamaForCausalLM").from_pretrained("nowhere", twell_route="fast")
