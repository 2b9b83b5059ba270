"""The page at /: a second model answers beside the first, and where they differ is marked."""

import re
from contextlib import contextmanager

import pytest
from page_driver import TEXT, Page, speaking
from serving_client import running

from twellctl.serving.plan import ServedModel

pytest.importorskip("selenium", reason="selenium drives the browser")


@pytest.fixture
def open_both(chromium, tokenizer):
    """`with open_both(text)`: the page of a model that says `TEXT`, and of one that says `text`."""

    @contextmanager
    def opened(text, delay=0.0):
        beside = {"model-fast": speaking(tokenizer, text)}
        engine = speaking(tokenizer, delay=delay)
        with running(ServedModel("model", tokenizer, engine, beside=beside)) as client:
            page = Page(chromium, client)
            page.until(lambda: page["model"].text == "model")
            yield page
            page.run("sessionStorage.clear()")

    return opened


def choose(page: Page, **chosen: str) -> None:
    """Choose models by their names, in the settings, which stay open."""
    page["open"].click()
    for field, name in chosen.items():
        page[field].find_element("xpath", f"option[. = '{name}']").click()


def ask_both(page: Page, text: str) -> list[str]:
    """The lines under all answers, once two more are there."""
    count = len(page.all(".caption")) + 2
    page.say(text)
    page.until(lambda: len(page.all(".caption")) == count)
    return page.texts(".caption")


def test_another_model_answers_beside_it(open_both):
    other = TEXT.replace("only those", "all others")
    with open_both(other) as page:
        choose(page, beside="model-fast")
        captions = ask_both(page, "Why?")
        assert page.texts(".pair > .message > .text") == [TEXT, other]
        assert page.texts(".pair h2") == ["model", "model-fast"]
        assert "tokens/s" in captions[0]
        number = int(re.search(r" · other than model from token (\d+) on$", captions[1])[1])
        marked = page.texts(".token.differs")
        tokens = [page.texts(f".pair > :nth-child({n}) .token") for n in (1, 2)]
        assert tokens[0][: number - 1] == tokens[1][: number - 1]
        assert marked == [tokens[0][number - 1], tokens[1][number - 1]]
        assert marked[0] != marked[1]
        page.driver.refresh()
        page.until(lambda: len(page.all(".caption")) == 2)
        assert page.texts(".caption") == captions
        assert page.texts(".token.differs") == marked
        assert page.complaints() == []


def test_two_answers_stand_beside_each_other_where_there_is_room(open_both):
    with open_both("Plain.") as page:
        choose(page, beside="model-fast")
        ask_both(page, "Why?")
        left, right = (box.rect for box in page.all(".pair > .message"))
        assert left["y"] == right["y"]
        assert left["x"] + left["width"] <= right["x"]
        with page.seen_on(320, 640):
            left, right = (box.rect for box in page.all(".pair > .message"))
            assert left["x"] == right["x"]
            assert page.run("return document.scrollingElement.scrollWidth") <= 320
        page["fresh"].click()
        assert page.all(".pair") == []


def test_the_conversation_goes_on_from_the_models_own_answers(open_both, seen):
    with open_both("Plain.") as page:
        choose(page, name="model-fast", beside="model")
        ask_both(page, "One?")
        ask_both(page, "Two?")
    contents = [[message["content"] for message in messages] for messages in seen]
    assert contents == [["One?"]] * 2 + [["One?", "Plain.", "Two?"]] * 2


def test_the_same_answer_is_said_to_be_the_same(open_both):
    with open_both(TEXT) as page:
        choose(page, beside="model-fast")
        assert ask_both(page, "Why?")[1].endswith(" · as model answers")
        assert page.all(".token.differs") == []


def test_an_answer_that_is_stopped_has_none_beside_it(open_both):
    with open_both("Plain.", delay=0.05) as page:
        choose(page, beside="model-fast")
        page.say("Why?")
        page.until(lambda: page.texts(".pair .token"))
        page["stop"].click()
        assert page.done().endswith(" · stopped")
        assert page.all(".pair") == []
        assert page.texts(".assistant h2") == ["model"]
        assert page.complaints() == []
