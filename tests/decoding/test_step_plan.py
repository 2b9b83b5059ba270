"""Which way passes of the kernel decoder go: measured on a text that it draws, else by rule."""

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
from twellctl.decoding import step_plan
from twellctl.decoding.batch import Batch
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.step_plan import draw_text, plan_steps, rows_of


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    return stand_in(monkeypatch)


@torch.inference_mode()
def open_decoder(tiny, densities: list[float] | None = None, **sizes) -> KernelDecoder:
    model = tiny(**SIZES | sizes)
    model.config.twell = TWELL | ({} if densities is None else {"densities": densities})
    return attached(KernelDecoder(model), 9)


def ways_of(tiny, densities: list[float] | None, num_tokens: int) -> dict[str, list[str]]:
    decoder = open_decoder(tiny, densities, intermediate_size=8192)
    ways = decoder.ways(num_tokens).items()
    return {name: [way.name for way in one.args[0]] for name, one in ways}


def test_the_ways_of_a_pass(tiny, monkeypatch):
    """First that of the rule, which knows the density of the model; each for all layers."""
    pairs, union, dense = ({name: [name] * 2} for name in ("pairs", "union", "dense"))
    assert list(ways_of(tiny, None, 4).items()) == list((union | pairs | dense).items())
    assert list(ways_of(tiny, [0.01, 0.01], 4)) == ["pairs", "union", "dense"]
    assert list(ways_of(tiny, [0.9, 0.9], 4)) == ["union", "pairs", "dense"]
    assert list(ways_of(tiny, [0.01, 0.01], 3)) == ["union", "dense"]
    monkeypatch.setattr(module, "device_limits", lambda index: replace(H200, capability=(8, 0)))
    assert list(ways_of(tiny, [0.01, 0.01], 4)) == ["union", "dense"]


@pytest.fixture
def timed(monkeypatch, tmp_path) -> SimpleNamespace:
    """Passes can be measured, on a CPU: the times are those told; every way is run."""
    times = {"pairs": 3.0, "union": 2.0, "dense": 4.0}

    def measure(runs, prepared):
        assert prepared == "a graph"
        timed.measured.append(list(runs))
        for run in runs.values():
            run()
        return {name: times[name] for name in runs}

    timed = SimpleNamespace(times=times, measured=[])
    monkeypatch.setattr(step_plan, "can_measure", lambda device: True)
    monkeypatch.setattr(step_plan, "measure_by_turns", measure)
    monkeypatch.setattr(step_plan, "capture_in", lambda pool: "a graph")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return timed


def inputs(rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    tables = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) + 1
    tokens = torch.arange(rows, dtype=torch.int32)[:, None]
    return tokens, torch.zeros_like(tokens), tables


@torch.inference_mode()
def way_of_step(decoder: KernelDecoder, kernels: Kernels) -> str:
    """By which both layers of a step of 4 rows go."""
    kernels.taken.clear()
    decoder.run(*inputs())
    (first, second) = kernels.taken
    assert first == second
    return first


@torch.inference_mode()
def test_all_ways_of_a_step_agree(tiny):
    decoder = open_decoder(tiny)
    (logits, counts), *others = (way(*inputs()) for way in decoder.ways(4).values())
    assert counts.sum() > 0
    assert len(others) == 2
    for other, counted in others:
        assert torch.equal(other, logits)
        assert torch.equal(counted, counts)


def test_the_fastest_way_is_measured_once_and_kept(tiny, timed, kernels):
    decoder = open_decoder(tiny)
    assert str(decoder.plan) == "1+ union"
    few, walked = ["union", "dense"], ["union", "pairs", "dense"]
    assert timed.measured == [few] * 3 + [walked] * 5  # of 1, 2, 3; 4, 8, 16, 32, 64
    timed.times["pairs"] = 1.0
    assert way_of_step(open_decoder(tiny), kernels) == "union"  # in another process
    assert len(timed.measured) == 8
    profiled = open_decoder(tiny, [0.01, 0.01])  # another density
    assert str(profiled.plan) == "1-3 union, 4+ pairs"
    assert way_of_step(profiled, kernels) == "pairs"
    assert len(timed.measured) == 16


