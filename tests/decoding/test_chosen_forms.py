"""Which form a step of the kernel decoder takes: by rule, measured by turns, kept."""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attached import attached
from played_kernels import H200, SIZES, TWELL, Kernels, stand_in
from torch import Tensor

from twellctl.decoding import kernel_decoder as module
from twellctl.decoding import step_forms
from twellctl.decoding.batch import Batch
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.sampler import Field, Variant


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    return stand_in(monkeypatch)


def forms_of(tiny, densities: list[float] | None, rows: int) -> dict[str, list[str]]:
    model = tiny(**SIZES, intermediate_size=8192)
    model.config.twell = TWELL | ({} if densities is None else {"densities": densities})
    decoder = attached(KernelDecoder(model), 3)
    forms = decoder.forms(rows).items()
    return {name: [way.name for way in form.args[0]] for name, form in forms}


def test_the_forms_of_a_step(tiny, monkeypatch):
    """By rule first, which goes by what a profile told of each layer; then each way for all."""
    pairs, union, dense = ({name: [name] * 2} for name in ("pairs", "union", "dense"))
    assert list(forms_of(tiny, None, 4).items()) == list((union | pairs | dense).items())
    assert list(forms_of(tiny, [0.01, 0.01], 4)) == ["pairs", "union", "dense"]
    mixed = {"pairs and union": ["pairs", "union"]}
    assert [*forms_of(tiny, [0.01, 0.9], 4).items()] == [*(mixed | pairs | union | dense).items()]
    assert list(forms_of(tiny, [0.01, 0.9], 3)) == ["union", "dense"]
    monkeypatch.setattr(module, "device_limits", lambda index: replace(H200, capability=(8, 0)))
    assert list(forms_of(tiny, [0.01, 0.9], 4)) == ["union", "dense"]


@pytest.fixture
def timed(monkeypatch, tmp_path) -> dict[str, float]:
    """Steps can be measured, on a CPU: the times are those told; every form is run."""
    times = {"pairs": 3.0, "union": 2.0, "dense": 4.0}

    def graph_ms(runs):
        timed.measured.append(list(runs))
        for run in runs.values():
            run()
        return {name: times[name] for name in runs}

    timed = SimpleNamespace(times=times, measured=[])
    monkeypatch.setattr(step_forms, "can_measure", lambda device: True)
    monkeypatch.setattr(step_forms, "graph_ms", graph_ms)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return timed


@torch.inference_mode()
def open_decoder(tiny, densities: list[float] | None = None) -> KernelDecoder:
    model = tiny(**SIZES)
    model.config.twell = TWELL | ({} if densities is None else {"densities": densities})
    return attached(KernelDecoder(model), 9)


def inputs(rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    tables = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) + 1
    tokens = torch.arange(rows, dtype=torch.int32)[:, None]
    return tokens, torch.zeros_like(tokens), tables


@torch.inference_mode()
def way_of_step(decoder: KernelDecoder, kernels: Kernels) -> str:
    """By which both layers of a step of 4 rows go, once what is measured was."""
    decoder.run(*inputs())
    kernels.taken.clear()
    decoder.run(*inputs())
    (first, second) = kernels.taken
    assert first == second
    return first


@torch.inference_mode()
def test_all_forms_of_a_step_agree(tiny):
    decoder = open_decoder(tiny)
    (logits, counts), *others = (form(*inputs()) for form in decoder.forms(4).values())
    assert counts.sum() > 0
    assert len(others) == 2
    for other, counted in others:
        assert torch.equal(other, logits)
        assert torch.equal(counted, counts)


