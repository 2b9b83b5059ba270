"""bench decode on the CPU: tiny models and FFNs, its floors, its JSON, and what it refuses."""

import copy
import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from shapes import FAMILIES, TINY_CONFIG, write_config
from small_benches import BothForms, count_less, decode_form
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from twellctl.bench import decode as module
from twellctl.bench import decode_runs as runs
from twellctl.bench.decode import bench_decode
from twellctl.bench.decode_floors import (
    copy_bandwidth,
    ffn_bytes,
    screened_gate,
    step_bytes,
)
from twellctl.bench.decode_judge import judge
from twellctl.bench.decode_results import DecodeBench, DecodeModel, DecodePoint
from twellctl.bench.random_model import make_model, open_shape
from twellctl.bench.settings import DecodeSettings
from twellctl.bundle.twell_model import gated_ffns
from twellctl.decoding.hf_decoder import HFDecoder
from twellctl.decoding.lone_decoder import LoneDecoder
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.firing.counts import FiredMeter
from twellctl.models.quantised import round_model
from twellctl.profile import profile

TINY = {
    "batches": (1, 3), "prompt_tokens": 16, "new_tokens": 15, "config": TINY_CONFIG,
    "device": "cpu", "densities": (0.02,),
}  # fmt: skip
NO_GPU = "the decode kernels need an NVIDIA GPU"
NO_FP8 = "FP8 products need an NVIDIA GPU of compute capability 8.9 or newer"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _less(monkeypatch):
    count_less(monkeypatch)


