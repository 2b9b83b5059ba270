""".ci/measure.sh: which commands it calls, of what, and what lies in the folder of the run.

Another interpreter stands in for Python's: it notes the commands and makes what they would make.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_report import evaluation
from test_rivals import answered

from twellctl.cli.run_report import PAGE, write_report
from twellctl.heads.folder import FACTS
from twellctl.models.checkpoint import FIT_FILE

SCRIPT = Path(__file__).resolve().parent.parent / ".ci/measure.sh"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="no checkout around the tests")
INTERPRETER = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
words = words[2:] if words[0] == "-m" else [pathlib.Path(words[0]).name, *words[1:]]
with open("{log}", "a") as log:
    log.write(json.dumps(words) + "\\n")
if os.environ.get("FAILS") in words:
    sys.exit(3)
results = json.loads(pathlib.Path("{results}").read_text())
if words[0] == "run":
    made = ["out/run/exported/config.json", "out/run/eval.json"]
elif words[0] in ("convert", "draft"):
    made = [name for name in results if name.startswith(words[2] + "/")]
else:
    made = [word for word in words if word.endswith(".json")]
for name in made:
    pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(name).write_text(json.dumps(results.get(name, {{}})))
"""


@pytest.fixture
def measure(tmp_path):
    """`measure(**environment)`: the exit code, and the commands that were called."""
    fit = {"settings": {"keep_activation": True}, "seconds": 180.0, "kept": 0, "tokens": 9}
    results = {
        "out/four/" + FIT_FILE: fit,
        "out/head/" + FACTS: {"seconds": 61.0, "tokens": 1000},
        "out/exact.json": answered(draft="out/head", is_head=True),
        "out/exact_four.json": answered(draft="out/four"),
        "out/run/eval.json": evaluation().to_json(),
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    python, log = tmp_path / "python", tmp_path / "log.jsonl"
    paths = {"python": sys.executable, "log": log, "results": tmp_path / "results.json"}
    python.write_text(INTERPRETER.format(**paths))
    python.chmod(0o755)

    def run(**environment: str) -> tuple[int, list[list[str]]]:
        log.write_text("")
        given = ["model", "answers.jsonl", "heldout.jsonl", "prompts.jsonl", "tasks", "out"]
        done = subprocess.run(
            ["bash", str(SCRIPT), *given],
            cwd=tmp_path,
            env=os.environ | {"PYTHON": str(python), "COMMIT": "abc"} | environment,
            capture_output=True,
        )
        return done.returncode, [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_a_head_drafts_and_the_4_bits_are_its_control(measure, tmp_path):
    code, calls = measure()
    assert code == 0
    assert [words[0] for words in calls] == [
        *("convert", "draft", "bench", "bench", "picture.py", "exact_answers.py"),
        *("exact_answers.py", "run", "eval", "bench", "report"),
    ]
    assert calls[1] == ["draft", "model", "out/head", "--data", "answers.jsonl"]
    drafts = [(words[2], words[words.index("--json") + 1]) for words in calls[2:4]]
    assert drafts == [("out/head", "out/exact.json"), ("out/four", "out/exact_four.json")]
    assert all(words[3:5] == ["--original", "model"] for words in calls[2:4])
    assert calls[4][1:4] == ["record", "model", "out/head"]
    assert calls[6][1:4] == ["check", "model", "out/head"]
    write_report(tmp_path / "out/run")
    page = (tmp_path / "out/run" / PAGE).read_text()
    assert "drafts by head (draft head)" in page
    assert "drafts by four (original in 4 bits)" in page
    assert "1 min 01 s" in page
    assert "3 min 00 s" in page


def test_a_step_that_failed_is_made_up_for(measure, tmp_path):
    code, calls = measure(FAILS="draft")
    assert (code, len(calls)) == (1, 11)
    assert re.search(r"^head: \d+ s, exit 3$", (tmp_path / "out/steps.txt").read_text(), re.M)
    code, calls = measure()
    assert code == 0
    assert [words[0] for words in calls] == ["draft", "exact_answers.py", "report"]


def test_settings_of_the_fit_reach_its_run(measure, tmp_path):
    measure(FIT="tokens: 5", TOKENS="7", NEW_TOKENS="9", DEVICE="cpu")
    recipe = (tmp_path / "out/run.yaml").read_text()
    assert "convert: {data: answers.jsonl, bits: 4, tokens: 5}" in recipe
    _, calls = measure(FAILS="check")
    assert [words[:2] for words in calls] == [["exact_answers.py", "check"], ["report", "out/run"]]


def test_a_wrong_call_says_how(tmp_path):
    done = subprocess.run(["bash", str(SCRIPT), "model"], capture_output=True, text=True)
    assert done.returncode == 2
    assert ".ci/measure.sh MODEL ANSWERS.jsonl HELDOUT.jsonl" in done.stderr
    assert done.stderr.endswith("repeat the command to make up for it.\n")
