"""The table of ways: who takes what, in which order, and what is taken unmeasured."""

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ffns import ffn_by_neurons
from launched import ways_by_tokens

from twellctl.bundle import twell_route, twell_ways
from twellctl.bundle.twell_model import twell_class
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_route import Choice, Kind, choose
from twellctl.bundle.twell_ways import WAYS, Problem, by_rule, run_by_route, ways_of

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
    assert [ruled(M, 0.001) for M in (65, 4096, 4097)] == ["lists"] * 3
    assert [ruled(M, None, "auto") for M in (65, 2048, 2049)] == ["dense", "dense", "lists"]
    assert [ruled(8192, density, "auto") for density in (0.019, 0.02)] == ["lists", "dense"]


# ---- the operator ----


def as_on_an_h200(monkeypatch, folder: Path, way: Callable, measure: Callable) -> None:
    """As on an H200, without kernels: by `way` each of the ways, by `measure` the fastest."""
    monkeypatch.setattr("twellctl.bundle.twell_ways.WAYS", tuple(map(way, WAYS)))
    monkeypatch.setattr(twell_ways, "device_limits", lambda index: H200)
    monkeypatch.setattr(twell_ways, "kernels_for", lambda sources, index: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(twell_route, "measure", measure)
    monkeypatch.setattr(twell_route, "_choices", {})
    monkeypatch.setenv("TWELL_CACHE_DIR", str(folder))


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
        run_by_route(x, ffn_by_neurons(w, w, w), 8, density, "a", route, dense=dense)
        return ran[-1]

    def measure(runs):
        call.timed.append(list(runs))
        return {f"{mode} {name}": 1 / len(name) for mode in ("eager", "graph") for name in runs}

    def count(rows, ffn) -> float:
        call.counted += 1
        return 0.01

    call.timed, call.counted = [], 0
    as_on_an_h200(monkeypatch, tmp_path, way, measure)
    monkeypatch.setattr(twell_ways, "_sampled_density", count)
    return call


def test_auto_measures_all_that_take_it_and_twell_its_own(operator):
    assert operator(16) == "pairs"  # as fast as the others, and before them
    assert operator(100) == "lists"
    assert operator(16, "twell") == "pairs"
    assert operator(100, "twell") == "lists"
    few = ["pairs", "union"]
    assert operator.timed == [[*few, "dense"], ["lists", "dense"], few]
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
        assert operator(M, "twell", dense=given) in ("union", "lists")
        assert operator.how == how


# ---- which is taken: measured once, kept, and a rule for what is not measured


TWO = ("union", "dense")
KIND = Kind("a GPU", 2048, 5632, False, 4096, -10, 8, "hopper", TWO)


@pytest.fixture
def timed(monkeypatch, tmp_path) -> list:
    """Measurements that were made; dense wins launched one by one, the union in a graph."""
    made = []

    def measure(runs):
        made.append(list(runs))
        times = {"eager union": 2.0, "eager dense": 1.0, "graph union": 1.0, "graph dense": 2.0}
        return {key: times[key] for key in times if key.split()[1] in runs}

    monkeypatch.setattr(twell_route, "measure", measure)
    monkeypatch.setattr(twell_route, "_choices", {})
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return made


def chosen(kind: Kind = KIND, capturing: bool = False) -> str:
    runs = dict.fromkeys(kind.ways)
    return choose(kind, capturing, runs, lambda: "by rule", lambda: 0.005)


def test_a_choice_is_measured_once_and_kept(timed, monkeypatch):
    assert [chosen(), chosen(), chosen(capturing=True)] == ["dense", "dense", "union"]
    assert timed == [["union", "dense"]]
    monkeypatch.setattr(twell_route, "_choices", {})  # another process
    assert chosen() == "dense"
    assert len(timed) == 1
    chosen(replace(KIND, tokens=128))
    assert len(timed) == 2
    assert len(twell_route._read_kept()) == 2
    assert set(twell_route.known_choices().values()) == {Choice("dense", "union")}


def test_what_was_chosen_among_others_is_no_choice(timed):
    """A kernel for 4 tokens and more does not take 3, which are in the same power of two."""
    assert chosen() == "dense"
    assert chosen(replace(KIND, ways=("union",))) == "union"
    assert len(timed) == 1
    assert chosen(replace(KIND, ways=("dense", "union"))) == "dense"
    assert len(timed) == 2


CHOICES = [f'{{"{KIND.key}": {{"eager": {kept}}}}}' for kept in ('"best"', "[]", "{}")]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '"text"', "[" * 200_000, *CHOICES])
def test_choices_that_make_no_sense_are_measured_and_written_anew(timed, tmp_path, content):
    (tmp_path / "routes.json").write_text(content)
    assert chosen() == "dense"
    assert len(timed) == 1
    assert KIND.key in twell_route._read_kept()


