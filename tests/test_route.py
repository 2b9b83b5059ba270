"""Which route is taken: measured once, kept, and a rule for what is not measured."""

from dataclasses import replace

import pytest
import torch

from twellctl.bundle import twell_route
from twellctl.bundle.twell_route import Choice, Kind, choose

KIND = Kind("a GPU", 2048, 5632, False, 4096, -10, 8, "hopper")


@pytest.fixture
def timed(monkeypatch, tmp_path) -> list:
    """Measurements that were made; dense wins launched one by one, TwELL in a graph."""
    made = []

    def measure(runs):
        made.append(sorted(runs))
        return Choice("dense", "twell"), {"eager dense": 1.0}

    monkeypatch.setattr(twell_route, "measure", measure)
    monkeypatch.setattr(twell_route, "_choices", {})
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return made


def chosen(kind: Kind = KIND, density: float | None = 0.01, capturing: bool = False) -> str:
    return choose(kind, density, capturing, {"dense": None, "twell": None}, lambda: 0.005)


def test_a_choice_is_measured_once_and_kept(timed, monkeypatch):
    assert [chosen(), chosen(), chosen(capturing=True)] == ["dense", "dense", "twell"]
    assert timed == [["dense", "twell"]]
    monkeypatch.setattr(twell_route, "_choices", {})  # another process
    assert chosen() == "dense"
    assert len(timed) == 1
    chosen(Kind("a GPU", 2048, 5632, False, 128, -10, 8, "hopper"))
    assert len(timed) == 2
    assert len(twell_route._read_kept()) == 2
    assert set(twell_route.known_choices().values()) == {Choice("dense", "twell")}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '"text"'])
def test_a_spoilt_file_of_choices_is_written_anew(timed, tmp_path, content):
    (tmp_path / "routes.json").write_text(content)
    assert chosen() == "dense"
    assert KIND.key in twell_route._read_kept()


@pytest.mark.parametrize("kept", ['"best"', "[]", "{}"])
def test_a_kept_choice_that_makes_no_sense_is_measured_again(timed, tmp_path, kept):
    (tmp_path / "routes.json").write_text(f'{{"{KIND.key}": {{"eager": {kept}}}}}')
    assert chosen() == "dense"
    assert len(timed) == 1


def test_what_does_not_fit_into_memory_is_not_chosen(monkeypatch, tmp_path):
    fits = {"twell"}

    def median_ms(run, *, ahead):
        if run not in fits:
            raise torch.OutOfMemoryError("too large")
        return 1.0

    monkeypatch.setattr(twell_route, "median_ms", median_ms)
    monkeypatch.setattr(twell_route, "_choices", {})
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    runs = {"dense": "dense", "twell": "twell"}
    assert choose(KIND, 0.01, False, runs, lambda: 0.01) == "twell"
    assert choose(KIND, 0.01, True, runs, lambda: 0.01) == "twell"
    assert twell_route._read_kept() == {}
    fits.clear()
    with pytest.raises(torch.OutOfMemoryError):
        choose(replace(KIND, tokens=64), 0.01, False, runs, lambda: 0.01)


def test_nothing_is_measured_during_a_capture(timed):
    assert chosen(capturing=True) == "twell"
    assert chosen(density=None, capturing=True) == "twell"
    assert chosen(density=0.03, capturing=True) == "dense"
    assert chosen(replace(KIND, tokens=2048), capturing=True) == "dense"
    assert timed == []


@pytest.mark.parametrize("tokens", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("density", [None, 0.005, 0.099, 0.1, 1.0])
def test_few_tokens_in_a_capture(timed, tokens, density):
    few = replace(KIND, tokens=tokens, few=True)
    sparse = tokens <= 16 and (density is None or density < 0.1)
    assert chosen(few, density, capturing=True) == ("twell" if sparse else "dense")
    assert chosen(replace(few, few=False), density, capturing=True) == "dense"
    assert timed == []
    assert chosen(few, density) == "dense"  # measured
    assert chosen(few, density, capturing=True) == "twell"


def test_an_unknown_density_is_counted(timed):
    kind = Kind("a GPU", 2048, 5632, False, 64, None, 8, "hopper")
    assert chosen(kind, None) == "dense"
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