@pytest.fixture
def both_forms(monkeypatch):
    monkeypatch.setattr(runs, "KernelDecoder", BothForms)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama of which a third of the neurons fire, float32."""
    generator = torch.Generator().manual_seed(0)
    file = write_config(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, vocab_size=1000)
    shape = open_shape(file, None, context=256)
    return make_model(shape, 0.3, dtype=torch.float32, generator=generator)


# ---- whole models ----


def test_what_can_be_run_is_measured():
    found = bench_decode(DecodeSettings(**TINY)).to_json()
    (model,) = found["models"]
    assert model["without_twell"] == NO_GPU
    assert model["model"]["layers"] == 2
    assert [point["batch"] for point in model["points"]] == [1, 3]
    for point in model["points"]:
        assert list(point["forms"]) == ["dense"]
        assert point["skipped"] == {}
        for form in point["forms"].values():
            assert form["steps"] == 12
            assert form["ms_p10"] <= form["ms"] <= form["ms_p90"]
            assert form["steps_per_second"] == pytest.approx(1000 / form["ms"])
            assert form["tokens_per_second"] == pytest.approx(
                point["batch"] * form["steps_per_second"]
            )
            assert form["density"] == pytest.approx(0.02, rel=0.5)
            assert 0 <= form["shortfall"] < 0.1
            assert form["of_floor"] == pytest.approx(
                form["steps_per_second"] / form["floor_steps_per_second"]
            )
    (said,) = found["sentences"]
    assert said.startswith("on this CPU this model (random, 2 layers, ")
    assert said.endswith(f" in its dense form; TwELL and dense FP8 were not run: {NO_GPU}")
    json.dumps(found, allow_nan=False)


def test_twell_is_measured_against_the_dense_form(both_forms):
    found = bench_decode(DecodeSettings(**TINY | {"densities": (0.02, 0.1)}))
    assert found.wrong == []
    assert [model.described["density_asked"] for model in found.models] == [0.02, 0.1]
    for model in found.to_json()["models"]:
        assert model["without_twell"] is None
        one, three = model["points"]
        for point in (one, three):
            assert list(point["forms"]) == ["dense", "twell"]
            assert point["skipped"] == {"dense FP8": NO_FP8}
            twell, dense = point["forms"]["twell"], point["forms"]["dense"]
            assert twell["over_dense"] == pytest.approx(dense["ms"] / twell["ms"])
            assert dense["over_dense"] == 1
            assert dense["chosen"] is None
            assert twell["chosen"] == ("union" if point is three else None)
            assert twell["floor_bytes"] < dense["floor_bytes"]
            # the same tokens: float noise apart they fire alike
            assert twell["density"] == pytest.approx(dense["density"], rel=0.05)
        assert one["forms"]["twell"]["union"] == pytest.approx(one["forms"]["twell"]["density"])
        assert three["forms"]["twell"]["union"] > 2 * one["forms"]["twell"]["density"]
    said = found.sentences[0]
    assert "x as fast as dense bf16 at batch 1 (" in said
    assert "x at 3 (" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_a_config_is_measured(cli, family, tmp_path):
    words = ("--config", write_config(tmp_path, family), "--layers", 2)
    words += ("--prompt-tokens", 16, "--new-tokens", 15, "--batch", 2, "--density", 0.05)
    code, out, err = cli("bench", "decode", *words, "--device", "cpu", "--json", "-")
    assert code == 0, err
    (model,) = json.loads(out)["models"]
    kv_heads = FAMILIES[family].get("num_key_value_heads", 4)
    about = {"name": words[1], "type": family, "hidden_size": 128, "intermediate_size": 256}
    about |= {"layers": 2, "heads": 4, "kv_heads": kv_heads, "vocabulary": 2048}
    assert {key: model["model"][key] for key in about} == about
    assert model["model"]["density_asked"] == 0.05
    (point,) = model["points"]
    assert list(point["forms"]) == ["dense"]
    assert point["forms"]["dense"]["density"] == pytest.approx(0.05, rel=0.25)
    assert 0 <= point["forms"]["dense"]["shortfall"] < 0.1


def test_a_model_that_does_not_fit_is_told_before_it_is_made(monkeypatch):
    """The engine may hold W_down a second time."""
    monkeypatch.setattr(module, "free_memory", lambda device: 5e9)
    with pytest.raises(
        TwellError, match=r"Llama with 28 layers needs 8 GB, .* --layers \d or fewer"
    ):
        bench_decode(DecodeSettings(**TINY | {"config": None}))


def test_one_model_is_gone_before_the_next_is_made(monkeypatch):
    made, alive = [], []

    def watched(*shape, **how):
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        model = make_model(*shape, **how)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(module, "make_model", watched)
    short = {"batches": (1,), "densities": (0.02, 0.1)}
    bench_decode(DecodeSettings(**TINY | short))
    assert alive == [0, 0]


def test_a_form_that_chooses_other_tokens_is_told(cli, both_forms, monkeypatch):
    class Wrong(BothForms):
        def __init__(self, model, sparse: bool = True, gates: str = "whole"):
            super().__init__(model)
            self._sparse = sparse

        def step(self, *inputs):
            logits, fired = super().step(*inputs)
            return logits.roll(1, -1) if self._sparse else logits, fired

    monkeypatch.setattr(runs, "KernelDecoder", Wrong)
    words = ("--config", TINY_CONFIG, "--prompt-tokens", 16, "--new-tokens", 15, "--batch", 2)
    words += ("--density", 0.02)
    code, out, err = cli("bench", "decode", *words, "--device", "cpu")
    assert code == 1
    assert "(union)" in out  # the form that the engine chose
    assert "twell chose a token" in err[-1]
    assert "standard deviations of the logits below the likeliest at batch 2" in err[-1]


def test_the_dense_form_may_not_fail(monkeypatch):
    def fail(*inputs, **settings):
        raise ValueError("no such cache\nat all")

    monkeypatch.setattr(HFDecoder, "step", fail)
    with pytest.raises(TwellError, match="dense failed at batch 1: ValueError: no such cache"):
        bench_decode(DecodeSettings(**TINY))


def test_rows_that_are_alike_are_refused(monkeypatch):
    drawn = torch.randint

    def alike(high, size, **more):
        made = drawn(high, size, **more)
        return made[:1].expand(size).contiguous() if size[1] == 16 else made

    monkeypatch.setattr(torch, "randint", alike)
    with pytest.raises(TwellError, match=r"the 3 rows of a step fire only .*: so little is not"):
        bench_decode(DecodeSettings(**TINY))


def test_an_export_is_measured_on_real_prompts(cli, relu_llama, text_file, tmp_path):
    measured = profile(relu_llama, [str(text_file)], windows=4, seq_len=32)
    export(relu_llama, tmp_path / "export", profile=measured)
    words = ("--data", text_file, "--prompt-tokens", "32", "--new-tokens", "20", "--batch", "2")
    words += ("--device", "cpu")
    code, out, err = cli("bench", "decode", tmp_path / "export", *words, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert found["command"] == "bench decode"
    assert found["bandwidth_gb_s"] > 0
    (point,) = found["models"][0]["points"]
    assert point["forms"]["dense"]["density"] == pytest.approx(measured.density, rel=0.3)
    assert found["sentences"][0].startswith("on this CPU this model (")
    code, out, _ = cli("bench", "decode", tmp_path / "export", *words)
    assert code == 0
    assert "batch 2; medians of 16 steps; floor in steps/s" in out
    assert out.splitlines()[-1].endswith(NO_GPU)


def test_one_sequence_at_a_time_is_told(make_model, text_file, monkeypatch):
    monkeypatch.setattr(runs, "open_decoder", LoneDecoder)
    model = str(make_model("llama", hidden_act="relu"))
    settings = TINY | {"config": None, "model": model, "data": (str(text_file),)}
    assert bench_decode(DecodeSettings(**settings | {"batches": (1,)})).models[0].points
    with pytest.raises(UsageError, match=r"batch must be 1 to 1 for .*model, got 3"):
        bench_decode(DecodeSettings(**settings))


def test_bad_calls_are_refused(cli, relu_llama, silu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(HFDecoder, "prefill_chunk", 16)  # a prompt is read alone
    short = tmp_path / "short.txt"
    short.write_text("def f(): pass\n" * 4)
    for settings, sentence in [
        ({"model": str(relu_llama)}, "give --data FILE with it, or neither"),
        ({"batches": (0,)}, "batch must be >= 1 and <= 64, got 0"),
        ({"batches": (1, 65)}, "batch must be >= 1 and <= 64, got 65"),
        ({"prompt_tokens": 0}, "prompt-tokens must be >= 1, got 0"),
        ({"new_tokens": 9}, "new-tokens must be >= 10, got 9"),
        ({"layers": 0}, "layers must be >= 1"),
        ({"new_tokens": 2500}, "must be 2048 at most together, the context, got 16 and 2500"),
        (
            {"model": str(relu_llama), "data": (str(text_file),)},
            "config is of a random model: leave out MODEL and --data, or --config",
        ),
        ({"densities": (0.0,)}, "density must be > 0"),
        (
            {"batches": (64,), "densities": (0.3,)},
            "new-tokens must be more for 64 rows, of 15 steps all went together in 0",
        ),
    ]:
        with pytest.raises(UsageError, match=sentence):
            bench_decode(DecodeSettings(**TINY | settings))
    real = TINY | {"config": None, "data": (str(text_file),)}
    with pytest.raises(TwellError, match="is a SiLU model"):
        bench_decode(DecodeSettings(**real | {"model": str(silu_llama)}))
    long = real | {"model": str(relu_llama), "new_tokens": 250}
    with pytest.raises(UsageError, match="must be 256 at most together, the context, got 16 and"):
        bench_decode(DecodeSettings(**long))
    little = real | {"data": (str(short),), "model": str(relu_llama), "batches": (64,)}
    with pytest.raises(TwellError, match=r"prompts of 16 tokens, not 64: give more text"):
        bench_decode(DecodeSettings(**little))


def test_without_a_gpu_only_the_cpu_is_tried(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("decode", "model"):
        code, out, err = cli("bench", command)
        assert (code, out, len(err)) == (1, "", 1)
        assert "torch finds none here (see twellctl doctor); --device cpu runs tiny" in err[0]


# ---- the judge ----


def test_the_judge_counts_what_fires_in_the_last_steps(tiny):
    torch.manual_seed(0)
    prompts, tokens = torch.randint(1000, (3, 5)).tolist(), torch.randint(1000, (3, 8)).tolist()
    found = judge(tiny, prompts, tokens, 4)
    seen: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad(), FiredMeter(tiny, lambda i, _, active: seen[i].append(active[-4:] != 0)):
        for prompt, made in zip(prompts, tokens, strict=True):
            tiny(torch.tensor([prompt + made[:-1]]))
    fired = torch.stack([torch.stack(rows) for rows in seen]).float()  # [L, rows, steps, N]
    assert found.densities == pytest.approx(fired.mean((1, 2, 3)).tolist())
    assert found.unions == pytest.approx(fired.amax(1).mean((1, 2)).tolist())
    assert found.most_alike.expected == pytest.approx(1 - (1 - found.densities[0]) ** 3, rel=0.2)


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


def test_the_floor_of_an_ffn():
    assert ffn_bytes(2048, 5632, 2) == 3 * 2048 * 5632 * 2
    assert ffn_bytes(2048, 5632, 2, 0.0) == 2048 * 5632 * 2
    assert ffn_bytes(1000, 200, 4, 0.25) == 1000 * 200 * 4 * 1.5


@pytest.mark.parametrize("tied", [False, True])
def test_the_floor_of_a_step(tied):
    """1.5B as in the issue: 3.08 GB dense; of what is tied the embeddings are the head."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=1000, hidden_act="relu", tie_word_embeddings=tied,
    )  # fmt: skip
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
    round_model(model)
    of_layers = 3 * attention + 3 * 3 * 64 * 192
    scales = 4 * 3 * (64 + 32 + 32 + 64 + 192 + 192 + 64)
    assert step_bytes(model, None, 5) == 2 * dense - of_layers + scales
    skipped = 64 * 192 * 2 * (0.5 + 0.75 + 1)
    assert step_bytes(model, (0.5, 0.25, 0.0), 5) == 2 * dense - of_layers + scales - skipped


