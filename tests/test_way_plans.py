"""Which way each number of tokens goes: the plan as a value, measured once and kept."""

import contextlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from twellctl.bundle import twell_choice, twell_measured, twell_model
from twellctl.bundle.twell_choice import WayPlan, density_bucket, fastest, measured_plan
from twellctl.bundle.twell_dense import gated_ffn
from twellctl.bundle.twell_measured import Sizes, plan_of_ffn
from twellctl.bundle.twell_model import TwellFFN, plan_ways, put_over_twell, use_kernels
from twellctl.bundle.twell_plan import Limits

H200 = Limits(132, 232448, (9, 0))
GPU = torch.device("cuda", 0)


# ---- the value ----


def test_a_plan_is_read_by_numbers_of_tokens_and_as_text():
    plan = WayPlan.of([1, 4, 64, 65], {1: "one kernel", 4: "pairs", 64: "pairs", 65: "dense"}.get)
    assert str(plan) == "1 one kernel, 2-64 pairs, 65+ dense"
    names = [plan.name(tokens) for tokens in (1, 2, 64, 65, 10**6)]
    assert names == ["one kernel", "pairs", "pairs", "dense", "dense"]
    assert WayPlan.parse(str(plan)) == plan
    assert str(WayPlan.of([1, 2, 8], lambda top: "union")) == "1+ union"
    assert WayPlan.parse("1+ union").name(77) == "union"


NO_PLANS = ["", "union", "1 union", "1-4 union", "2+ union", "1+ a, 2+ b", "x+ a"]
NO_PLANS += ["1-4 union, 6+ dense", "4-1 union, 5+ dense"]


@pytest.mark.parametrize("text", NO_PLANS)
def test_what_is_no_plan(text):
    with pytest.raises(ValueError, match="a plan is written like '1-4 union, 5\\+ dense', got"):
        WayPlan.parse(text)


def test_densities_are_told_apart_in_steps():
    assert density_bucket(1.0) == 0
    assert density_bucket(0.0) == density_bucket(1e-4)
    assert density_bucket(0.01) - density_bucket(0.0077) == 1


# ---- measured once, and kept ----


WAYS = {1: ["union", "dense"], 64: ["pairs", "union", "dense"], 128: ["dense"]}


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """`measure(tokens)` for `measured_plan`: `times` by tokens and name, and what was asked for."""

    def measured(tokens: int) -> dict[str, float]:
        measured.asked.append(tokens)
        return measured.times[tokens]

    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    measured.asked = []
    measured.times = {
        1: {"union": 1.0, "dense": 2.0},
        64: {"pairs": 3.0, "union": 2.0, "dense": 1.0},
    }
    return measured


def test_a_plan_is_measured_once_and_kept(measure):
    assert str(measured_plan("model", WAYS, measure)) == "1 union, 2+ dense"
    assert measure.asked == [1, 64]  # where one way alone is, nothing is measured
    measure.times[1]["dense"] = 0.5
    assert str(measured_plan("model", WAYS, measure)) == "1 union, 2+ dense"  # another process
    assert measure.asked == [1, 64]
    assert str(measured_plan("another", WAYS, measure)) == "1+ dense"


def test_what_was_measured_among_others_is_no_plan(measure):
    measured_plan("model", WAYS, measure)
    measured_plan("model", WAYS | {1: ["dense", "union"]}, measure)
    assert measure.asked == [1, 64, 1, 64]


@pytest.mark.parametrize("entry", [[], {}, {"plan": 3}, {"plan": "best"}, {"plan": "1+ fast"}])
def test_a_kept_plan_that_makes_no_sense_is_measured_anew(measure, tmp_path, entry):
    measured_plan("model", WAYS, measure)
    file = tmp_path / "plans.json"
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: entry}))
    assert str(measured_plan("model", WAYS, measure)) == "1 union, 2+ dense"
    assert measure.asked == [1, 64, 1, 64]
    assert json.loads(file.read_text())[key]["plan"] == "1 union, 2+ dense"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '"text"', "[" * 200_000])
def test_a_file_that_makes_no_sense_is_written_anew(measure, tmp_path, content):
    (tmp_path / "plans.json").write_text(content)
    measured_plan("model", WAYS, measure)
    assert "of 1 union, dense; 64" in (tmp_path / "plans.json").read_text()


def test_plans_of_several_processes_are_all_kept(measure, tmp_path):
    """Each reads what is kept, measures and writes: none writes over what another one did."""

    def make_some(first: int) -> None:
        for number in range(first, first + 20):
            measured_plan(f"model {number}", {1: ["a", "b"]}, lambda tokens: {"a": 1.0, "b": 2.0})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make_some, range(0, 80, 20)))
    assert len(json.loads((tmp_path / "plans.json").read_text())) == 80