@torch.inference_mode()
def test_the_fastest_form_is_measured_once_and_kept(tiny, timed, kernels):
    assert way_of_step(open_decoder(tiny), kernels) == "union"
    assert timed.measured == [["union", "pairs", "dense"]]
    timed.times["pairs"] = 1.0
    assert way_of_step(open_decoder(tiny), kernels) == "union"  # in another process
    assert len(timed.measured) == 1
    profiled = open_decoder(tiny, [0.01, 0.01])  # another density
    assert way_of_step(profiled, kernels) == "pairs"
    assert len(timed.measured) == 2
    profiled.run(*inputs(3))
    assert timed.measured[2:] == [["union", "dense"]]
    assert [profiled.chosen(rows) for rows in (2, 3, 4, 5)] == ["union", "union", "pairs", None]


def test_a_form_that_does_not_fit_into_memory_is_not_taken(tiny, timed, kernels, tmp_path):
    timed.times["union"] = math.inf
    assert way_of_step(open_decoder(tiny), kernels) == "pairs"
    assert not (tmp_path / "routes.json").exists()  # there may be more memory another time


def test_what_is_measured_is_logged(tiny, timed, kernels, caplog):
    with caplog.at_level("INFO", logger=step_forms.__name__):
        way_of_step(open_decoder(tiny), kernels)
        way_of_step(open_decoder(tiny), kernels)
    chosen = "steps of 4 rows, tables of 4 pages: union is the fastest, "
    whys = "ms: union 2.000, pairs 3.000, dense 4.000", "as measured before"
    assert [record.getMessage() for record in caplog.records] == [chosen + why for why in whys]


def test_a_step_in_a_capture_is_chosen_by_rule(tiny, timed, kernels, monkeypatch):
    monkeypatch.setattr(step_forms, "can_measure", lambda device: False)
    assert way_of_step(open_decoder(tiny, [1e-4, 1e-4]), kernels) == "pairs"
    assert timed.measured == []


@torch.inference_mode()
def test_a_batch_measures_before_it_captures(tiny, timed, kernels, monkeypatch):
    """And what it captures is the fastest form alone."""
    order, batch = [], Batch(open_decoder(tiny), 4, 2)
    batch._captures, batch._graph_memory = True, None

    @contextlib.contextmanager
    def graph(*given, **how):
        order.append(("captures", list(timed.measured)))
        kernels.taken.clear()
        yield
        order.append(("captured", list(kernels.taken)))

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=list))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    batch.load([np.zeros(len(Field), np.int32)] * 4, [[1], [2], [3], [4]])
    for _ in range(2):
        batch.launch(1, Variant())
    assert order == [("captures", [["union", "pairs", "dense"]]), ("captured", ["union", "union"])]


class Graph:
    """Stands for a captured run; the turns of its replays are those in `times`."""

    def __init__(self, name: str, times: list[float]):
        self.name, self._left = name, iter(times)

    def replay(self) -> float:
        return next(self._left)


@pytest.fixture
def play(monkeypatch):
    """`play(times)` measures forms by name; an empty list does not fit into memory."""
    replayed = []

    def measure(times: dict[str, list[float]]) -> dict[str, float]:
        def captured(run, pool, stream) -> Graph:
            if not times[run]:
                raise torch.OutOfMemoryError("too large")
            return Graph(run, times[run])

        monkeypatch.setattr(step_forms, "_captured", captured)
        return step_forms.graph_ms({name: name for name in times})

    def timed_ms(replay, *, ahead: bool) -> float:
        assert ahead  # the host's time does not count
        replayed.append(replay.__self__.name)
        return replay()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(step_forms, "timed_ms", timed_ms)
    measure.replayed = replayed
    return measure


def test_forms_take_turns_and_their_medians_count(play):
    noisy, steady = [90, 80, 1, 2, 3, 4, 5, 6, 70], [50, 50] + [4.5] * 7
    assert play({"noisy": noisy, "steady": steady}) == {"noisy": 4, "steady": 4.5}
    assert play.replayed == ["noisy", "steady"] * 9


def test_what_does_not_fit_takes_for_ever(play):
    assert play({"large": [], "small": [1.0] * 9}) == {"large": math.inf, "small": 1.0}
    assert play.replayed == ["small"] * 9
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        play({"large": [], "larger": []})
