"""serve-local says what was drafted: of each token of a stream, of a request, on the page."""

import json
from dataclasses import replace

import pytest
from page_driver import Page
from serving_client import Scripted, chat, complete, eventually, get, post
from serving_client import running as running_server

from twellctl.decoding.drafted import Draft, Drafted
from twellctl.decoding.engine import EngineStats
from twellctl.serving.plan import ServedModel

TEXT = "The gate decides which neurons fire, and only those are read."
# rounds: 3 drafts of the fit, 2 kept; a plain one; 2 of lookup, both kept
ROUNDS = [
    *(Draft("fit", 3, True), Draft("fit", 0, True), Draft("fit", 0, False)),
    None,
    *(Draft("lookup", 2, True), Draft("lookup", 0, True), Draft("lookup", 0, False)),
]


class Drafting(Scripted):
    """After its first token, rounds as in `ROUNDS`, over and over."""

    drafters = ("fit", "lookup")

    def described(self, place, token, sampling):
        return replace(super().described(place, token, sampling), draft=self.draft(place))

    def draft(self, place: int) -> Draft | None:
        return ROUNDS[(place - 1) % len(ROUNDS)] if place else None

    def names(self) -> list[str | None]:
        drafts = map(self.draft, range(len(self.tokens)))
        return [draft.drafter if draft and draft.kept else None for draft in drafts]

    def stats(self) -> EngineStats:
        drafted = Drafted(9)
        drafted.add("fit", 6, 4)
        return replace(super().stats(), drafted=drafted)


@pytest.fixture
def engine(tokenizer):
    return Drafting([*tokenizer.encode(TEXT), 0])


@pytest.fixture
def logged(tokenizer, engine):
    """A client, and what the server has logged."""
    lines: list[str] = []
    with running_server(ServedModel("model", tokenizer, engine), log=lines.append) as client:
        yield client, lines


def test_a_stream_names_who_drafted_each_token(logged, engine):
    client, _ = logged
    for ask in (chat, complete):
        how = {"stream": True, "extra_body": {"twell_drafters": True, "twell_densities": True}}
        texts, found = [], []
        for chunk in ask(client, max_tokens=100, **how):
            choice = chunk.choices[0]
            text = (choice.delta.content or "") if ask is chat else choice.text
            drafters = (chunk.model_extra.get("twell") or {}).get("drafters", [])
            assert len(drafters) == len((chunk.model_extra.get("twell") or {}).get("densities", []))
            texts.append(text)
            found += drafters
        assert "".join(texts) == TEXT
        assert found == engine.names()[:-1]  # all but the end token, which is no text


def test_only_who_asks_is_told(logged):
    client, _ = logged
    for chunk in chat(client, stream=True):
        assert "twell" not in chunk.model_extra
    body = json.dumps({"model": "model", "prompt": "x", "twell_drafters": True})
    status, answer = post(client, body.encode())
    assert (status, answer["error"]["param"]) == (400, "twell_drafters")


def test_the_log_says_what_became_of_drafts(logged, engine):
    client, lines = logged
    complete(client, max_tokens=100)
    get(client, "/health")
    assert eventually(lambda: len(lines) == 2)
    assert len(engine.tokens) == 1 + 5 * len(ROUNDS) + 1
    said = " ms, 2.40 tokens a pass, kept 11/18 of fit, 10/10 of lookup"
    assert lines[0].endswith(said)
    assert lines[1].endswith(" ms")


def test_metrics_by_drafter(logged):
    client, _ = logged
    found = get(client, "/metrics").body.decode().splitlines()
    for line in (
        'twell_passes_total{model="model"} 9.0',
        'twell_drafted_tokens_total{drafter="fit",model="model"} 6.0',
        'twell_drafted_tokens_total{drafter="lookup",model="model"} 0.0',
        'twell_kept_drafts_total{drafter="fit",model="model"} 4.0',
    ):
        assert line in found


def test_models_say_who_drafts_for_them(logged):
    client, _ = logged
    assert client.models.retrieve("model").twell["drafters"] == ["fit", "lookup"]


# ---- the page


@pytest.fixture
def page(chromium, tokenizer, engine):
    """Of a model for which two draft, and of another one beside it."""
    plain = Scripted([*tokenizer.encode("Plain."), 0])
    served = ServedModel("model", tokenizer, engine, beside={"model-fast": plain})
    with running_server(served) as client:
        page = Page(chromium, client)
        page.until(lambda: page["model"].text == "model")
        yield page
        page.run("sessionStorage.clear()")


def lines_under(page: Page) -> list[str]:
    """How each token of the last answer is underlined."""
    return page.run(
        "return [...[...document.querySelectorAll('.text')].at(-1).querySelectorAll('.token')]"
        ".map(span => getComputedStyle(span))"
        ".map(style => style.textDecorationLine + ' ' + style.textDecorationStyle)"
    )


def test_drafted_tokens_look_different_until_they_are_not_to(page, engine):
    figures = page.ask("Why?")
    names = engine.names()[:-1]
    said = {"fit": "underline solid", "lookup": "underline dotted", None: "none solid"}
    assert lines_under(page) == [said[name] for name in names]
    counts = f"{names.count('fit')} by fit, {names.count('lookup')} by lookup"
    assert f"{len(names) - names.count(None)} drafted ({counts})" in figures
    page["open"].click()
    page["marks"].send_keys(" ")
    assert lines_under(page) == ["none solid"] * len(names)
    page.driver.refresh()
    assert page.done() == figures
    assert set(lines_under(page)) == {"none solid"}
    page["open"].click()
    page["marks"].send_keys(" ")
    assert lines_under(page) == [said[name] for name in names]
    assert page.complaints() == []


def test_the_switch_is_one_for_all(page):
    """For who sees a narrow screen, and who hears it."""
    for width, scheme in ((320, "dark"), (1280, "light")):
        with page.seen_on(width, 640, scheme):
            if not page["settings"].is_displayed():
                page["open"].click()
            assert page.run("return document.scrollingElement.scrollWidth") <= width
            for name in ("marks", "name"):
                box = page[name].rect
                assert box["x"] >= 0, name
                assert box["x"] + box["width"] <= width, name
    assert page["marks"].aria_role == "switch"
    assert page["marks"].accessible_name.startswith("Mark drafted tokens: by the draft, looked up")
    assert page["name"].accessible_name == "Model"


def test_another_model_can_be_chosen(page, engine):
    page["open"].click()
    page.run("at('name').focus()")
    page["name"].send_keys("model-f")
    page.until(lambda: page["model"].text == "model-fast")
    page.ask("Why?")
    assert page.answer() == "Plain."
    assert engine.samplings == []
    page.driver.refresh()
    page.done()
    assert page["model"].text == "model-fast"
    assert page["name"].get_attribute("value") == "model-fast"
    assert page.complaints() == []


def test_one_model_without_drafts_offers_neither(open_page, tokenizer):
    with open_page(Scripted([*tokenizer.encode("Plain."), 0])) as page:
        page.until(lambda: page["model"].text == "model")
        page["open"].click()
        assert not page["marks"].is_displayed()
        assert not page["name"].is_displayed()
        assert "drafted" not in page.ask("Why?")


def test_a_model_whose_neurons_all_fire_has_no_share_of_them(open_page, tokenizer):
    with open_page(Scripted([*tokenizer.encode("Plain."), 0], num_layers=0)) as page:
        figures = page.ask("Why?")
        assert "neurons" not in figures
        assert "NaN" not in figures
        assert page.complaints() == []
