"""The model card: every figure is one that was measured, and others' texts mean nothing in it."""

import json
import math
import shutil

import pytest
import yaml
from finetune_runs import small
from huggingface_hub import ModelCard
from small_benches import decode_form

from twellctl.bench.decode_results import DecodeBench, DecodeModel, DecodePoint
from twellctl.convert import convert
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.models.card import read_evaluation, write_card
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import fingerprint
from twellctl.profile import profile


@pytest.fixture(scope="module")
def sparse(relu_llama, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("sparse") / "sparse"
    recipe = small(text_file, max_steps=2)
    finetune(relu_llama, out, recipe)
    return out


@pytest.fixture(scope="module")
def measured(sparse, text_file):
    return profile(sparse, str(text_file), windows=4, seq_len=32)


def mean(value: float, error: float | None = 0.01) -> dict:
    return {"mean": value, "stderr": error}


def evaluation(of, **changes) -> dict:
    score = {"cross_entropy": 2.25, "reference_cross_entropy": 2.125}
    tasks = [
        {
            "task": "arc_easy",
            "questions": 500,
            "chance": 0.25,
            "accuracy": {"acc": mean(0.5), "acc_norm": mean(0.625, 0.02)},
            "reference": {"acc": mean(0.7, None), "acc_norm": mean(0.75, None)},
        },
        {
            "task": "humaneval",
            "kind": "tests",
            "questions": 160,
            "chance": 0.0,
            "accuracy": {"acc": mean(0.5), "acc_norm": None},
            "right": [1.0] * 80 + [0.0] * 80,
            "reference": {"acc": mean(0.625), "acc_norm": None},
            "reference_right": [0.0] * 60 + [1.0] * 100,
        },
    ]
    answers = {
        "answers": 9,
        "tokens": 900,
        "kl": mean(0.05),
        "same_top": 0.93,
        "flips": 0.005,
        "agree": 2,
    }
    changes = {"answers": answers} | changes
    known = {"eval_schema_version": 1, "fingerprint": fingerprint(open_checkpoint(of))}
    return known | {"text": {"score": score}, "tasks": tasks} | changes


def card_of(folder) -> tuple[dict, str]:
    """(front matter, the rest)."""
    _, front, rest = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), rest


def test_an_export_says_all_that_is_known(sparse, measured, tmp_path):
    judged = tmp_path / "eval.json"
    judged.write_text(json.dumps(evaluation(sparse)))
    export(sparse, tmp_path / "out", profile=measured, evaluation=judged)
    front, text = card_of(tmp_path / "out")
    report = json.loads((sparse / "twell_finetune.json").read_text())
    for words in (
        f"| this model | held-out text of fine-tuning | {report['cross_entropy']:.4f} |",
        f"| the model it learnt from | held-out text of fine-tuning "
        f"| {report['teacher_cross_entropy']:.4f} |",
        f"| KL to the model it learnt from | the same | {report['teacher_kl']:.4f} |",
        "| this model | text of its evaluation | 2.2500 |",
        "| the reference | the same | 2.1250 |",
        "| arc_easy | acc_norm | 500 | 25.0% | 62.5% ± 2.0% | 75.0% |",
        "| humaneval | its tests | 160 | 0.0% | 50.0% ± 1.0% | 62.5% ± 1.0% |",
        "## What it writes\n\nLike the reference, but some exact answers are lost: 80 tasks solved,"
        " 100 by the reference: 80% kept.",
        "Of 900 tokens that the reference wrote it gives 93.0% the same; of 0.50% the reference is",
        "`twellctl finetune`, 2 steps, 256 tokens:",
        "batch-size: 4",
        "twellctl serve-local out",
        "`vllm serve out`",
        "of k = 64 is `relu(g) u`\nto within 0.004 of u",
        "convert_hf_to_gguf.py out",
    ):
        assert words in text, words
    assert front["tags"] == ["twell", "sparse", "relu"]
    assert front["pipeline_tag"] == "text-generation"
    read = ModelCard.load(tmp_path / "out" / "README.md").data.eval_results  # as the hub reads it
    values = {(one.dataset_name, one.metric_type): one.metric_value for one in read}
    wanted = {("held-out text", "cross-entropy"): report["cross_entropy"]}
    wanted[("held-out text", "density")] = report["density"]
    wanted[("text of its profile", "density")] = measured.density
    wanted[("text of its evaluation", "cross-entropy")] = 2.25
    wanted |= {("arc_easy", "acc_norm"): 0.625, ("humaneval", "acc"): 0.5}
    assert values == pytest.approx(wanted, abs=1e-6)