def test_where_memory_was_short_nothing_is_kept(measure, tmp_path):
    measure.times[64]["dense"] = math.inf
    assert str(measured_plan("model", WAYS, measure)) == "1-64 union, 65+ dense"
    assert not (tmp_path / "plans.json").exists()


def test_of_what_is_as_fast_the_first_is_taken():
    assert fastest({"a": 1.004, "b": 1.0}) == "a"
    assert fastest({"a": 1.009, "b": 1.0, "c": 1.0}) == "b"
    assert fastest({"a": math.inf, "b": 1.0}) == "b"


# ---- the stop-watch ----


@pytest.fixture
def play(monkeypatch):
    """`play(times)` measures runs by name; an empty list does not fit into memory."""
    timed = []

    def measured(times: dict[str, list[float]], **how) -> dict[str, float]:
        left = {name: iter(of_name) for name, of_name in times.items()}

        def run(name: str) -> float:
            if not times[name]:
                raise torch.OutOfMemoryError("too large")
            return next(left[name])

        timed.clear()
        return twell_choice.measure_by_turns(
            {name: lambda name=name: run(name) for name in times}, **how
        )

    def gpu_ms(run) -> float:
        timed.append(run)
        return run()

    monkeypatch.setattr(twell_choice, "gpu_ms", gpu_ms)
    measured.timed = timed
    return measured


@pytest.mark.parametrize(("ms", "warm"), [(0.01, 16), (4.5, 7), (31.0, 2), (100.0, 2)])
def test_runs_take_turns_after_some_that_are_not_timed(play, ms, warm):
    """And their medians count."""
    noisy = [9e9] + [ms] * warm + [90, 1, 2, 3, 4, 5, 80]
    steady = [9e9] + [ms] * warm + [4.5] * 7
    assert play({"noisy": noisy, "steady": steady}) == {"noisy": 4, "steady": 4.5}
    assert len(play.timed) == 2 * (warm + 7)
    assert play.timed[0] is not play.timed[1]
    assert play.timed[0] is play.timed[2]


def test_what_does_not_fit_takes_for_ever(play):
    assert play({"large": [], "small": [1.0] * 40}) == {"large": math.inf, "small": 1.0}
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        play({"large": [], "larger": []})


def test_what_is_prepared_is_timed(play):
    def prepared(run):
        run()
        return lambda: 7.0

    assert play({"run": [1.0]}, prepared=prepared) == {"run": 7.0}


# ---- of an FFN ----


SIZES = Sizes(64, 96, (False, False))


@pytest.fixture
def on_an_h200(monkeypatch, tmp_path) -> SimpleNamespace:
    """As on an H200: dense products take longest; `.ran`: (name, M) of each run."""
    played = SimpleNamespace(ran=[], inputs=[], made=twell_measured._made_up)

    def run_way(way, here, x, ffn, slots, dense) -> None:
        played.ran.append((way.name, len(x)))
        played.inputs.append((x, ffn, slots, dense))

    def measure(runs):
        for run in runs.values():
            run()
        return {name: len(runs) + (name == "dense") - i / 10 for i, name in enumerate(runs)}

    for name, taken in {
        "device_limits": lambda index: H200,
        "kernels_for": lambda sources, index: None,
        "run_way": run_way,
        "measure_by_turns": measure,
        "_made_up": lambda sizes, density, device, M: played.made(
            sizes, density, torch.device("cpu"), M
        ),
    }.items():
        monkeypatch.setattr(twell_measured, name, taken)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return played


def test_all_ways_of_a_route_are_measured_at_each_top(on_an_h200):
    plan = plan_of_ffn(SIZES, 0.05, 8, GPU, "sources", "auto", most=200)
    assert str(plan) == "1-64 union, 65+ lists"
    few, walked = ["union", "dense"], ["pairs", "union", "dense"]
    by_top = {1: few, 2: few, 3: few} | dict.fromkeys((4, 8, 16, 32, 64), walked)
    by_top |= {128: ["lists", "dense"], 256: ["lists", "dense"]}
    assert on_an_h200.ran == [(name, top) for top in by_top for name in by_top[top]]
    on_an_h200.ran.clear()
    assert plan_of_ffn(SIZES, 0.051, 8, GPU, "sources", "auto", most=200) == plan  # as kept
    assert on_an_h200.ran == []
    plan_of_ffn(SIZES, 0.05, 8, GPU, "sources", "twell", most=4)
    assert on_an_h200.ran == [("pairs", 4), ("union", 4)]  # others are alone


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_made_up_weights_fire_as_profiled(on_an_h200, kind, biases):
    made = Sizes(128, 512, biases, kind)
    plan_of_ffn(made, 0.03, 8, GPU, "sources", "auto", most=300, dense=lambda x: ("of x", len(x)))
    x, ffn, slots, dense = on_an_h200.inputs[-1]
    assert (x.shape, x.dtype) == ((512 if kind == "bf16" else 64, 128), torch.bfloat16)
    assert (slots, dense) == (8, ("of x", len(x)))
    assert [tuple(w.values.shape) for w in ffn.weights] == [(512, 128)] * 2 + [(128, 512)]
    assert [w.bias is not None for w in ffn.weights] == [biases[0], *biases]
    assert ffn.by_neurons.is_contiguous()
    assert torch.equal(ffn.by_neurons.t().float(), ffn.down.values.float())
    assert gated_ffn(x, ffn).isfinite().all()
    gate = ffn.gate.values.float() * (1 if ffn.gate.scales is None else ffn.gate.scales)
    bias = None if ffn.gate.bias is None else ffn.gate.bias.float()
    fired = (F.linear(x.float(), gate, bias) > 0).float().mean()
    assert fired == pytest.approx(0.03, rel=0.25)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_ffns_that_never_or_always_fire_are_measured_too(on_an_h200, density):
    plan_of_ffn(SIZES, density, 8, GPU, "sources", "auto", most=1)
    x, ffn, *_ = on_an_h200.inputs[-1]
    assert all(tensor.isfinite().all() for tensor in (x, *(w.values for w in ffn.weights)))