def test_choices_of_several_processes_are_all_kept(timed, tmp_path):
    """Each reads what is kept, measures and writes: none writes over what another one did."""

    def choose_some(first: int) -> None:
        for tokens in range(first, first + 20):
            name = f"tokens {tokens}"
            twell_route.kept_or_measured(name, ["a", "b"], ("eager",), lambda: times)

    times = {"eager a": 1.0, "eager b": 2.0}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(choose_some, range(0, 80, 20)))
    assert len(twell_route._read_kept()) == 80


def test_what_does_not_fit_into_memory_is_not_chosen(monkeypatch, tmp_path):
    fits = {"union"}

    def median_ms(run, *, ahead):
        if run not in fits:
            raise torch.OutOfMemoryError("too large")
        return 1.0

    monkeypatch.setattr(twell_route, "median_ms", median_ms)
    monkeypatch.setattr(twell_route, "_choices", {})
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))

    def chosen(kind: Kind, capturing: bool = False) -> str:
        runs = {name: name for name in kind.ways}
        return choose(kind, capturing, runs, lambda: "by rule", lambda: 0.01)

    assert chosen(KIND) == "union"
    assert chosen(KIND, capturing=True) == "union"
    assert twell_route._read_kept() == {}
    fits.clear()
    with pytest.raises(torch.OutOfMemoryError):
        chosen(replace(KIND, tokens=64))


@pytest.mark.parametrize(("ms", "untimed"), [(0.01, 16), (4.5, 13), (31.0, 1), (100.0, 0)])
def test_untimed_runs_come_before_a_median(monkeypatch, ms, untimed):
    """After two that say how long one takes; then five are timed."""
    made = []

    def timed_ms(run, *, ahead):
        run("timed")
        return 500.0 if len(made) == 1 else ms  # the first loads kernels

    monkeypatch.setattr(twell_route, "timed_ms", timed_ms)
    found = twell_route.median_ms(lambda how="untimed": made.append(how), ahead=True)
    assert made == ["timed"] * 2 + ["untimed"] * untimed + ["timed"] * 5
    assert found == ms


def test_of_what_is_as_fast_the_first_is_taken():
    assert twell_route.fastest({"a": 1.004, "b": 1.0}) == "a"
    assert twell_route.fastest({"a": 1.009, "b": 1.0, "c": 1.0}) == "b"
    assert twell_route.fastest({"a": math.inf, "b": 1.0}) == "b"


def test_an_unknown_density_is_counted(timed):
    kind = replace(KIND, density=None)
    assert chosen(kind) == "dense"
    assert list(twell_route._read_kept()) == [kind.key + " counted=-20"]


def test_who_decides(monkeypatch):
    monkeypatch.delenv("TWELL_ROUTE", raising=False)
    assert twell_route.requested("auto") == "auto"
    monkeypatch.setenv("TWELL_ROUTE", "dense")
    assert twell_route.requested("auto") == "dense"
    assert twell_route.requested("twell") == "twell"
    monkeypatch.setenv("TWELL_ROUTE", "fast")
    with pytest.raises(ValueError, match=r"TWELL_ROUTE must be one of auto, .*, got 'fast'"):
        twell_route.requested("auto")
    with pytest.raises(ValueError, match=r"^route must be one of auto, .*, got 'slow'"):
        twell_route.requested("slow")
    # a model refuses it before it loads
    with pytest.raises(ValueError, match=r"twell_route must be one of auto, .*, got 'fast'"):
        twell_class("LlamaForCausalLM").from_pretrained("nowhere", twell_route="fast")


def test_buckets():
    assert [twell_route.token_bucket(M) for M in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert twell_route.density_bucket(1.0) == 0
    assert twell_route.density_bucket(0.0) == twell_route.density_bucket(1e-4)
    assert twell_route.density_bucket(0.01) - twell_route.density_bucket(0.0077) == 1
