"""The page at / as it is seen: on wide and narrow screens, light and dark."""

import re

import pytest
from page_driver import speaking
from serving_client import Scripted

pytest.importorskip("selenium", reason="selenium drives the browser")


class Uneven(Scripted):
    """One layer fires nearly whole, one hardly, and one of 3 %."""

    def densities(self, place: int) -> tuple[float, ...]:
        return (0.9, 0.005, 0.03)


def test_a_bar_is_as_high_as_its_share_and_little_is_seen(open_page, tokenizer):
    with open_page(Uneven([*tokenizer.encode("Yes, they are."), 0])) as page:
        page.ask("Are they seen?")
        full, little, some = page.until(page.bars)
        height = page["bars"].size["height"]
        assert full == pytest.approx(0.9 * height, abs=1)
        assert some == pytest.approx(0.03 * height, abs=1)
        assert 1 <= little < some
        labels = [label.text for label in page.all(".axis:first-child span")]
        assert labels == ["100 %", "75 %", "50 %", "25 %", "0 %"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_strip_distinguishes_little_some_and_much(open_page, tokenizer, scheme):
    with (
        open_page(Uneven([*tokenizer.encode("Yes, they are."), 0])) as page,
        page.seen_on(1280, 800, scheme),
    ):
        page.ask("Are they seen?")
        page.until(page.bars)
        much, little, some = page.run(
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {"
            "const c = at('strip'), p = c.getContext('2d');"
            "done([1, 3, 5].map(x => Math.round(c.width * x / 6))"
            ".map(x => [...p.getImageData(x, 2, 1, 1).data].slice(0, 3)"
            ".reduce((a, b) => a + b) / 3));})))"
        )
        light, middle, dark = (little, some, much) if scheme == "light" else (much, some, little)
        assert light > middle + 25 > dark + 50


def test_a_phone_shows_a_chart_once_there_is_something_in_it(open_page, tokenizer):
    with open_page(speaking(tokenizer, "Hello.\n\n" * 30)) as page, page.seen_on(390, 844):
        page.until(lambda: page["model"].text == "model")
        assert not page["bars"].is_displayed()
        assert page["firing"].size["height"] < 70
        page.ask("Hello.")
        page.until(page.bars)
        assert page["bars"].is_displayed()
        assert page["firing"].size["height"] < 844 / 4
        assert page["log"].size["height"] > 844 / 2
        page.driver.refresh()
        page.until(page.bars)
        unseen = "return at('log').scrollHeight - at('log').scrollTop - at('log').clientHeight"
        page.until(lambda: page.run(unseen) < 2)
        page["fresh"].click()
        page.until(lambda: not page["bars"].is_displayed())


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_it_fits_and_can_be_read(open_page, tokenizer, width, scheme):
    with open_page(speaking(tokenizer)) as page, page.seen_on(width, 640, scheme):
        page["open"].click()
        page.ask("Hello.")
        page.until(page.bars)
        assert page.run("return document.scrollingElement.scrollWidth") <= width
        for name in ("prompt", "send", "strip", "bars", "fresh", "open", "top-p", "seed"):
            box = page[name].rect
            assert box["width"] > 20, name
            assert box["x"] >= 0, name
            assert box["x"] + box["width"] <= width, name
            assert box["y"] + box["height"] <= 700 or name == "strip", name
        ground, ink = (
            page.run(f"return getComputedStyle(document.body).{what}")
            for what in ("backgroundColor", "color")
        )
        assert (brightness(ground) > brightness(ink)) == (scheme == "light")


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))
