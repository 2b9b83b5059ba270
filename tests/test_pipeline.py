"""run: which steps are taken, what is refused before the first one, and where it stops.

That a killed one goes on is in test_killed.py.
"""

import pytest
from edits import json_in

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


def test_what_is_there_is_not_made_again_and_a_bad_verdict_stops(pipe, tmp_path):
    out = tmp_path / "out"
    code, _, err = pipe(STEPS, "--keep-going")
    assert code == 0
    assert f"export: twellctl export {out}/relu {out}/exported" in "\n".join(err)
    made = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {*made} == {"relu", "eval.json", "profile.json", "exported", "run.json"}
    card = (out / "exported/README.md").read_text()
    assert "How many of its neurons fire has not been measured" not in card
    _, _, err = pipe(STEPS, "--keep-going")
    assert [line.split(":")[0] for line in err] == ["convert", "eval", "profile", "export"]
    assert made == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}

    with json_in(out / "eval.json") as found:
        found["verdict"] = {"step": 3, "kept": 0.7, "words": "many are lost", "because": "so"}
    (out / "profile.json").unlink()
    code, _, err = pipe()
    assert (code, err[-1]) == (
        1,
        "error: many are lost (so): convert at a higher density or on more text, or continue with "
        "--keep-going",
    )
    assert not (out / "profile.json").exists()

    with json_in(out / "eval.json") as found:
        found["verdict"] |= {"step": None, "kept": None, "words": "no verdict"}
    code, _, err = pipe()
    assert code == 0
    assert "eval: no verdict (so): whether the model is good enough is not known" in err


def test_other_settings_are_no_reason_to_skip(pipe, tmp_path):
    assert pipe(STEPS.split("profile")[0], "--keep-going")[0] == 0
    code, _, err = pipe(STEPS.replace("windows: 1", "windows: 2"))
    said = "eval.json was made with other settings: remove it, or name another out"
    assert (code, err) == (1, [f"error: {tmp_path}/out/{said}"])
    (tmp_path / "out/eval.json").unlink()
    assert pipe(STEPS.replace("windows: 1", "windows: 2"), "--keep-going")[0] == 0
    for step in ("revision: main", "text-column: text"):  # of a step before it
        assert pipe(STEPS.replace("convert: {{}}", f"convert: {{{{{step}}}}}"))[0] == 1
    (tmp_path / "out/run.json").write_text("{")
    assert pipe()[2][-1].endswith(": remove it")
    (tmp_path / "out/run.json").unlink()
    lost = f"{tmp_path}/out/run.json does not say with which settings {tmp_path}/out/relu was made"
    assert pipe()[2] == [f"error: {lost}: move it elsewhere, or name another out"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("model: {model}", "must have model and out, got "),
        (STEPS + "fit: {{}}", "'fit' is not one of model, out, write, convert"),
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
        (STEPS + "write: {{help: true}}", "write has no flag help: remove it"),
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
