"""The pages as they are seen: wide and narrow, light and dark, with a pointer and with keys."""

import profiles
import pytest
from browser import complaints, seen_on

from twellctl.report.of_profile import profile_page

pytest.importorskip("selenium", reason="selenium drives the browser")


@pytest.fixture
def page(chromium, tmp_path):
    layers = [profiles.layer(0.002 * (number + 1)) for number in range(24)]
    found = profiles.profile(*layers)
    (tmp_path / "page.html").write_text(profile_page(found), encoding="utf-8")
    complaints(chromium)
    chromium.get((tmp_path / "page.html").as_uri())
    yield chromium
    assert complaints(chromium) == []
    chromium.get("about:blank")


def brightness(driver, script: str) -> float:
    colour = driver.execute_script(f"return {script}")
    return sum(map(float, colour[colour.index("(") + 1 : -1].split(",")[:3])) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 1280])
def test_it_fits_and_can_be_read(page, width, scheme):
    with seen_on(page, width, 800, scheme):
        assert page.execute_script("return document.scrollingElement.scrollWidth") <= width
        outside = page.execute_script(
            "return [...document.querySelectorAll('text')].filter(text => {"
            "const {left, right} = text.getBoundingClientRect();"
            "return left < 0 || right > innerWidth;}).map(text => text.textContent)"
        )
        assert outside == []
        ground = brightness(page, "getComputedStyle(document.body).backgroundColor")
        ink = brightness(page, "getComputedStyle(document.body).color")
        assert ground - ink > 150 if scheme == "light" else ink - ground > 150
        bar = brightness(page, "getComputedStyle(document.querySelector('.bar')).fill")
        assert abs(bar - ground) > 60


def test_labels_do_not_overlap(page):
    with seen_on(page, 360, 800):
        overlaps = page.execute_script(
            "return [...document.querySelectorAll('.xs')].flatMap(axis => {"
            "const at = [...axis.querySelectorAll('text')].map(t => t.getBoundingClientRect());"
            "const over = at.slice(1).some((next, i) => next.left < at[i].right + 1);"
            "return over ? [axis.textContent] : [];})"
        )
        assert overlaps == []


def test_what_is_pointed_at_is_said(page):
    chart = page.find_element("css selector", ".chart")
    page.execute_script(
        "arguments[0].querySelectorAll('[data-says]')[3].dispatchEvent("
        "new PointerEvent('pointerover', {bubbles: true}))",
        chart,
    )
    says = chart.find_element("class name", "says")
    assert says.text.startswith("layer 3: mean 8.0 neurons (0.800 %)")
    plot = chart.find_element("class name", "plot")
    plot.send_keys("\ue014")  # the right arrow
    assert says.text.startswith("layer 4: ")
    plot.send_keys("\ue00c")  # Escape
    assert says.text == ""
    plot.send_keys("\ue014")
    assert says.text.startswith("layer 0: ")