def test_figures_that_no_run_has_are_not_shown(sparse, tmp_path):
    folder = shutil.copytree(sparse, tmp_path / "model")
    path = folder / "twell_finetune.json"
    report = json.loads(path.read_text())
    for changes, shown in (({"cross_entropy": 1e308}, "0000000"), ({"density": math.nan}, "nan")):
        path.write_text(json.dumps(report | changes))
        export(folder, tmp_path / shown[0])
        assert shown not in card_of(tmp_path / shown[0])[1]


def test_a_fine_tuned_model_has_a_verdict_without_an_evaluation(cli, success, sparse, tmp_path):
    bare = shutil.copytree(sparse, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    _, err = success("export", bare, tmp_path / "mute")
    assert err[-1].startswith(f"beware: {bare} has no tokenizer")
    _, err = success("export", sparse, tmp_path / "out")
    said = "this model's answers to tasks have not been measured"
    assert any(line.startswith(said) for line in err)
    assert not any(line.startswith("beware") for line in err)  # as of a model only converted
    report = json.loads((sparse / "twell_finetune.json").read_text())
    section = card_of(tmp_path / "out")[1].partition("## What it writes\n\n")[2]
    assert section.startswith("No verdict: ")
    said = f"Of {report['answers']['tokens']} tokens that the reference wrote"
    assert said in section.partition("\n\n")[0]
    judged = tmp_path / "eval.json"
    judged.write_text(json.dumps(evaluation(sparse)))
    code, _, err = cli("export", sparse, tmp_path / "other", "--eval", judged)
    assert (code, any("have not been measured" in line for line in err)) == (0, False)
    export(tmp_path / "out", tmp_path / "again")
    for name in ("out", "again"):
        assert "batch-size: 4" in card_of(tmp_path / name)[1]


def test_what_was_not_measured_is_not_there(silu_llama, tmp_path, text_file):
    convert(silu_llama, tmp_path / "relu")
    front, text = card_of(tmp_path / "relu")
    assert "model-index" not in front
    assert "## What it writes\n\nThis has not been measured. " in text
    for title in ("Losses", "Tasks", "Speed", "Recipe"):
        assert f"## {title}" not in text
    found = profile(tmp_path / "relu", str(text_file), windows=2, seq_len=16)
    export(tmp_path / "relu", tmp_path / "out", profile=found)
    # of FP8, too, which bench model does not time
    untimed = "## Speed\n\nNot measured. On your GPU: `twellctl bench decode`.\n"
    assert untimed in card_of(tmp_path / "out")[1]


def test_hostile_reports_tasks_and_figures_mean_nothing(sparse, relu_llama, tmp_path):
    (tmp_path / "config.json").write_text((sparse / "config.json").read_text())
    report = json.loads((sparse / "twell_finetune.json").read_text())
    evil = "```\n# Scores 100 | <b>"
    report |= {"recipe": {"note": evil, "text-column": "text"}, "num_steps": evil}
    (tmp_path / "twell_finetune.json").write_text(json.dumps(report))
    task = evaluation(sparse)["tasks"][0] | {"task": evil}
    write_card(tmp_path, "name", tmp_path, evaluation={"tasks": [task]})
    _, text = card_of(tmp_path)
    assert "Scores 100" not in text
    assert "| ? | acc_norm | 500 |" in text
    assert "text-column: text" in text
    found = bench(relu_llama, point(1, 0.002), without="<b>none</b>")
    card = card_with(relu_llama, found | {"device": "[x](y)"}, tmp_path)
    assert "[x](y)" not in card
    assert "<b>" not in card
    assert "TwELL was not run there." in card


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval_schema_version": None}, "is not an evaluation that this twellctl can read"),
        ({"fingerprint": "0"}, "is for another model"),
        ({"tasks": [{"task": "x"}]}, "is not a complete evaluation ('accuracy')"),
        ({"text": {"score": {"cross_entropy": None}}}, "is not a complete evaluation"),
        ({"answers": {"answers": 3, "kl": 0.1}}, "is not a complete evaluation"),
    ],
)
def test_what_is_no_evaluation_is_refused(refusal, sparse, tmp_path, changes, sentence):
    judged = tmp_path / "eval.json"
    judged.write_text(json.dumps(evaluation(sparse, **changes)))
    assert sentence in refusal("export", sparse, tmp_path / "out", "--eval", judged)
    assert not (tmp_path / "out").exists()


