"""report: what the page of a run says, that it says it safely, and how it looks."""

import dataclasses
import html
import json
import re
from pathlib import Path

import pytest
from browser import complaints, seen_on

from twellctl.cli.run_report import PAGE, write_report
from twellctl.errors import TwellError
from twellctl.evaluation.in_report import answers_of, table_of
from twellctl.evaluation.pairs import Pair
from twellctl.evaluation.results import AnswerScore, Evaluation, Marks, Mean, TaskResult
from twellctl.report.page import Answers, Page, Table, html_of

HOSTILE = "</pre><script>document.title = 'x'</script><img src=https://a.b/c onerror=alert(1)>&amp;"


def evaluation(model: str = "made/relu", right: int = 90, **changes) -> Evaluation:
    """Of 120 questions the reference solves 110."""
    asked = tuple(f"question {number}" for number in range(120))
    theirs = Marks("code", (1.0,) * 110 + (0.0,) * 10, asked=asked, texts=("def f(): right",) * 120)
    marks = (1.0,) * right + (0.0,) * (120 - right)
    ours = dataclasses.replace(theirs, acc=marks, texts=("def f(): wrong " + HOSTILE,) * 120)
    kinds = {"kind": "answer"}
    tasks = TaskResult.of(dataclasses.replace(ours, **kinds), dataclasses.replace(theirs, **kinds))
    score = AnswerScore(64, 6400, Mean(0.03, 0.002), 0.5, 0.95, 0.8, 0.01, 9, 40.0, 60, 61, 1, 0)
    pairs = (
        Pair("Same?", "yes", ("", ""), 3, True, (True, True), (False, False)),
        Pair("Why?", "It is ", ("so.", "not so."), 2, False, (True, True), (False, False)),
    )
    facts = {"dtype": "bfloat16", "device": "NVIDIA H200", "versions": {"twellctl": "0.1.0"}}
    return Evaluation(
        **{
            "model": model,
            "fingerprint": "abc",
            "reference": "owner/original",
            "data": (),
            "limit": None,
            "text": None,
            "answers": score,
            "tasks": (tasks,),
            "bytes_read": 250_000_000,
            "reference_bytes_read": 1_000_000_000,
            "pairs": pairs,
        }
        | facts
        | changes
    )


