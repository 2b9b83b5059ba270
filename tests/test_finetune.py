"""finetune as users run it: results, adapters, dtypes, several processes."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edits import weights_in
from finetune_runs import SMALL, InterruptAt, Watching, assert_same_weights, small, weights
from transformers import AutoModelForCausalLM, masking_utils

from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.models.loading import MASKLESS
from twellctl.screens.make import finetuned
from twellctl.text.blocks import Blocks
from twellctl.training import build, trainer
from twellctl.training.progress import Progress
from twellctl.training.recipe import check_report_to, resolve_recipe, run_folder

pytestmark = pytest.mark.usefixtures("no_answers")


def test_result_is_a_stock_relu_model(uninterrupted, relu_llama):
    out = uninterrupted.out
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_act"] == "relu"
    before = json.loads((relu_llama / "config.json").read_text())["twell"]
    assert config["twell"] == before
    model = AutoModelForCausalLM.from_pretrained(out)
    assert not torch.equal(model.lm_head.weight, weights(relu_llama)["lm_head.weight"])
    assert oct((out / "model.safetensors").stat().st_mode)[-3:] == "644"
    assert resolve_recipe(out / "recipe.yaml").max_steps == 12
    assert not run_folder(out).exists()
    assert uninterrupted.cross_entropy < uninterrupted.first_cross_entropy
    assert 0 < uninterrupted.density < 1


def test_it_ends_with_what_its_answers_are_worth(uninterrupted, relu_llama, capsys):
    answers = uninterrupted.answers
    assert answers.answers >= 1
    assert answers.kl.mean > 0
    assert answers.tokens <= 32 * answers.answers  # no longer than a block
    report = json.loads((uninterrupted.out / "twell_finetune.json").read_text())
    assert report["answers"]["kl"]["mean"] == answers.kl.mean
    finetuned(uninterrupted)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"{uninterrupted.out}: {answers.verdict}"
    held_out = next(line for line in others if line.startswith("held-out cross-entropy: "))
    assert re.fullmatch(r"[^:]+: teacher [\d.]+, this model [\d.]+; KL to the .*", held_out)


@pytest.mark.parametrize("lora_ffn", [False, True])
def test_lora_is_merged(relu_llama, text_file, tmp_path, lora_ffn):
    recipe = small(text_file, lora_rank=8, lora_ffn=lora_ffn, l1=0.05, l1_schedule="constant")
    finetune(relu_llama, tmp_path / "out", recipe)
    before, after = weights(relu_llama), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in before.items():
        trained = "proj" in name
        assert torch.equal(tensor, after[name]) != trained, name
    gate = "model.layers.0.mlp.gate_proj.weight"
    change = after[gate] - before[gate]
    rank = torch.linalg.matrix_rank(change, rtol=1e-4).item()
    assert rank <= 8 if lora_ffn else rank > 8


def test_lora_interrupted_and_resumed(relu_llama, text_file, tmp_path):
    recipe = small(text_file, lora_rank=4, gradient_checkpointing=True, max_steps=3)
    finetune(relu_llama, tmp_path / "whole", recipe)
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "out", recipe, progress=InterruptAt(2))
    finetune(relu_llama, tmp_path / "out", recipe, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "out")


def test_dtype_and_tied_weights_stay(make_model, text_file, tmp_path):
    source = make_model("llama", tie_word_embeddings=True)
    stored = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    stored.save_pretrained(source)
    convert(source, tmp_path / "relu")
    for dtype in ("float32", "bfloat16"):
        recipe = small(text_file, param_dtype=dtype, max_steps=2)
        finetune(tmp_path / "relu", tmp_path / dtype, recipe)
        saved = weights(tmp_path / dtype)
        assert {t.dtype for t in saved.values()} == {torch.bfloat16}
        assert saved.keys() == weights(source).keys()
        assert "lm_head.weight" not in saved


def test_what_tensorboard_wrote_stays(relu_llama, text_file, tmp_path):
    def board(trainer):
        (Path(trainer.args.output_dir) / "runs").mkdir()
        (Path(trainer.args.output_dir) / "runs" / "events").write_text("1")

    recipe = small(text_file, max_steps=1)
    finetune(relu_llama, tmp_path / "out", recipe, progress=Watching(board))
    assert (tmp_path / "out" / "runs" / "events").read_text() == "1"


def test_two_processes_speak_with_one_voice(processes, relu_llama, text_file, tmp_path):
    out, short = tmp_path / "out", SMALL | {"max_steps": 3}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in short.items()]
    words = ["finetune", relu_llama, out, f"--data={text_file}", *flags, "--lora-rank=2"]
    ends = processes("command", 2, *map(str, words))
    codes, stdout, stderr = ([each[i] for each in ends] for i in range(3))
    assert codes == [0, 0], stderr
    assert "".join(stdout).count("next: twellctl profile") == 1
    assert "step 3/3" in stderr[0]
    assert "Warning" not in "".join(stderr)
    assert not run_folder(out).exists()


def test_two_processes_fail_together(processes, relu_llama, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("one two three")
    words = ["finetune", relu_llama, tmp_path / "out", f"--data={text}", "--seq-len=32"]
    ends = processes("command", 2, *map(str, words))
    assert [code for code, *_ in ends] == [1, 1]
    said = [line for *_, err in ends for line in err.splitlines() if line.startswith("error: ")]
    assert said
    assert all("fewer than one batch" in line for line in said), said
    assert sorted(tmp_path.iterdir()) == [text]


def test_weights_stored_without_the_models_prefix_are_all_saved(make_model, text_file, tmp_path):
    source = make_model("llama", tie_word_embeddings=True)
    with weights_in(source) as stored:
        for name in list(stored):
            stored[name.removeprefix("model.")] = stored.pop(name)
    convert(source, tmp_path / "relu")
    recipe = small(text_file, max_steps=1, learning_rate=1e-9, penalty="l1")
    finetune(tmp_path / "relu", tmp_path / "out", recipe)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "relu").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)


def test_a_batch_is_read_as_its_items_are():
    blocks = Blocks(np.arange(40, dtype=np.int32).reshape(10, 4), np.array([7, 2, 5]))
    batch = blocks.__getitems__([2, 0])["input_ids"]
    assert batch.tolist() == [[20, 21, 22, 23], [28, 29, 30, 31]]
    assert torch.equal(blocks[2]["input_ids"], batch[0])
    assert batch.dtype == torch.int64


def test_no_forward_asks_whether_a_mask_is_needed(relu_llama, text_file, tmp_path, monkeypatch):
    def asked(position_ids):
        raise AssertionError("the host would wait for the GPU")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked)
    recipe = small(text_file, max_steps=2)
    finetune(relu_llama, tmp_path / "out", recipe)
    assert MASKLESS not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")


def test_steps_that_cannot_be_recorded_are_taken_as_ever(
    uninterrupted, relu_llama, text_file, tmp_path, monkeypatch
):
    def refuse(*given):
        raise RuntimeError("not permitted\nwhen stream is capturing")

    notes, progress = [], Progress()
    progress.note = notes.append
    monkeypatch.setattr(build, "_captures", lambda recipe: True)
    monkeypatch.setattr(trainer, "CapturedPart", refuse)
    out = finetune(relu_llama, tmp_path / "out", small(text_file), progress=progress).out
    assert "steps are slower, because no CUDA graph is recorded: not permitted" in notes
    assert_same_weights(out, uninterrupted.out)


@pytest.mark.parametrize("ends", [True, False])
def test_no_recorded_part_is_left(relu_llama, text_file, tmp_path, ends):
    """Also where a run fails: a process that has one left would not end."""
    trainers = []

    def recorded(trainer, state):
        trainers.append(trainer)
        trainer._captured = SimpleNamespace(takes=lambda *given: False)
        if not ends:
            raise TwellError("it went wrong")

    recipe = small(text_file, max_steps=2)
    with contextlib.nullcontext() if ends else pytest.raises(TwellError, match="it went wrong"):
        finetune(relu_llama, tmp_path / "out", recipe, progress=Watching(step=recorded))
    assert trainers[0]._captured is None


def test_a_run_that_diverged_is_no_success(relu_llama, text_file, tmp_path):
    changes = {"optimizer": "adamw", "learning_rate": 1.0, "eval_steps": 12}
    recipe = small(text_file, l1_schedule="constant", **changes)
    with pytest.raises(TwellError, match=r"diverged: .* from 7\.7\d to .*, guessing has 6\.24"):
        finetune(relu_llama, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


# ---- metrics.jsonl: whole while it runs, after a stop, and at the end


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open(encoding="utf-8")]


@pytest.fixture(scope="module")
def whole(relu_llama, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    return finetune(relu_llama, out, small(text_file, logging_steps=2))


def test_what_it_holds(whole):
    found = rows(whole.out)
    assert [row["step"] for row in found] == [0, 2, 4, 5, 6, 8, 10, 12]
    assert [row["step"] for row in found if "held_out" in row] == [0, 5, 10, 12]
    last = found[-1]
    assert set(last) == {
        "step",
        "tokens",
        "loss",
        "teacher_kl",
        "held_out",
        "held_out_kl",
        "held_out_density",
        "density",
        "density_by_layer",
        "price",
        "tokens_per_second",
        "learning_rate",
        "seconds",
    }
    assert (last["tokens"], last["held_out"]) == (12 * 4 * 32, whole.cross_entropy)
    assert last["held_out_density"] == whole.density
    assert last["held_out_kl"] == whole.teacher_kl
    assert found[0]["held_out"] == whole.first_cross_entropy
    assert sum(last["density_by_layer"]) / 2 == pytest.approx(last["density"])
    assert last["tokens_per_second"] > 0
    seconds = [row["seconds"] for row in found]
    assert seconds == sorted(seconds)
    rates = [row["learning_rate"] for row in found if "learning_rate" in row]
    assert max(rates) <= 3e-3
    assert rates[-1] < rates[0]


@pytest.mark.parametrize("share", [1.0, 0.25])  # of the loss
def test_held_out_kl_is_that_to_the_teacher(silu_llama, relu_llama, text_file, tmp_path, share):
    held_out = []
    progress = Watching(lambda t: held_out.extend(block["input_ids"] for block in t.eval_dataset))
    recipe = small(text_file, max_steps=1, teacher_weight=share)
    finetune(relu_llama, tmp_path / "out", recipe, progress=progress)
    with torch.no_grad():
        q, p = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.stack(held_out))
            .logits[:, :-1]
            .log_softmax(-1)
            for folder in (silu_llama, relu_llama)
        )
    wanted = (q.exp() * (q - p)).sum(-1).mean().item()
    assert wanted > 1e-6
    assert rows(tmp_path / "out")[0]["held_out_kl"] == pytest.approx(wanted, rel=1e-3)


def test_without_a_teacher_there_is_no_kl(relu_llama, text_file, tmp_path):
    recipe = small(text_file, max_steps=1, teacher="none")
    done = finetune(relu_llama, tmp_path / "out", recipe)
    assert done.teacher_kl is None
    assert all("held_out_kl" not in row for row in rows(tmp_path / "out"))


def same(row: dict) -> dict:
    return {k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}


def test_a_resumed_run_repeats_nothing(whole, relu_llama, text_file, tmp_path):
    """Killed after step 7, with steps behind the checkpoint and a line that was cut short."""
    out, recipe = tmp_path / "out", small(text_file, logging_steps=2)
    with pytest.raises(Interrupted):
        finetune(relu_llama, out, recipe, progress=InterruptAt(6))
    file = run_folder(out) / "metrics.jsonl"
    assert [row["step"] for row in rows(run_folder(out))] == [0, 2, 4, 5, 6]
    with file.open("a") as more:
        more.write('{"step": 7, "loss": 1.0}\n{"step": 8')
    done = finetune(relu_llama, out, recipe, resume=True)
    assert [same(row) for row in rows(out)] == [same(row) for row in rows(whole.out)]
    seconds = [row["seconds"] for row in rows(out)]
    assert seconds == sorted(seconds)
    assert done.cross_entropy == whole.cross_entropy


def test_it_can_be_read_while_the_run_goes_on(relu_llama, text_file, tmp_path):
    seen, out = [], tmp_path / "out"
    progress = Watching(step=lambda *given: seen.append(len(rows(run_folder(out)))))
    finetune(relu_llama, out, small(text_file, max_steps=3, eval_steps=0), progress=progress)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dvclive", "report-to dvclive: dvclive is not installed: pip install dvclive"),
        ("tensorbord", "'tensorbord' is unknown: take one of azure_ml,"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_first(refusal, tmp_path, name, said):
    words = ["finetune", "no/such/model", tmp_path / "out", "--data=none.txt", "--report-to", name]
    for more in ([], ["--dry-run"]):
        assert said in refusal(*words, *more, code=2)
    with pytest.raises(UsageError):
        check_report_to(name)
    check_report_to("none")
    check_report_to("all")