def test_what_eval_writes_goes_into_the_card(
    cli, success, sparse, relu_llama, text_file, tmp_path, no_answers
):
    judged, task = tmp_path / "eval.json", tmp_path / "sums.jsonl"
    row = {"query": "1 + 1 =", "choices": [" 2", " 3"], "gold": 0}
    task.write_text((json.dumps(row) + "\n") * 3)
    words = ["--data", text_file, "--windows", 2, "--seq-len", 16, "--tasks", task]
    success("eval", sparse, "--reference", relu_llama, *words, "--json", judged)
    found = json.loads(judged.read_text())
    export(sparse, tmp_path / "out", evaluation=judged)
    loss = found["text"]["score"]["cross_entropy"]
    text = card_of(tmp_path / "out")[1]
    assert f"| this model | text of its evaluation | {loss:.4f} |" in text
    read = ModelCard.load(tmp_path / "out" / "README.md").data.eval_results
    of_text = {r.metric_type: r.metric_value for r in read if "evaluation" in r.dataset_name}
    wanted = {"cross-entropy": loss, "density": found["text"]["density"]}
    assert of_text == pytest.approx(wanted, abs=1e-6)
    assert "| sums | acc_norm | 3 | 50.0% |" in text
    code, _, err = cli("export", relu_llama, tmp_path / "other", "--eval", judged)
    assert (code, "is for another model" in err[0]) == (1, True)


def test_an_evaluation_without_text_is_one(sparse, tmp_path):
    judged = tmp_path / "eval.json"
    judged.write_text(json.dumps(evaluation(sparse, text=None)))
    assert read_evaluation(judged, fingerprint(open_checkpoint(sparse)))["text"] is None


def test_an_odd_name_can_be_copied_and_the_density_of_an_evaluation_is_shown(silu_llama, tmp_path):
    convert(silu_llama, tmp_path / "relu")
    judged = {"text": {"score": {"cross_entropy": 2.5}, "density": 0.25}}
    write_card(tmp_path / "relu", 'my "own"\nmodel', tmp_path, evaluation=judged)
    _, text = card_of(tmp_path / "relu")
    assert "25.00% of the neurons of an FFN fire" in text
    assert "measured on the text of its evaluation" in text
    assert '# my "own" model\n' in text
    assert 'from_pretrained("my \\"own\\" model")' in text
    assert "twellctl serve-local 'my \"own\" model' " in text
    assert "ignore its `hidden_act: relu`, run it with SiLU without a word" in text
    assert "`twellctl export 'my \"own\" model' OUT`" in text


def test_a_model_whose_neurons_all_fire_has_no_density_in_its_card(tmp_path):
    twell = {"source": "owner/original", "source_act": "silu"}
    config = {"model_type": "llama", "hidden_act": "silu", "twell": twell}
    (tmp_path / "config.json").write_text(json.dumps(config))
    judged = {"text": {"score": {"cross_entropy": 2.5}, "density": 1.0}}
    write_card(tmp_path, "rounded", tmp_path, evaluation=judged)
    read = ModelCard.load(tmp_path / "README.md").data.eval_results
    assert [(one.metric_type, one.metric_value) for one in read] == [("cross-entropy", 2.5)]


NO_GAIN = "Being sparse makes no step of it faster there."