def in_json(found: Evaluation) -> dict:
    return json.loads(json.dumps(found.to_json()))


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a run has left, as far as it was measured."""
    made = tmp_path / "coder"
    made.mkdir()
    recipe = {"model": "owner/original", "out": "coder", "convert": {"density": 0.15}}
    (made / "run.json").write_text(json.dumps({"recipe": recipe}))
    (made / "eval.json").write_text(json.dumps(evaluation().to_json()))
    (made / "eval-4bits.json").write_text(
        json.dumps(evaluation("silu4", 105, bytes_read=266_000_000).to_json())
    )
    return made


def text_of(page: str) -> str:
    """What a page says, without its tags."""
    body = page[page.index("<body>") :]
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


def test_a_page_says_what_the_files_say(folder, success):
    out, _ = success("report", folder)
    page = (folder / PAGE).read_text()
    said = " ".join(text_of(page).split())
    assert out == f"{folder}/{PAGE}\n"
    assert "like the reference, but some exact answers are lost" in said
    assert "90 tasks solved, 110 by the reference: 82% kept" in said
    kept = in_json(evaluation())["verdict"]["kept"]
    assert f"{kept:.1%} ±" in said
    assert "original, the original 110 of 120 100% 1000 MB -" in said
    assert re.search(r"relu 90 of 120 81\.8% ± 3\.\d% 250 MB \(25\.0%\) 0\.0300", said)
    assert re.search(r"silu4 105 of 120 95\.5% ± \d\.\d% 266 MB \(26\.6%\) 0\.0300", said)
    assert "NVIDIA H200, bfloat16" in said
    assert "convert: density: 0.15" in said


def test_lost_answers_come_first_and_the_first_difference_is_marked(folder):
    write_report(folder)
    page = (folder / PAGE).read_text()
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles[:3] == ["Lost, of code"] * 3
    assert titles[3:] == ["The same for 2 tokens", "The same to the end: 3 tokens"]
    assert page.count("<mark>") == 8
    assert '<span class="same">def f(): </span><mark>right</mark>' in page
    assert '<span class="same">It is </span><mark>not</mark> so.' in page


def test_at_most_twelve_answers_and_none_without_a_reference():
    many = in_json(evaluation(pairs=evaluation().pairs * 20))
    found = answers_of(many)
    assert len(found) == 12
    assert {answer.what for answer in found[3:]} == {"The same for 2 tokens"}
    assert answers_of(in_json(evaluation(reference=None))) == []


def test_a_table_of_other_tasks_has_gaps():
    choices = TaskResult.of(Marks("arc", (1.0, 0.0), (1.0, 1.0), options=(4, 4)))
    other = evaluation("b", tasks=(choices,), bytes_read=None, answers=None)
    table = table_of([in_json(evaluation()), in_json(other)])
    rows = table.rows
    assert table.columns == ["model", "code", "arc", "kept", "bytes read", "KL, answers"]
    assert rows[0][:4] == ["original, the original", "110 of 120", "-", "100%"]
    assert rows[2] == ["b", "-", "50.0%", "-", "-", "-"]


def test_what_others_wrote_stays_text():
    texts = (HOSTILE, HOSTILE)
    answers = Answers(HOSTILE, HOSTILE, HOSTILE, texts, texts)
    page = Page(
        HOSTILE,
        *(HOSTILE, HOSTILE),
        sentences=[HOSTILE],
        tables=[Table(HOSTILE, [HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE)],
        answers=[answers],
        facts=[(HOSTILE, HOSTILE)],
        recipe=HOSTILE,
    )
    made = html_of(page)
    assert "<script" not in made
    assert not re.findall(r"<img[^>]*https", made)
    assert made.count("&lt;/pre&gt;&lt;script&gt;") > 12
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", made)


def test_the_plots_of_a_run(folder, success):
    pytest.importorskip("matplotlib", reason="matplotlib draws plots")
    write_report(folder)
    page = (folder / PAGE).read_text()
    assert re.findall(r'<img alt="([^"]+)"', page) == ["Tasks kept, and bytes read for a token"]
    assert len(page) < 600_000


def test_without_matplotlib_a_note_says_how_plots_come(folder, cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    code, _, err = cli("report", folder)
    said = f"{PAGE} has no plots: pip install matplotlib, then twellctl report"
    assert (code, err) == (0, [said])
    assert "<img" not in (folder / PAGE).read_text()


def test_a_page_is_written_once_and_replaces_nothing_else(folder):
    path = write_report(folder)
    first = path.stat().st_mtime_ns
    assert write_report(folder) == path
    assert path.stat().st_mtime_ns == first
    path.write_text("my own page")
    with pytest.raises(TwellError, match="exists and is no report of twellctl"):
        write_report(folder)


@pytest.mark.parametrize("broken", ["tasks", "bytes_read", "versions", "verdict", "pairs"])
def test_what_is_broken_is_one_line(folder, broken):
    content = json.loads((folder / "eval.json").read_text())
    del content[broken]
    (folder / "eval.json").write_text(json.dumps(content))
    with pytest.raises(TwellError, match=rf"a figure is missing or broken .*{broken}"):
        write_report(folder)


@pytest.mark.parametrize("content", ["[1, 2]", "{"])
def test_a_json_of_someone_else_is_named_and_left_out(folder, content, success, refusal):
    (folder / "other.json").write_text(content)
    _, err = success("report", folder)
    assert any(f"not in {PAGE}: {folder}/other.json" in line for line in err)
    assert "90 of 120" in (folder / PAGE).read_text()
    (folder / "eval.json").write_text(content)
    assert refusal("report", folder).startswith(f"error: {folder}/eval.json")


def test_a_page_of_nothing_has_no_headings():
    assert "<h2" not in html_of(Page("of nothing"))


def test_a_folder_of_no_run_is_refused(refusal, tmp_path):
    said = refusal("report", tmp_path)
    assert said == f"error: {tmp_path} holds nothing of a run: give the out of 'twellctl run'"


@pytest.mark.parametrize("width", [1280, 360])
def test_in_a_browser(folder, chromium, width):
    """Nothing is wider than the screen, nothing is loaded, nothing runs."""
    write_report(folder)
    complaints(chromium)
    with seen_on(chromium, width, 800):
        chromium.get((folder / PAGE).as_uri())
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert chromium.execute_script(wide) == 0
        loaded = "return performance.getEntriesByType('resource').map(r => r.name)"
        assert [u for u in chromium.execute_script(loaded) if not u.startswith("data:")] == []
        assert chromium.title == "coder"
        assert chromium.execute_script("return document.querySelectorAll('article').length") == 5
        shown = "return [...document.images].every(i => i.complete && i.naturalWidth > 300)"
        assert chromium.execute_script(shown)
        columns = chromium.execute_script(
            "return getComputedStyle(document.querySelector('.both')).gridTemplateColumns"
        )
        assert len(columns.split()) == (2 if width == 1280 else 1)
    assert complaints(chromium) == []
