"""What bench decode judges and reports: tokens, floors, sentences, JSON."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from history_decoder import HistoryDecoder, expected
from shapes import write_config
from small_benches import decode_form
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from twellctl.bench import decode_runs as runs
from twellctl.bench.decode_floors import screened_gate, step_bytes
from twellctl.bench.decode_judge import judge
from twellctl.bench.decode_results import DecodeBench, DecodeModel, DecodePoint
from twellctl.bench.decode_runs import timed_run
from twellctl.bench.random_model import make_model, open_shape, round_to_int4
from twellctl.bundle.twell_model import gated_ffns
from twellctl.decoding.engine import EngineError
from twellctl.decoding.pages import PagePool
from twellctl.decoding.scheduler import Scheduler
from twellctl.firing.counts import fired_meter
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama of which a third of the neurons fire, float32."""
    generator = torch.Generator().manual_seed(0)
    file = write_config(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, vocab_size=1000)
    shape = open_shape(file, None, context=256)
    return make_model(shape, 0.3, dtype=torch.float32, generator=generator)


# ---- the judge ----


def test_the_judge_counts_what_fires_in_the_last_steps(tiny):
    torch.manual_seed(0)
    prompts, tokens = torch.randint(1000, (3, 5)).tolist(), torch.randint(1000, (3, 8)).tolist()
    found = judge(tiny, prompts, tokens, 4)
    seen: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad(), fired_meter(tiny, lambda i, _, active: seen[i].append(active[-4:] != 0)):
        for prompt, made in zip(prompts, tokens, strict=True):
            tiny(torch.tensor([prompt + made[:-1]]))
    fired = torch.stack([torch.stack(rows) for rows in seen]).float()  # [L, rows, steps, N]
    assert found.densities == pytest.approx(fired.mean((1, 2, 3)).tolist())
    assert found.unions == pytest.approx(fired.amax(1).mean((1, 2)).tolist())
    assert found.most_alike[1] == pytest.approx(1 - (1 - found.densities[0]) ** 3, rel=0.2)


def test_the_judge_knows_greedy_tokens_from_others(tiny):
    prompt = [1, 2, 3]
    ids = torch.tensor([prompt])
    made = tiny.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert judge(tiny, [prompt], [made], 3).shortfall < 1e-4
    for place in (0, 5):
        other = [(token + 1) % 1000 if i == place else token for i, token in enumerate(made)]
        assert judge(tiny, [prompt], [other], 3).shortfall > 0.5


def test_a_judge_of_nan_says_so(tiny):
    model = copy.deepcopy(tiny)
    model.lm_head.weight[7] = torch.nan
    assert not judge(model, [[1], [2]], [[3, 4], [5, 6]], 2).shortfall <= 1


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_dense_form_of_a_fitted_model_has_no_map(family):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 100}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, hidden_act="relu")
    model = AutoModelForCausalLM.from_config(config)
    model.config.twell = {"map_neurons": 32}
    cut, ids = runs.without_map(model), torch.arange(9)[None]
    kept = {id(parameter) for parameter in model.parameters()}
    assert sum(id(parameter) in kept for parameter in cut.parameters()) > 10
    for ffn in gated_ffns(model):
        ffn.down_proj.weight.data[:, -32:] = 0
    torch.testing.assert_close(cut(ids).logits, model(ids).logits)
    assert (cut.config.intermediate_size, model.config.intermediate_size) == (160, 192)
    assert cut.config.twell == {}
    assert runs.without_map(cut) is cut


# ---- floors ----


def test_what_screened_gates_read():
    assert screened_gate(0.14, 0.1, 0.1) == pytest.approx(0.14 + 4.5 / 16)
    # two tokens that have nothing to do with each other
    assert screened_gate(0.14, 0.1, 0.19) == pytest.approx(1 - 0.86**2 + 4.5 / 16)