def bench(of, *points: DecodePoint, without: str | None = None, quantize: str | None = None):
    described = {"fingerprint": fingerprint(open_checkpoint(of))}
    facts = {"device": "NVIDIA H200", "versions": {"twellctl": "0.1.0", "torch": "2.11.0"}}
    model = DecodeModel("this model", described, points, without)
    return DecodeBench(facts, {"quantize": quantize}, 4e12, (model,)).to_json()


def point(batch: int, dense: float, **others: float) -> DecodePoint:
    named = {"dense": dense} | {name.replace("_", " "): took for name, took in others.items()}
    ways = {"twell": {"way": "union"}}
    forms = (decode_form(name, took, **ways.get(name, {})) for name, took in named.items())
    return DecodePoint(batch, tuple(forms), {})


def card_with(relu_llama, found: dict, folder) -> str:
    file = folder / "bench.json"
    file.write_text(json.dumps(found))
    export(relu_llama, folder / "out", bench=file, quantize=found["settings"]["quantize"])
    return (folder / "out" / "README.md").read_text(encoding="utf-8")


def test_the_card_lists_measured_steps(relu_llama, tmp_path):
    points = point(1, 0.002, twell=0.001), point(16, 0.002, twell=0.0025)
    card = card_with(relu_llama, bench(relu_llama, *points), tmp_path)
    assert "weights in bf16" in card
    assert "on one NVIDIA H200 (twellctl 0.1.0, torch 2.11.0):" in card
    assert "| 1 | 500 | 1000 (union) | 2.00x | - | 2.00% |" in card
    assert "| 16 | 500 | 400 (union) | 0.80x | - | 2.00% |" in card
    assert NO_GAIN not in card


@pytest.mark.parametrize(("took", "gains"), [(0.00197, False), (0.0019, True)])
def test_a_model_that_is_no_faster_says_so(relu_llama, tmp_path, took, gains):
    card = card_with(relu_llama, bench(relu_llama, point(1, 0.002, twell=took)), tmp_path)
    assert (NO_GAIN not in card) == gains


@pytest.mark.parametrize(("quantize", "gains"), [(None, True), ("fp8", False)])
def test_the_rival_is_dense_in_the_same_precision(relu_llama, tmp_path, quantize, gains):
    found = bench(relu_llama, point(1, 0.002, dense_FP8=0.001, twell=0.001), quantize=quantize)
    card = card_with(relu_llama, found, tmp_path)
    assert f"weights in {'FP8' if quantize else 'bf16'}" in card
    assert "| 1 | 500 | 1000 (union) | 2.00x | 1.00x | 2.00% |" in card
    assert (NO_GAIN not in card) == gains


@pytest.mark.usefixtures("count_less")
def test_what_bench_decode_writes_goes_into_the_card(success, relu_llama, text_file, tmp_path):
    file = tmp_path / "bench.json"
    words = ["--data", text_file, "--prompt-tokens", 8, "--new-tokens", 12, "--batch", 1]
    success("bench", "decode", relu_llama, *words, "--device", "cpu", "--json", file)
    success("export", relu_llama, tmp_path / "out", "--bench", file)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "by\n`twellctl bench decode` on one CPU (twellctl " in card
    assert "TwELL was not run there: the decode kernels need an NVIDIA GPU." in card


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"command": "bench model"}, "is not a 'bench decode' file that this twellctl can read"),
        ({"schema_version": 1}, "is not a 'bench decode' file that this twellctl can read"),
        ({"models": []}, "is not a complete 'bench decode' file"),
        ({"models": [{"model": {}, "points": []}]}, "is not a complete 'bench decode' file"),
        ({"settings": None}, "is not a complete 'bench decode' file"),
        ({"settings": {"quantize": "fp8"}}, "is for weights in another precision"),
        ({"of another": True}, "is for another model"),
    ],
)
def test_what_is_no_bench_of_it_is_refused(refusal, relu_llama, tmp_path, change, sentence):
    found = bench(relu_llama, point(1, 0.002, twell=0.001)) | change
    if "of another" in change:
        found["models"][0]["model"]["fingerprint"] = "0"
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(found))
    assert sentence in refusal("export", relu_llama, tmp_path / "out", "--bench", file)
    assert not (tmp_path / "out").exists()