def test_a_way_that_does_not_fit_into_memory_is_not_taken(tiny, timed, kernels, tmp_path):
    timed.times["union"] = math.inf
    assert way_of_step(open_decoder(tiny), kernels) == "pairs"
    assert not (tmp_path / "plans.json").exists()  # there may be more memory another time


def test_what_is_measured_is_logged(tiny, timed, caplog):
    with caplog.at_level("INFO", logger=step_plan.__name__):
        open_decoder(tiny)
        open_decoder(tiny)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 8
    assert lines[3] == "steps of 4 tokens take, in ms: union 2.000, pairs 3.000, dense 4.000"


def test_where_nothing_can_be_measured_the_rule_decides(tiny, kernels):
    decoder = open_decoder(tiny, [1e-4, 1e-4])
    assert str(decoder.plan) == "1-3 union, 4+ pairs"
    assert way_of_step(decoder, kernels) == "pairs"


def test_where_one_way_is_nothing_is_drawn(tiny, timed, monkeypatch):
    monkeypatch.setattr(step_plan, "draw_text", None)
    model = tiny(**SIZES)
    assert str(attached(KernelDecoder(model, sparse=False), 9).plan) == "1+ dense"


@torch.inference_mode()
def test_no_more_is_drawn_than_is_measured(tiny, timed):
    """As of a dense model, whose passes over one token alone have two ways, and which takes more
    tokens than a page holds."""
    decoder = open_decoder(tiny)
    way = next(iter(decoder.ways(1).values()))

    def ways(num_tokens):
        return {"union": way, "dense": way} if num_tokens == 1 else {"dense": way}

    timed.measured.clear()
    how = {"key": "dense", "neurons": decoder.neurons[0], "density": None}
    plan = plan_steps(ways, [1, 64, 256], decoder.device, decoder.vocab_size, 2, **how)
    assert str(plan) == "1 union, 2+ dense"
    assert timed.measured == [["union", "dense"]]


@torch.inference_mode()
def test_the_text_is_one_that_the_model_draws(tiny):
    """Each row attends to what is before it: a pass over them is that of a prompt."""
    decoder = open_decoder(tiny)
    (way, *_) = decoder.ways(1).values()
    text, counts = draw_text(way, 20, decoder.vocab_size, 2, decoder.device)
    assert (text.shape, text.dtype, counts.shape) == ((20,), torch.int32, (2, 1))
    assert len(set(text.tolist())) > 5
    assert torch.equal(text, draw_text(way, 20, decoder.vocab_size, 2, decoder.device)[0])
    tokens, positions, tables = rows_of(text, 2)
    assert tables.count_nonzero() == 0  # page 0 is nobody's
    logits, _ = decoder.run(tokens, positions, tables)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    wanted, _ = decoder.run(tokens.T, positions.T, table, last=20)
    torch.testing.assert_close(logits[:, 0], wanted[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="one page holds 64 tokens, got 65"):
        draw_text(way, 65, decoder.vocab_size, 2, decoder.device)


@torch.inference_mode()
def test_a_batch_captures_the_fastest_way_alone(tiny, timed, kernels, monkeypatch):
    """And measures nothing any more."""
    captured, batch = [], Batch(open_decoder(tiny), 4, 2)
    batch._captures, batch._graph_memory = True, None
    timed.measured.clear()

    @contextlib.contextmanager
    def graph(*given, **how):
        kernels.taken.clear()
        yield
        captured.append(list(kernels.taken))

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=list))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    batch.load([np.zeros(len(Field), np.int32)] * 4, [[1], [2], [3], [4]])
    for _ in range(2):
        batch.launch(1, Variant())
    assert captured == [["union", "union"]]
    assert timed.measured == []
