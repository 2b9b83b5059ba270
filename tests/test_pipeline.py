"""run: which steps are taken, what is refused before the first one, and where it stops.

That a killed one goes on is in test_killed.py.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import typer
from edits import weights_in
from typer.main import get_command

from twellctl.cli.app import app
from twellctl.cli.pipeline import _flags, _Pipeline, _record, _words
from twellctl.errors import TwellError
from twellctl.evaluation.results import Evaluation
from twellctl.heads.folder import WEIGHTS
from twellctl.models.verdict import Verdict
from twellctl.text.written import hold_out

pytestmark = pytest.mark.usefixtures("no_answers")

STEPS = """
model: {model}
out: {out}
convert: {{}}
eval: {{data: {text}, windows: 1, seq-len: 16}}
profile: {{data: [{text}], windows: 1, seq-len: 16}}
export:
"""


@pytest.fixture
def pipe(cli, silu_llama, text_file, tmp_path):
    """`pipe(steps, *flags)`: (exit code, stdout, stderr) of a file of these steps."""

    def run(steps: str = STEPS, *flags: str):
        steps = steps.format(model=silu_llama, out=tmp_path / "out", text=text_file)
        (tmp_path / "run.yaml").write_text(steps)
        return cli("run", tmp_path / "run.yaml", *flags)

    return run


def test_what_is_there_is_not_made_again_and_a_bad_verdict_stops(pipe, tmp_path, monkeypatch):
    out = tmp_path / "out"
    freed = []
    monkeypatch.setattr("twellctl.here.gpu_memory.free_unused", lambda: freed.append(1))
    code, _, err = pipe(STEPS, "--keep-going")
    assert (code, len(freed)) == (0, 4)  # a step each
    assert f"export: twellctl export {out}/relu {out}/exported" in "\n".join(err)
    made = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    made_by_steps = {"relu", "eval.json", "profile.json", "exported"}
    assert {*made} == made_by_steps | {"run.json", "report.html"}
    card = (out / "exported/README.md").read_text()
    assert "How many of its neurons fire has not been measured" not in card
    _, _, err = pipe(STEPS, "--keep-going")
    assert [line.split(":")[0] for line in err] == [
        *("convert", "eval", "profile", "export", "report")
    ]
    assert made == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}

    monkeypatch.setattr(Evaluation, "verdict", Verdict(3, 0.7, "many are lost", "so"))
    for name in ("eval.json", "profile.json"):
        (out / name).unlink()
    shutil.rmtree(out / "exported")
    code, _, err = pipe()
    assert (code, err[-1]) == (
        1,
        "error: many are lost (so): convert at a higher density or on more text, or continue with "
        "--keep-going",
    )
    assert not (out / "profile.json").exists()

    monkeypatch.setattr(Evaluation, "verdict", Verdict(None, None, "no verdict", "so"))
    (out / "eval.json").unlink()
    code, _, err = pipe()
    assert code == 0
    assert "eval: no verdict (so): whether the model is good enough is not known" in err


def test_values_of_steps_mean_what_they_say():
    """Switches, numbers, many values and mappings; what run sets by default is replaced."""
    settings = {
        "prompts": "p.json",
        "tokens": "2e6",
        "overwrite": False,
        "chat-template-kwargs": {"enable_thinking": False},
    }
    commands = get_command(app).commands
    assert list(_flags("write", settings, commands["write"])) == [
        "--prompts=p.json",
        "--tokens=2e6",
        '--chat-template-kwargs={"enable_thinking": false}',
    ]
    settings = {"overwrite": True, "compile": False, "data": ["a", "b"], "density": 0.1}
    wanted = ["--overwrite", "--no-compile", "--data=a", "--data=b", "--density=0.1"]
    assert list(_flags("finetune", settings, commands["finetune"])) == wanted
    words, given = _words("eval", "base", Path("o"), {"eval": {"reference": "other"}})
    assert (words, given) == (["base", "--json=o/eval.json"], {"reference": "other"})


def test_other_settings_are_no_reason_to_skip(pipe, tmp_path):
    assert pipe(STEPS.split("profile")[0], "--keep-going")[0] == 0
    code, _, err = pipe(STEPS.replace("windows: 1", "windows: 2"))
    said = "was made with other settings or inputs (eval): remove it, or name another out"
    assert (code, err) == (2, [f"error: {tmp_path}/out/eval.json {said}"])
    (tmp_path / "out/eval.json").unlink()
    assert pipe(STEPS.replace("windows: 1", "windows: 2"), "--keep-going")[0] == 0
    for step in ("revision: main", "text-column: text"):  # of a step before it
        assert pipe(STEPS.replace("convert: {{}}", f"convert: {{{{{step}}}}}"))[0] == 2
    (tmp_path / "out/run.json").write_text("{")
    assert pipe()[2][-1].endswith(": remove it")
    (tmp_path / "out/run.json").unlink()
    lost = f"{tmp_path}/out/run.json does not say with which settings {tmp_path}/out/relu was made"
    assert pipe()[2] == [f"error: {lost}: move it elsewhere, or name another out"]


def test_a_draft_head_is_trained_for_the_files_model(pipe, silu_llama, text_file, tmp_path):
    """Once; and what it was trained with is no matter to other steps."""
    out = tmp_path / "out"
    steps = """
