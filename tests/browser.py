"""A real Chromium without a screen, for the tests of pages."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)


def start_chromium(profile: Path):
    """A driver of it, made for tests; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("needs Chromium and ChromeDriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.add_argument("--window-size=1280,800")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


@contextmanager
def seen_on(driver, width: int, height: int, scheme: str = "light"):
    """As on a screen of that size, by someone who likes it light or dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def complaints(driver) -> list[str]:
    """What the browser found wrong since it was asked last."""
    return [entry["message"] for entry in driver.get_log("browser")]
