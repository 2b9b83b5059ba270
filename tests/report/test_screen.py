"""The pages as they are seen: wide and narrow, light and dark."""

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
        ground = brightness(page, "getComputedStyle(document.body).backgroundColor")
        ink = brightness(page, "getComputedStyle(document.body).color")
        assert ground - ink > 150 if scheme == "light" else ink - ground > 150
