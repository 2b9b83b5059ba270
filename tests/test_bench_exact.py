"""bench exact on the CPU: what it finds of a tiny fit, what it refuses, and answers that differ."""

import json
from dataclasses import replace
from statistics import median

import pytest
from edits import jsonl
from fits import QUICK

from twellctl.bench import exact as module
from twellctl.bench.exact import bench_exact
from twellctl.bench.exact_results import ExactForm, ExactPoint
from twellctl.bench.settings import ExactSettings
from twellctl.convert import convert
from twellctl.decoding.drafted import Drafted
from twellctl.decoding.rounds import Drafts
from twellctl.errors import TwellError, UsageError

TINY = {"device": "cpu", "new_tokens": 12, "limit": 2}
EXACT = ["exact", "exact, 1 draft", "exact, 7 drafts"]
FORMS = ["original, stable", "original", *EXACT, "exact, lookup", "fit alone"]
pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.fixture(scope="module")
def fit(silu_llama, text_file, tmp_path_factory):
    """A fit of `silu_llama`; read only."""
    out = tmp_path_factory.mktemp("fits") / "fit"
    convert(silu_llama, out, data=[str(text_file)], **QUICK)
    return out


@pytest.fixture
def prompts(tmp_path):
    texts = ("import os\n\ndef main", "class A:\n    x = 1\n", "# for all\n", "def f(x):\n")
    return jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in texts])


@pytest.fixture
def one_count(monkeypatch):
    """Of the forms with a number of drafts one, where a test does not look at the others."""
    monkeypatch.setattr(module, "COUNTS", (3,))


def bench(fit, prompts, original, **settings):
    return bench_exact(fit, prompts, original, ExactSettings(**TINY | settings))


def test_every_form_answers_as_the_original(fit, prompts, silu_llama, monkeypatch):
    """Of the counts of drafts the least and the most."""
    monkeypatch.setattr(module, "COUNTS", (1, 7))
    found = bench(fit, prompts, silu_llama, batches=(1, 2), limit=3, new_tokens=11)
    assert found.wrong == []
    one, two = found.to_json()["points"]
    for point in (one, two):
        assert point["prompts"] == 3
        assert list(point["forms"]) == FORMS
        for form in point["forms"].values():
            assert form["least"] <= form["tokens_per_second"] <= form["most"]
        original = point["forms"]["original"]
        assert original["over_original"] == original["over_original_least"] == 1
        assert original["tokens_a_pass"] is None
        for name in (*EXACT[1:], "exact, lookup", "original, stable"):
            assert point["forms"][name]["differing"] == 0
        passes = [point["forms"][name]["passes"] for name in ("original", *EXACT[1:])]
        assert passes[0] > passes[1] > passes[-1]
        for name in EXACT[1:]:
            form = point["forms"][name]
            assert 0 < form["kept"]["fit"] <= form["drafted"]["fit"]
            kept = sum(form["kept"].values())
            assert form["tokens_a_pass"] == 1 + kept / form["passes"] > 1
        assert [*point["forms"]["exact, lookup"]["drafted"]] in (["lookup"], [])
    assert one["groups_timed"] == len(one["forms"]["exact"]["rates"]) == 3
    assert two["groups_timed"] == 1  # the second has one prompt
    assert two["forms"]["exact"]["rates"][1] is None
    ratios = [point["forms"]["exact"]["over_original"] for point in (one, two)]
    (said,) = found.sentences
    begun = f"on this CPU the same answers are {ratios[0]:.2f}x as fast at batch 1 ("
    assert said.startswith(begun)
    assert f"), {ratios[1]:.2f}x at 2 (" in said


@pytest.mark.usefixtures("one_count")
def test_drawn_answers_are_the_same(fit, prompts, silu_llama):
    found = bench(fit, prompts, silu_llama, temperature=0.9, seed=7, batches=(2,))
    assert found.wrong == []
    assert found.points[0].form("exact, 3 drafts").drafted.num_kept > 0