model: {model}
out: {out}
convert: {{}}
draft: {{data: {text}, tokens: 2048, seq-len: 32, step-tokens: 512, epochs: 1, vocabulary: 300}}
"""
    code, said, err = pipe(steps)
    made = f"draft: twellctl draft {silu_llama} {out}/head --data={text_file} --tokens=2048"
    assert code == 0
    assert [line for line in err if line.startswith(made)]
    assert f"next: twellctl serve-local {out}/head --exact --original {silu_llama}" in said
    recorded = json.loads((out / "run.json").read_text())
    assert {*recorded["draft"]} == {"settings", "files", "result"}
    assert "draft" not in recorded["convert"]["settings"]
    assert re.search(r"draft head\b.*?\b\d+ tokens", (out / "report.html").read_text(), re.DOTALL)

    trained = (out / "head" / WEIGHTS).stat().st_mtime_ns
    code, _, err = pipe(steps)
    assert (code, err[0]) == (0, f"draft: {out}/head is there")
    assert (out / "head" / WEIGHTS).stat().st_mtime_ns == trained
    said = "was made with other settings or inputs (draft): remove it, or name another out"
    assert pipe(steps.replace("epochs: 1", "epochs: 2"))[2] == [f"error: {out}/head {said}"]
    (out / "head" / WEIGHTS).write_bytes(b"")
    said = "is not what draft made, or damaged: remove it, or name another out"
    assert pipe(steps)[2][-1] == f"error: {out}/head {said}"


def test_an_export_depends_on_what_it_reads():
    steps = {name: {"a": name} for name in ("write", "draft", "convert", "eval", "export")}
    assert [*_record("export", steps)] == ["write", "convert", "eval", "export"]
    assert [*_record("draft", steps)] == ["write", "draft"]
    assert [*_record("eval", steps)] == ["write", "convert", "eval"]


def test_other_files_are_no_reason_to_skip(pipe, text_file, tmp_path):
    out, text = tmp_path / "out", tmp_path / "text.jsonl"
    shutil.copy(text_file, text)
    steps = STEPS.split("profile")[0].replace("{text}", str(text))
    assert pipe(steps, "--keep-going")[0] == 0
    with weights_in(out / "relu") as tensors:
        tensors["model.norm.weight"][0] += 1
    said = f"error: {out}/relu is not what convert made, or damaged: remove it, or name another out"
    assert pipe(steps)[2] == [said]
    shutil.rmtree(out / "relu")
    assert pipe(steps, "--keep-going")[2][-2] == f"eval: {out}/eval.json is there"
    text.write_text(text_file.read_text().replace("import", "export", 1))
    said = "was made with other settings or inputs (data): remove it, or name another out"
    assert pipe(steps)[2][-1] == f"error: {out}/eval.json {said}"
    shutil.copy(text_file, text)
    (out / "eval.json").write_text('{"verdict": {}}')
    assert pipe(steps)[2][-1].startswith(f"error: {out}/eval.json is not what eval made, or dam")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("model: {model}", "must have model and out, got "),
        (STEPS + "fit: {{}}", "'fit' is not one of model, out, write, draft, convert"),
        (STEPS + "finetune: 3", "finetune must hold flags of its command, got 3"),
        (STEPS + "finetune: {{taget-sparsity: 0.9}}", "No such option: --taget-sparsity"),
        (STEPS + "write: {{prompts: [a, 2001-01-01]}}", "prompts of write must be text"),
        (STEPS + "write: &all {{prompts: *all}}", "prompts of write must be text"),
        (STEPS + "write: {{prompts: [[a]]}}", "or a list of these, got [['a']]"),
        (STEPS + "write: {{temperature: .nan}}", "or a list of these, got nan"),
        (STEPS + 'write: {{prompts: ["\\ud800"]}}', "or a list of these, got ['\\ud800']"),
        (STEPS.replace("{out}", "{text}"), "exists and is not a folder: name another out"),
        (STEPS + "write: {{prompts:}}", "or a list of these, got None"),
        (STEPS + "write: {{tokens: many}}", "Invalid value for '--tokens'"),
        (STEPS + "write: {{help: true}}", "help of write is not for a file of run: remove it"),
        (STEPS + "finetune: {{resume: true}}", "resume of finetune is not for a file of run"),
        (STEPS.replace("seq-len: 16}}\np", "seq-len: 16, json: a}}\np"), "json of eval is not for"),
        (STEPS.replace("convert: {{}}", "convert: {{dry-run: true}}"), "dry-run of convert is not"),
        (STEPS + "write: {{prompts: [a, b]}}", "--prompts is given twice: keep one"),
        (STEPS + "write: {{prompts: {{a: b}}}}", "prompts of write must be text, a number"),
        (STEPS + "write: {{prompts: a, tokens: 010}}", "YAML takes '010' for another number"),
        (STEPS + "finetune: {{teacher: no}}", "teacher of finetune takes a value, got false: give"),
        (STEPS + "finetune: {{steps: true}}", "No such option: --steps"),
        (STEPS + "finetune: {{max-steps: true}}", "max-steps of finetune takes a value, got true"),
        (STEPS + "finetune: {{no-compile: false}}", "No such option: --no-no-compile"),
        (
            STEPS + "write: {{prompts: a, chat-template-kwargs: {{a: 2001-01-01}}}}",
            "chat-template-kwargs of write must be text",
        ),
        (
            STEPS.replace("convert: {{}}", "convert: {{bits: 4}}") + "finetune: {{}}",
            "finetune does not take what convert makes with bits: remove one of them",
        ),
        (
            STEPS.replace("convert: {{}}", "convert: {{bits: 4, keep-activation: true}}"),
            "profile does not take what convert makes with keep-activation: remove one",
        ),
        (
            STEPS.replace("export:", "finetune: {{}}\nexport: {{with-original: true}}"),
            "export does not take what finetune makes with-original: remove one of them",
        ),
        (STEPS + "out: b", "line 8 gives out more than once: keep one"),
        (
            STEPS + "write:\n tokens: 1\n tokens: 2",
            "run.yaml is not valid YAML: line 10 gives tokens",
        ),
        ("- a", "must hold 'key: value' lines"),
    ],
)
def test_wrong_files_are_refused_before_the_first_step(pipe, tmp_path, steps, said):
    code, _, err = pipe(steps)
    assert code in (1, 2)
    assert len(err) == 1
    assert said in err[0]
    assert not (tmp_path / "out").exists()


def test_measures_are_taken_on_answers_that_no_model_was_made_from(tmp_path):
    """All answers to one of 16 prompts; a run that is killed in between goes on."""
    answers, held_out = tmp_path / "answers.jsonl", tmp_path / "held-out.jsonl"
    steps = {"write": {}, "draft": {}, "convert": {}, "finetune": {}, "eval": {}, "profile": {}}
    data = {name: _words(name, "m", tmp_path, steps)[1].get("data") for name in steps}
    assert data["draft"] == data["convert"] == data["finetune"] == str(answers)
    assert data["eval"] == data["profile"] == str(held_out)
    chats = [[{"content": str(n % 40)}, {"content": f"{n}\u2028"}] for n in range(80)]
    whole = "".join(
        json.dumps({"messages": chat}, ensure_ascii=False, separators=(",", ":")) + "\n"
        for chat in chats
    )
    answers.write_text(whole)
    hold_out(answers, held_out)
    made = answers.read_text(), held_out.read_text()
    asked = [
        {json.loads(line)["messages"][0]["content"] for line in text.split("\n")[:-1]}
        for text in made
    ]
    assert asked[1] == {"0", "16", "32"}
    assert not asked[0] & asked[1]
    assert sorted((made[0] + made[1]).split("\n")) == sorted(whole.split("\n"))
    hold_out(answers, held_out)
    assert (answers.read_text(), held_out.read_text()) == made
    answers.write_text(whole)
    hold_out(answers, held_out)
    assert (answers.read_text(), held_out.read_text()) == made
    (tmp_path / "one.jsonl").write_text(whole.split("\n")[0] + "\n")
    with pytest.raises(TwellError, match=r"holds answers to one prompt, .*: give two or more"):
        hold_out(tmp_path / "one.jsonl", tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("fitted", "measured", "said"),
    [
        ({"data": "fitted.jsonl"}, {"data": "fitted.jsonl"}, ["fitted.jsonl"]),
        ({"data": ["fitted.jsonl"]}, {"data": ["other.jsonl", "code=copy.jsonl"]}, ["copy.jsonl"]),
        ({"data": "folder"}, {"data": "fitted.jsonl"}, ["fitted.jsonl"]),
        ({"data": "fitted.jsonl"}, {"data": "folder"}, ["folder/in.jsonl"]),
        ({}, {"prompts": "asked.jsonl"}, ["asked.jsonl"]),
        ({"data": "fitted.jsonl"}, {"prompts": "asked.jsonl"}, []),
        ({"data": "fitted.jsonl"}, {"data": "other.jsonl"}, []),
        ({}, {}, []),
    ],
)
def test_figures_on_fitted_text_are_named(tmp_path, monkeypatch, capfd, fitted, measured, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("fitted", "copy", "folder/in", "other", "asked", "held-out", "answers"):
        alike = name in ("fitted", "copy", "folder/in")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "x" if alike else name}))
    steps = {"write": {"prompts": "asked.jsonl"}, "convert": fitted, "eval": measured}
    _Pipeline(typer.Context(get_command(app)), "m", Path("."), steps)._note_fitted_text()
    made_from = [
        f"eval: the model was made from {name}, so figures on it are too kind" for name in said
    ]
    assert capfd.readouterr().err.splitlines() == made_from


def test_a_run_that_would_go_on_by_other_settings_is_refused(pipe, tmp_path):
    """A run folder of finetune goes on by the settings that it has."""
    run = tmp_path / "out/sparse.run"
    run.mkdir(parents=True)
    begun = {"finetune": {"settings": {"convert": {}, "finetune": {"max-steps": 3}}, "files": {}}}
    (tmp_path / "out/run.json").write_text(json.dumps(begun))
    steps = "model: {model}\nout: {out}\nconvert:\nfinetune: {{data: {text}}}\n"
    code, _, err = pipe(steps)
    said = "was made with other settings or inputs (finetune): remove it, or name another out"
    assert (code, err) == (2, [f"error: {run} {said}"])