def test_copies_have_a_bandwidth():
    assert 1e8 < copy_bandwidth(torch.device("cpu")) < 1e13


# ---- results ----


def bench(*points: DecodePoint, device: str = "NVIDIA H200", without: str | None = None):
    model = DecodeModel("this model", {}, points, without)
    return DecodeBench({"device": device}, {}, 4e12, (model,))


def test_the_sentence_tells_ratio_and_steps():
    points = [
        DecodePoint(
            1,
            (
                decode_form("dense", 0.001),
                decode_form("twell", 0.0007),
            ),
            {},
        ),
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
def test_wrong_tokens_are_told_and_never_break_the_json(shortfall):
    point = DecodePoint(
        1, (decode_form("dense", 0.1), decode_form("twell", 0.1, shortfall=shortfall)), {}
    )
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


def test_json_holds_everything():
    point = DecodePoint(
        2, (decode_form("dense", 0.001), decode_form("twell", 0.0005)), {"dense FP8": "no"}
    )
    saved = bench(point).to_json()
    assert (saved["schema_version"], saved["bandwidth_gb_s"]) == (1, 4000)
    (told,) = saved["models"][0]["points"]
    assert told["skipped"] == {"dense FP8": "no"}
    assert set(told["forms"]["twell"]) == {
        "kind", "chosen", "steps_per_second", "tokens_per_second", "ms", "ms_p10", "ms_p90",
        "steps", "over_dense", "over_fp8", "density", "union", "shortfall", "floor_bytes",
        "floor_steps_per_second", "of_floor",
    }  # fmt: skip
    assert told["forms"]["twell"]["over_dense"] == 2
    assert told["forms"]["twell"]["over_fp8"] is None
    beside = replace(point, forms=(*point.forms, decode_form("dense FP8", 0.0004)))
    assert beside.to_json()["forms"]["twell"]["over_fp8"] == 0.8
    assert told["forms"]["twell"]["tokens_per_second"] == 4000
    assert told["forms"]["twell"]["of_floor"] == 1
