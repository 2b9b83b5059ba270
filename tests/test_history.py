"""metrics.jsonl: the history of a run, whole while it runs, after a stop, and at the end."""

import json

import pytest
import torch
from finetune_runs import InterruptAt, Watching, small
from transformers import AutoModelForCausalLM

from twellctl.errors import UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.training.recipe import check_report_to, run_folder

pytestmark = pytest.mark.usefixtures("no_answers")


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
        "step", "tokens", "loss", "teacher_kl", "held_out", "held_out_kl", "held_out_density",
        "density", "density_by_layer", "price", "tokens_per_second", "learning_rate", "seconds",
    }  # fmt: skip
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
def test_a_tracker_that_is_not_there_is_told_first(refusal, tmp_path, name, said):
    words = ["finetune", "no/such/model", tmp_path / "out", "--data=none.txt", "--report-to", name]
    for more in ([], ["--dry-run"]):
        assert said in refusal(*words, *more, code=2)
    with pytest.raises(UsageError):
        check_report_to(name)
    check_report_to("none")
    check_report_to("all")
