"""The page of a profile: what it holds, and what it never does."""

import dataclasses
import json
from html.parser import HTMLParser

import profiles
import pytest

from twellctl.firing.profiled import read_profile
from twellctl.report import write
from twellctl.report.markup import escaped, tag
from twellctl.report.of_profile import profile_page

EVIL = "<script>alert(1)</script>\"'&\ud800"


class Read(HTMLParser):
    """Elements and texts of a page; every element that is opened is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.texts, self.names, self.links = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        found = dict(attributes)
        self.links += [found[key] for key in ("src", "href", "xlink:href") if key in found]
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
        "What fires in a/model", "1.13 %", "0.050%", "NVIDIA H200",
        "By kind of text", "By position in the window", "twellctl 0.1.0+gabc",
    ):  # fmt: skip
        assert words in whole.text, words
    assert "1 0.400 % 4.0 2 4 8 12 16 20 32 0.050%" in whole.text
    assert "2-1023 1.13 % 2048" in whole.text


def test_a_page_loads_nothing_and_runs_no_script(whole):
    assert whole.links == ["data:,"]
    assert whole.names.count("style") == 1
    assert not {"script", "img", "iframe", "form", "object"} & {*whole.names}


def test_texts_of_others_stay_texts():
    kinds = tuple(dataclasses.replace(part, kind=EVIL) for part in profiles.profile().by_kind)
    found = profiles.profile(model=EVIL, data=(EVIL,), versions={EVIL: EVIL}, by_kind=kinds)
    page = profile_page(found)
    page.encode()
    read = Read(page)
    assert "script" not in read.names
    assert "<script>alert(1)</script>\"'&\\ud800" in read.text


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
        {"by_position": (), "by_kind": ()},
    ],
)
def test_odd_profiles_can_be_drawn(changes):
    layers = changes.pop("layers", ())
    Read(profile_page(profiles.profile(*layers, **changes)))


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
