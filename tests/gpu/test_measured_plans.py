"""Plans that are measured when a model is opened, or before an engine serves: nothing is later."""

import pytest
import torch
from ffns import ffn_of
from on_gpu import on_e4m3

from twellctl.bundle import twell_measured
from twellctl.bundle.twell_cache import PLANS, kept_json
from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_config import TILE
from twellctl.bundle.twell_dense import gated_ffn, rounded_weight
from twellctl.bundle.twell_ffn import sparse_ffn, sparse_ffn_of_engine
from twellctl.bundle.twell_measured import Sizes
from twellctl.bundle.twell_model import gated_ffns, plan_ways, put_over_twell, use_kernels
from twellctl.bundle.twell_weights import FFN
from twellctl.here.own_kernels import own_kernels
from twellctl.vllm.plans import Layer, engines_way, plan_layers

pytestmark = pytest.mark.gpu
MADE = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16}
COUNTS = 1, 3, 24, 40, 64, 65, 100, 999, 1000


@pytest.fixture(autouse=True)
def _a_new_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TWELL_ROUTE", raising=False)


def measure_no_more(monkeypatch) -> None:
    def measure(*args):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(twell_measured, "measure_by_turns", measure)


def sizes(kind: str = "bf16") -> Sizes:
    return Sizes(256, 1024, (False, False), kind)


def planned(kind: str, dense=None) -> str:
    """The plan of one layer, or "1+ dense" where all goes densely."""
    layers = [Layer(sizes(kind), TILE, slots=16, density=0.02)]
    made = plan_layers(layers, 1000, *MADE.values(), own_kernels(), dense)
    assert "as measured" in made.how or "was measured" in made.how
    return str(made.plans.get(sizes(kind), "1+ dense"))


@torch.no_grad()
def test_a_plan_serves_all_numbers_of_tokens(monkeypatch):
    plan = planned("bf16")
    measure_no_more(monkeypatch)
    assert planned("bf16") == plan  # as kept
    weights = [torch.randn(*size, **MADE) / 16 for size in ((1024, 256), (1024, 256), (1024, 256))]
    ffn = ffn_of(*weights[:2], weights[2].t())
    for count in COUNTS:
        x = torch.randn(count, 256, **MADE)  # half of the neurons fire, unlike the profile
        y = sparse_ffn(x, ffn, sources=own_kernels(), slots=16, plan=plan)
        wanted = gated_ffn(x, ffn).float()
        assert (y - wanted).abs().max() < 0.05 * wanted.abs().max()


@on_e4m3
@torch.no_grad()
def test_a_plan_over_fp8_weights_serves_an_engine(monkeypatch):
    """Eager and captured, where the engine has its own dense FFN."""
    shapes = ((1024, 256), (1024, 256), (256, 1024))
    weights = [rounded_weight("e4m3", torch.randn(*shape, **MADE) / 16) for shape in shapes]
    ffn = FFN(*weights, weights[-1].values.t().contiguous())

    def dense(x):
        return engines_way(lambda: gated_ffn(x, ffn))

    def measurable(x):
        """Of any sizes: the weights that are measured are made up."""
        return engines_way(lambda: x)

    plan = planned("e4m3", measurable)
    measure_no_more(monkeypatch)
    how = {"tile": TILE, "slots": 16, "density": 0.02, "sources": own_kernels(), "plan": plan}

    def run(x):
        return sparse_ffn_of_engine(dense(x), x, ffn, **how)

    for count in COUNTS:
        x = torch.randn(count, 256, **MADE)
        wanted = gated_ffn(x, ffn).float()
        assert (run(x) - wanted).abs().max() < 0.1 * wanted.abs().max()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        graph.replay()
        assert (y - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_a_plan_is_of_the_fastest_ways():
    """Measured times say so: none of the others is faster by more than noise."""
    plan = WayPlan.parse(planned("bf16"))
    times = next(iter(kept_json(PLANS).values()))["ms"]
    assert {"1", "4", "64", "1024"} <= times.keys()
    for tokens, of_ways in times.items():
        assert of_ways[plan.name(int(tokens))] <= 1.01 * min(of_ways.values())


@torch.no_grad()
def test_a_model_is_planned_where_it_lies_on_a_gpu(make_llama):
    model = make_llama().to(torch.bfloat16)
    twell = {"tile": TILE, "slots": [64, 64], "densities": [0.02, 0.02]}
    put_over_twell(model, twell)
    use_kernels(model, own_kernels())
    plan_ways(model)
    assert {ffn.twell_plan for ffn in gated_ffns(model)} == {""}
    model.to(MADE["device"])
    plan_ways(model)
    (text,) = {ffn.twell_plan for ffn in gated_ffns(model)}
    assert set(WayPlan.parse(text).names) <= {"pairs", "union", "lists", "dense"}
    ids = torch.arange(40, device=MADE["device"]).view(2, 20)
    assert model(ids).logits.isfinite().all()


@pytest.fixture
def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads, hidden_act="relu"))
