"""The table of ways: who takes what, in which order, and what is taken unmeasured."""

import contextlib
from dataclasses import replace

import pytest
import torch

from twellctl.bundle import twell_route, twell_ways
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_route import Choice
from twellctl.bundle.twell_ways import WAYS, Problem, by_rule, run_by_route, ways_by_tokens, ways_of
from twellctl.bundle.twell_weights import FFN

H200 = Limits(132, 232448, (9, 0))
A100 = Limits(108, 166912, (8, 0))
L4 = Limits(58, 101376, (8, 9))
OF_HOPPER = ["1 to 3 tokens: union, dense", "4 to 64 tokens: pairs, union, dense"]
OF_HOPPER += ["65 to 4096 tokens: walk_gate, lists, dense", "4097 and more tokens: lists, dense"]
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
    walks = ["walk_gate", "walk_gate", "lists"]
    assert [ruled(M, 0.001) for M in (65, 4096, 4097)] == walks
    assert [ruled(256, density) for density in (None, 0.05, 0.06)] == walks
    assert [ruled(M, None, "auto") for M in (65, 2048, 2049)] == ["dense", "dense", "lists"]
    assert [ruled(M, 0.001, end="_e4m3") for M in (65, 4096, 4097)] == walks
    assert [ruled(8192, density, "auto") for density in (0.019, 0.02)] == ["lists", "dense"]


# ---- the operator ----


@pytest.fixture
def operator(monkeypatch, tmp_path):
    """`operator(M, route...)`: the way that the operator takes; `.timed`: what it measured."""
    ran = []

    def way(found):
        def run(kernels, limits, x, ffn, slots, **how):
            ran.append(found.name)
            call.how = how
            return x

        return replace(found, run=run)

    def call(M: int, route="auto", density=-1.0, capturing=False, dense=None) -> str:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        x, w = torch.zeros(M, 64).bfloat16(), torch.zeros(96, 64).bfloat16()
        run_by_route(x, FFN(w, w, w, None, None, None), 8, density, "a", route, dense=dense)
        return ran[-1]

    def measure(runs):
        call.timed.append(list(runs))
        return {f"{mode} {name}": 1 / len(name) for mode in ("eager", "graph") for name in runs}

    def count(rows, ffn) -> float:
        call.counted += 1
        return 0.01

    call.timed, call.counted = [], 0
    monkeypatch.setattr("twellctl.bundle.twell_ways.WAYS", tuple(map(way, WAYS)))
    for name, stand_in in {
        "device_limits": lambda index: H200,
        "kernels_for": lambda sources, index: None,
        "_sampled_density": count,
    }.items():
        monkeypatch.setattr(twell_ways, name, stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(twell_route, "measure", measure)
    monkeypatch.setattr(twell_route, "_choices", {})
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return call


def test_auto_measures_all_that_take_it_and_twell_its_own(operator):
    assert operator(16) == "pairs"  # as fast as the others, and before them
    assert operator(100) == "walk_gate"  # the longest name is the fastest here
    assert operator(16, "twell") == "pairs"
    assert operator(100, "twell") == "walk_gate"
    few, many = ["pairs", "union"], ["walk_gate", "lists"]
    assert operator.timed == [[*few, "dense"], [*many, "dense"], few, many]
    assert set(twell_route.known_choices().values()) >= {Choice("pairs", "pairs")}


def test_what_one_way_alone_takes_is_not_measured(operator):
    assert operator(1, "twell") == "union"
    assert operator(5000, "twell") == "lists"
    assert operator(16, "dense") == "dense"
    assert (operator.timed, operator.counted) == ([], 0)


def test_a_density_is_counted_once_and_never_in_a_capture(operator):
    assert operator(16, "twell", capturing=True) == "union"
    assert operator(16, "twell", 0.001, capturing=True) == "pairs"
    assert (operator.timed, operator.counted) == ([], 0)
    assert operator(16, "twell") == operator(16, "twell") == "pairs"
    assert operator(16, "twell", capturing=True) == "pairs"  # as measured
    assert operator.counted == len(operator.timed) == 1
    assert operator(16, "twell", 0.001) == "pairs"
    assert (operator.counted, len(operator.timed)) == (1, 2)


def test_three_tokens_do_not_go_by_a_kernel_for_four(operator):
    """They are in the same power of two."""
    assert operator(4, "twell", 0.001) == "pairs"
    assert operator(3, "twell", 0.001) == "union"


def test_kernels_for_few_tokens_overlap_in_an_engine_alone(operator):
    """Its weights do not change just before they are read."""
    dense = replace(next(way for way in WAYS if not way.own), name="of an engine")
    for M, given, how in ((1, dense, {"overlap": True}), (100, dense, {}), (1, None, {})):
        assert operator(M, "twell", dense=given) in ("union", "walk_gate")
        assert operator.how == how