@pytest.mark.usefixtures("one_count")
def test_the_command_shows_its_figures_and_writes_them(success, fit, prompts, silu_llama, tmp_path):
    words = ("bench", "exact", fit, "--original", silu_llama, "--prompts", prompts)
    words += ("--device=cpu", "--new-tokens=12", "--limit=2", "--batch=1")
    out, err = success(*words, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"] == "bench exact"
    assert found["models"] == {"draft": str(fit), "original": str(silu_llama)}
    assert not found["is_head"]
    assert found["settings"]["new_tokens"] == 12
    (point,) = found["points"]
    for name, form in point["forms"].items():
        assert f"{name} " in out
        assert form["tokens_per_second"] == median(form["rates"])
        assert f" {form['tokens_per_second']:.4g} " in out
    assert out.splitlines()[-1] == found["sentences"][0]
    assert "exact, 3 drafts: batch 1" in err
    assert any("drafts gain no speed here" in line for line in err)


@pytest.mark.usefixtures("one_count")
def test_answers_that_differ_are_told(cli, fit, prompts, silu_llama, monkeypatch, tmp_path):
    """One token of the last answer of one form."""
    answered, groups = module.answered, []

    def spoiled(scheduler, group, sampling):
        answers, rate = answered(scheduler, group, sampling)
        if scheduler.tally._pace._fixed == Drafts(3):
            groups.append(answers)
            answers[0][-1] += len(groups) == 4  # behind two that warm up
        return answers, rate

    monkeypatch.setattr(module, "answered", spoiled)
    words = ("bench", "exact", fit, "--original", silu_llama, "--prompts", prompts)
    words += ("--device=cpu", "--new-tokens=12", "--limit=2")
    code, out, err = cli(*words, "--json", tmp_path / "found.json")
    assert code == 1
    assert err[-1] == (
        "error: 'exact, 3 drafts' answers 1 of 2 prompts with other tokens than the original with "
        "--stable, at batch 1"
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["points"][0]["forms"]["exact, 3 drafts"]["differing"] == 1
    assert found["sentences"] == []
    assert "the same answers" not in out


def test_groups_that_one_form_could_not_time_do_not_count():
    forms = [
        ExactForm("original, stable", (5.0, 5.0, 5.0), 0, Drafted(9), 7),
        ExactForm("original", (10.0, None, 20.0), 2, Drafted(9), 7),
        ExactForm("exact", (20.0, 90.0, 50.0), 0, Drafted(9), 7),
    ]
    point = ExactPoint(1, 3, tuple(forms))
    assert point.num_timed == 2
    assert point.ratios(forms[2]) == [2.0, 2.5]
    assert point.wrong == []  # the fastest original need not agree
    spoiled = replace(forms[2], differing=3)
    assert len(ExactPoint(1, 3, (*forms[:2], spoiled)).wrong) == 1


def test_bad_calls_are_refused(fit, prompts, silu_llama, relu_llama, tmp_path):
    with pytest.raises(UsageError, match="batch must be at most 2, the number of prompts, got 4"):
        bench(fit, prompts, silu_llama, batches=(4,))
    with pytest.raises(UsageError, match="new-tokens must be >= 10, got 5"):
        bench(fit, prompts, silu_llama, new_tokens=5)
    with pytest.raises(TwellError, match="is not a fit"):
        bench(relu_llama, prompts, silu_llama)
    with pytest.raises(TwellError, match="name that with --original MODEL"):
        bench(fit, prompts, None)
    with pytest.raises(TwellError, match=r"original, stable: a prompt of .* shorten the prompt"):
        bench(fit, prompts, silu_llama, new_tokens=250)
    with pytest.raises(TwellError, match="cannot be read"):
        bench(fit, tmp_path / "no.jsonl", silu_llama)


@pytest.mark.usefixtures("one_count")
def test_answers_that_are_too_short(fit, prompts, silu_llama, monkeypatch):
    monkeypatch.setattr(module, "LEAST_TIMED", 100)
    with pytest.raises(TwellError, match="no 1 answer together had 100 tokens to time in every"):
        bench(fit, prompts, silu_llama, limit=1)


def test_answers_that_waited_for_a_graph_do_not_count(monkeypatch):
    """The first pass and the second capture one each here, the third none."""
    monkeypatch.setattr(module, "answered", lambda *given: next(passes))
    graphs, said = [0], []

    def each_pass():
        for number in (1, 2, 2, 2):
            for _ in range(2):  # prompts
                graphs[0] = number
                said.append(number)
                yield [[5] * 9], 100.0 * len(said)

    passes = each_pass()
    run = module._Run(ExactSettings(**TINY), [[3], [4]], lambda text: None)
    found = run._measured("original", _Quiet(graphs), 1, 9)
    assert found.rates == (500.0, 600.0)
    assert said == [1, 1, 2, 2, 2, 2]


class _Quiet:
    """A scheduler as far as `_Run` knows one."""

    def __init__(self, graphs: list[int]):
        self._graphs = graphs
        self.tally = type("Tally", (), {"drafted": Drafted()})

    @property
    def num_graphs(self) -> int:
        return self._graphs[0]
