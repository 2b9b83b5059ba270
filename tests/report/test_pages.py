"""The pages of a profile and of a run: what they hold, and what they never do."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import profiles
import pytest
from finetune_runs import small

from twellctl.finetune import finetune
from twellctl.firing.profiled import read_profile
from twellctl.profile import profile
from twellctl.report import write
from twellctl.report.markup import escaped, tag
from twellctl.report.of_profile import profile_page
from twellctl.report.of_run import run_page
from twellctl.training.progress import Progress

EVIL = "<script>alert(1)</script>\"'&\ud800"


class Read(HTMLParser):
    """Elements and texts of a page; every element that is opened is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.texts, self.names, self.links, self.says = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        found = dict(attributes)
        self.links += [found[key] for key in ("src", "href", "xlink:href") if key in found]
        self.says += [found["data-says"]] if "data-says" in found else []
        if name not in ("meta", "link"):
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def whole() -> Read:
    return Read(profile_page(profiles.profile()))


@pytest.mark.parametrize(
    ("model", "called"),
    [("/home/me/models/sparse", "sparse"), ("out/sparse", "out/sparse"), ("a/model", "a/model")],
)
def test_a_page_is_called_by_the_models_name(model, called):
    made = dataclasses.replace(profiles.profile(), model=model)
    assert f"<title>What fires in {called}</title>" in profile_page(made)


def test_figures_of_a_profile_are_on_its_page(whole):
    for words in (
        "What fires in a/model", "1.13 %", "2.3456", "± 0.0123", "0.050%", "NVIDIA H200",
        "By kind of text", "By position in the window", "twellctl 0.1.0+gabc",
    ):  # fmt: skip
        assert words in whole.text, words
    for words in (
        "layer 1: mean 4.0 neurons (0.400 %); median 4, 99 % of tokens at most 12, most 16",
        "2-1023: 1.13 % of the neurons fire, 2048 tokens",
    ):
        assert words in whole.says, words


def test_a_page_loads_nothing_and_runs_one_script(whole):
    assert whole.links == ["data:,"]
    assert whole.names.count("script") == whole.names.count("style") == 1
    assert not {"img", "iframe", "form", "object"} & {*whole.names}


def test_texts_of_others_stay_texts():
    kinds = tuple(dataclasses.replace(part, kind=EVIL) for part in profiles.profile().by_kind)
    found = profiles.profile(model=EVIL, data=(EVIL,), versions={EVIL: EVIL}, by_kind=kinds)
    page = profile_page(found)
    page.encode()
    read = Read(page)
    assert read.names.count("script") == 1
    assert "<script>alert(1)</script>\"'&\\ud800" in read.text
    assert any("alert(1)" in says for says in read.says)


def test_markup_escapes_what_is_not_markup():
    assert tag("p", "a < b", tag("b", "&"), None, class_="x", title='"', id=None) == (
        '<p class="x" title="&quot;">a &lt; b<b>&amp;</b></p>'
    )
    assert escaped(escaped("<")) == "&lt;"


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (profiles.layer(0.0),)},
        {"layers": (profiles.layer(1.0),)},
        {"layers": tuple(profiles.layer(0.01) for _ in range(300))},
        {"by_position": (), "by_kind": (), "loss": None},
        {"loss_error": None},
    ],
)
def test_odd_profiles_can_be_drawn(changes):
    layers = changes.pop("layers", ())
    Read(profile_page(profiles.profile(*layers, **changes)))


def test_a_profile_of_the_first_form_can_be_drawn(relu_llama, text_file, tmp_path):
    found = profile(relu_llama, str(text_file), windows=2, seq_len=16)
    old = {"nnz_p10", "nnz_p90", "loss", "loss_error"}
    content = found.to_json()
    content["layers"] = [
        {k: v for k, v in one.items() if k not in old} for one in content["layers"]
    ]
    kept = {k: v for k, v in content.items() if k not in old and not k.startswith("by_")}
    (tmp_path / "old.json").write_text(json.dumps(kept))
    Read(profile_page(read_profile(tmp_path / "old.json")))


def command(cli, model, text_file, *more):
    return cli("profile", model, "--data", text_file, "--windows", 2, "--seq-len", 16, *more)


