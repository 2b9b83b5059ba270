"""Which route is taken: measured once, kept, and a rule for what is not measured."""

import math
import threading
from dataclasses import replace

import pytest
import torch

from twellctl.bundle import twell_route
from twellctl.bundle.twell_route import Choice, Kind, choose

WAYS = ("union", "dense")
KIND = Kind("a GPU", 2048, 5632, False, 4096, -10, 8, "hopper", WAYS)


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


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '"text"', "[" * 200_000])
def test_a_spoilt_file_of_choices_is_written_anew(timed, tmp_path, content):
    (tmp_path / "routes.json").write_text(content)
    assert chosen() == "dense"
    assert KIND.key in twell_route._read_kept()


@pytest.mark.parametrize("kept", ['"best"', "[]", "{}"])
def test_a_kept_choice_that_makes_no_sense_is_measured_again(timed, tmp_path, kept):
    (tmp_path / "routes.json").write_text(f'{{"{KIND.key}": {{"eager": {kept}}}}}')
    assert chosen() == "dense"
    assert len(timed) == 1


def test_choices_of_several_processes_are_all_kept(timed, tmp_path):
    """Each reads what is kept, measures and writes: none writes over what another one did."""

    def choose_some(first: int) -> None:
        for tokens in range(first, first + 20):
            name = f"tokens {tokens}"
            twell_route.kept_or_measured(name, ["a", "b"], ("eager",), lambda: times)

    times = {"eager a": 1.0, "eager b": 2.0}

    threads = [threading.Thread(target=choose_some, args=[20 * i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def test_nothing_is_measured_or_counted_during_a_capture(timed):
    def count() -> float:
        raise AssertionError("counted")

    unknown = replace(KIND, density=None)
    assert choose(unknown, True, dict.fromkeys(WAYS), lambda: "by rule", count) == "by rule"
    assert timed == []


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


def test_a_model_refuses_an_unknown_route_before_it_loads():
    from twellctl.bundle.twell_model import twell_class

    with pytest.raises(ValueError, match=r"twell_route must be one of auto, .*, got 'fast'"):
        twell_class("LlamaForCausalLM").from_pretrained("nowhere", twell_route="fast")


def test_buckets():
    assert [twell_route.token_bucket(M) for M in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert twell_route.density_bucket(1.0) == 0
    assert twell_route.density_bucket(0.0) == twell_route.density_bucket(1e-4)
    assert twell_route.density_bucket(0.01) - twell_route.density_bucket(0.0077) == 1