@pytest.mark.parametrize("tied", [False, True])
def test_the_floor_of_a_step(tied):
    """1.5B as in the issue: 3.08 GB dense; of what is tied the embeddings are the head."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=1000,
        hidden_act="relu",
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attention, norms = 64 * (64 + 32 + 32 + 64), 2 * 64
    others = 3 * (attention + norms) + 64 + 1000 * 64 + (0 if tied else 5 * 64)
    dense = others + 3 * 3 * 64 * 192
    assert step_bytes(model, None, 5) == 2 * dense
    sparse = others + 64 * 192 * (3 + 2 * (0.5 + 0.25 + 0.0))
    assert step_bytes(model, (0.5, 0.25, 0.0), 5) == 2 * sparse
    screened = sparse - 64 * 192 * 3 * 0.5
    assert step_bytes(model, (0.5, 0.25, 0.0), 5, gate=0.5) == 2 * screened
    model.config.twell = {"map_neurons": 64}  # which are read whole, but for the gate
    own = 3 * 128 * 0.5 + 2 * 128 * (0.5 + 0.25 + 0.0)
    assert step_bytes(model, (0.5, 0.25, 0.0), 5, gate=0.5) == 2 * (others + 64 * (own + 3 * 128))
    model.config.twell = None
    in_int4 = copy.deepcopy(model)
    round_to_int4(in_int4)  # in groups of 64
    per_weight, of_layers = 0.5 + 2 / 64, 3 * attention + 3 * 3 * 64 * 192
    assert step_bytes(in_int4, None, 5) == 2 * dense
    of_head = 1000 * (64 + 8)  # in 8 bits, with scales and errors
    whole = 2 * dense - (2 - per_weight) * of_layers - 2 * 1000 * 64 + of_head
    assert step_bytes(in_int4, None, 5, in_int4=True) == whole
    skipped = per_weight * 64 * 192 * 2 * (0.5 + 0.75 + 1)
    assert step_bytes(in_int4, (0.5, 0.25, 0.0), 5, in_int4=True) == whole - skipped
    round_model(model, SCHEMES["fp8"])
    of_layers = 3 * attention + 3 * 3 * 64 * 192
    scales = 4 * 3 * (64 + 32 + 32 + 64 + 192 + 192 + 64)
    assert step_bytes(model, None, 5) == 2 * dense - of_layers + scales
    skipped = 64 * 192 * 2 * (0.5 + 0.75 + 1)
    assert step_bytes(model, (0.5, 0.25, 0.0), 5) == 2 * dense - of_layers + scales - skipped


# ---- results ----


def bench(*points: DecodePoint, device: str = "NVIDIA H200", without: str | None = None):
    model = DecodeModel("this model", {}, points, without)
    return DecodeBench({"device": device}, {}, 4e12, (model,))


def test_the_sentence_states_ratio_and_steps():
    points = [
        DecodePoint(1, (decode_form("dense", 0.001), decode_form("twell", 0.0007)), {}),
        DecodePoint(16, (decode_form("dense", 0.001), decode_form("twell", 0.00125)), {}),
    ]
    assert bench(*points).sentences == [
        "on this GPU this model decodes 1.43x as fast as dense bf16 at batch 1 (1429 steps/s), "
        "0.80x at 16 (800)"
    ]
    with_fp8 = [
        replace(p, forms=(*p.forms[:-1], decode_form("dense FP8", 0.0006), p.forms[-1]))
        for p in points
    ]
    assert bench(*with_fp8).sentences == [
        "on this GPU this model decodes 1.43x as fast as dense bf16 and 0.86x as fast as dense FP8 "
        "at batch 1 (1429 steps/s), 0.80x and 0.48x at 16 (800)"
    ]
    said = bench(DecodePoint(1, (decode_form("dense", 0.001),), {}), device="CPU", without="no GPU")
    assert said.sentences == [
        "on this CPU this model decodes at 1000 steps/s at batch 1 in its dense form; TwELL and "
        "dense FP8 were not run: no GPU"
    ]


@pytest.mark.parametrize("shortfall", [0.3, float("nan")])
def test_wrong_tokens_are_reported_and_never_break_the_json(shortfall):
    wrong = decode_form("twell", 0.1, shortfall=shortfall)
    point = DecodePoint(1, (decode_form("dense", 0.1), wrong), {})
    (words,) = bench(point).wrong
    assert words.startswith("twell chose a token ")
    json.dumps(bench(point).to_json())
    assert bench(DecodePoint(1, (decode_form("dense", 0.1, shortfall=0.2),), {})).wrong == []
    unjudged = DecodePoint(1, (decode_form("dense", 0.1, shortfall=None),), {})
    assert unjudged.wrong == []
    assert unjudged.to_json()["forms"]["dense"]["shortfall"] is None
    fp8 = [decode_form("dense FP8", 0.1, shortfall=shortfall) for shortfall in (0.4, 0.6)]
    (words,) = bench(DecodePoint(1, tuple(fp8), {})).wrong
    assert words.endswith("below the likeliest at batch 1, where rounding explains 0.5")


# ---- steps that are timed


class Timed(HistoryDecoder):
    """A step takes a second of the clock in its `now`; nothing else does."""

    now = 0.0

    def run(self, tokens, positions, tables, last=1, **how):
        self.now += 1
        return super().run(tokens, positions, tables, last, **how)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_each_step_of_all_prompts_is_timed(count, monkeypatch):
    decoder = Timed()
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: decoder.now))
    prompts = [[i] * 40 for i in range(count)]
    eos = frozenset(expected(prompts[0], 3))
    scheduler = Scheduler(decoder, PagePool(40), 6, eos)
    run = timed_run(scheduler, prompts, 20)
    assert run.tokens == [expected(prompt, 20) for prompt in prompts]
    assert scheduler.eos_tokens == eos
    # first tokens come with the prompts, and rows that came first are a few steps ahead at last
    assert 16 <= len(run.step_seconds) <= 19
    assert set(run.step_seconds) == {1}
    assert scheduler.admission.pool.free == scheduler.admission.pool.capacity


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(EngineError, match="2 prompts can be continued at once, got 3"):
        timed_run(Scheduler(HistoryDecoder(), PagePool(40), 2, frozenset()), [[1], [2], [3]], 5)


def test_a_failure_is_raised():
    with pytest.raises(EngineError, match="there is room for"):
        timed_run(Scheduler(HistoryDecoder(), PagePool(4), 2, frozenset()), [[1]], 500)