# ---- of a model ----


@pytest.fixture
def model(monkeypatch, relu_body):
    """A model over TwELL whose layers fire at 2 and 4 %; `.planned`: what was asked for."""
    relu_body.planned = []

    def plan(*asked) -> WayPlan:
        relu_body.planned.append(asked)
        return WayPlan.parse("1-64 union, 65+ dense")

    monkeypatch.setattr(twell_model, "plan_of_ffn", plan)
    monkeypatch.setattr(twell_model, "_takes_kernels", lambda ffn: True)
    put_over_twell(relu_body, {"tile": 256, "slots": [8, 16], "densities": [0.02, 0.04]})
    use_kernels(relu_body, "sources")
    return relu_body


@pytest.fixture
def relu_body() -> LlamaForCausalLM:
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(hidden_act="relu", **sizes, **heads))


def test_layers_of_the_same_sizes_go_by_one_plan(model):
    """For the mean of their densities, and the most slots."""
    plan_ways(model)
    (asked,) = model.planned
    sizes, density, *rest = asked
    first, *_ = ffns = twell_model.gated_ffns(model)
    assert sizes == twell_model.sizes_of(first)
    assert density == pytest.approx(0.03)
    assert rest == [16, torch.device("cpu"), "sources", "auto"]
    assert {ffn.twell_plan for ffn in ffns} == {"1-64 union, 65+ dense"}


def test_layers_of_other_sizes_have_plans_of_their_own(model):
    first, second = twell_model.gated_ffns(model)
    for name in ("gate_proj", "up_proj"):
        linear = getattr(second, name)
        setattr(second, name, nn.Linear(linear.in_features, 2 * linear.out_features, bias=False))
    second.down_proj = nn.Linear(2 * first.down_proj.in_features, first.down_proj.out_features)
    plan_ways(model)
    assert [asked[1:3] for asked in model.planned] == [(0.02, 8), (0.04, 16)]


@pytest.mark.parametrize("why", ["route", "density", "kernels", "variable", "memory"])
def test_where_nothing_is_measured_the_rule_stays(model, monkeypatch, why):
    ffns = twell_model.gated_ffns(model)
    for ffn in ffns:
        ffn.twell_plan = "1+ union"  # of another device
        if why == "route":
            ffn.twell_route = "dense"
        if why == "density":
            ffn.twell_density = None
    if why == "kernels":
        monkeypatch.setattr(twell_model, "_takes_kernels", lambda ffn: False)
    if why == "variable":
        monkeypatch.setenv("TWELL_ROUTE", "dense")
    if why == "memory":

        def short(*asked):
            raise torch.OutOfMemoryError("too large")

        monkeypatch.setattr(twell_model, "plan_of_ffn", short)
    plan_ways(model)
    assert model.planned == []
    assert {ffn.twell_plan for ffn in ffns} == {""}


def test_a_model_goes_by_its_plan(model, monkeypatch):
    plan_ways(model)
    given = []

    def sparse_ffn(x, ffn, *, plan: str, route: str, **numbers):
        given.append((plan, route))
        return x

    monkeypatch.setattr(twell_model, "sparse_ffn", sparse_ffn)
    (ffn, _) = twell_model.gated_ffns(model)
    assert isinstance(ffn, TwellFFN)
    ffn(torch.zeros(1, ffn.down_proj.out_features))
    assert given == [("1-64 union, 65+ dense", "auto")]


def test_on_a_cpu_nothing_is_measured(relu_body):
    put_over_twell(relu_body, {"tile": 256, "slots": [8, 8], "densities": [0.02, 0.02]})
    use_kernels(relu_body, "sources")
    plan_ways(relu_body)
    assert {ffn.twell_plan for ffn in twell_model.gated_ffns(relu_body)} == {""}