def test_command_writes_a_page_beside_the_json(cli, relu_llama, text_file, tmp_path):
    page, saved = tmp_path / "profile.html", tmp_path / "profile.json"
    code, out, err = command(cli, relu_llama, text_file, "--html", page, "--json", saved)
    assert code == 0
    assert "overflow" in out
    assert f"the page: {page}" in err
    assert page.read_text() == profile_page(read_profile(saved))
    page.unlink()
    code, out, _ = command(cli, relu_llama, text_file, "--html", page, "--json", "-")
    assert (code, json.loads(out)["windows"]) == (0, 2)
    assert page.read_text() == profile_page(read_profile(saved))


def test_a_page_that_cannot_be_drawn_leaves_the_json(
    cli, relu_llama, text_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(write, "profile_page", lambda found: 1 / 0)
    page, saved = tmp_path / "profile.html", tmp_path / "profile.json"
    code, out, err = command(cli, relu_llama, text_file, "--html", page, "--json", saved)
    assert (code, page.exists()) == (1, False)
    assert f"{page} could not be drawn (ZeroDivisionError: division by zero)" in err[-1]
    assert "overflow" in out
    assert read_profile(saved).windows == 2


def test_pages_that_cannot_be_written_are_refused_before_any_work(
    cli, relu_llama, text_file, tmp_path
):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    for name, sentence, wanted in (
        ("mine.html", "exists and is no page of twellctl", 1),
        ("none/page.html", "is not a folder you may write to", 1),
        (".", "is a folder: name the HTML file", 1),
        ("x.json", "--html and --json both name", 2),
    ):
        code, _, err = command(
            cli, relu_llama, text_file, "--html", tmp_path / name, "--json", tmp_path / "x.json"
        )
        assert (code, len(err)) == (wanted, 1)
        assert sentence in err[0]
    code, _, err = command(cli, relu_llama, text_file, "--html", "-")
    assert (code, err) == (2, ["error: --html writes a file, got -: name one"])
    assert {path.name for path in tmp_path.iterdir()} == {"mine.html"}


@pytest.fixture(scope="module")
def run(relu_llama, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    return finetune(relu_llama, out, small(text_file, logging_steps=2))


def test_a_run_leaves_its_page(run):
    read = Read((run.out / "run.html").read_text(encoding="utf-8"))
    for words in (
        "How out was trained", f"{run.num_steps} steps", f"{run.cross_entropy:.4f}",
        "batch-size", "Price of a neuron", "Learning rate", "of the teacher",
        run.answers.verdict.words[1:], "KL on the teacher's answers", "agree to the end",
    ):  # fmt: skip
        assert words in read.text, words
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").open()]
    last = rows[-1]
    shown = [says for says in read.says if says.startswith("step 12: ")]
    assert any(f"{last['loss']:.4g} of each step's text" in says for says in shown)
    assert any(f"{last['held_out']:.4g} of held-out text" in says for says in shown)
    assert any(says.startswith("layer 1: ") for says in read.says)


def test_the_first_kl_of_held_out_text_does_not_flatten_the_rest(run):
    ended = json.loads((run.out / "twell_finetune.json").read_text())
    kls = {0: 5.0, 4: 0.75, 8: 0.375, 12: 0.25}
    rows = [{"step": step, "seconds": 1.0, "held_out_kl": kl} for step, kl in kls.items()]
    rows += [{"step": step, "seconds": 1.0, "teacher_kl": 0.5} for step in (2, 6, 10)]
    page = run_page("out", rows, ended | {"teacher_kl": 0.25})
    text = Read(page).text
    assert "Not drawn: 5 at step 0." in text
    assert "Not drawn" not in Read(run_page("out", rows[1:], ended)).text
    drawn = re.findall('points="([^"]*)"', page)
    assert [len(points.split()) for points in drawn if len(points.split()) > 2] == [3, 3]


def test_a_run_without_its_page_is_not_lost(relu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "run_page", lambda *given: {}["steps"])
    said = []
    progress = Progress()
    monkeypatch.setattr(progress, "note", said.append)
    finetune(relu_llama, tmp_path / "out", small(text_file, max_steps=1), progress=progress)
    assert "run.html could not be drawn (KeyError: 'steps')" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "run.html").exists()


def test_long_runs_are_drawn_as_means(run):
    ended = json.loads((run.out / "twell_finetune.json").read_text()) | {"num_steps": 5000}
    rows = [
        {"step": step, "seconds": float(step), "loss": 3.0, "density": 0.1,
         "density_by_layer": [0.1, 0.2], "price": 1e-5}
        for step in range(1, 5001)
    ]  # fmt: skip
    page = run_page("out", rows, ended)
    assert len(page) < 500_000
    assert (
        max(len(re.findall(" ", points)) for points in re.findall('points="([^"]*)"', page)) < 300
    )
