"""The page at / as the tests see it, in a real Chromium without a screen."""

import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving_client import Scripted

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)

TEXT = "The gate decides which neurons fire, and only those are read."


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


class Page:
    """What the tests see of it and do to it."""

    def __init__(self, driver, client):
        self.driver, self.url = driver, str(client.base_url).removesuffix("v1/")
        self.complaints()  # of the page before
        driver.get(self.url)

    def __getitem__(self, name: str):
        return self.driver.find_element("id", name)

    def all(self, selector: str):
        return self.driver.find_elements("css selector", selector)

    def say(self, text: str) -> None:
        self["prompt"].send_keys(text + "\ue007")

    def until(self, true, seconds: float = 10):
        """What `true()` gives once it gives something."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < deadline, self["log"].text + self["error"].text
            time.sleep(0.02)
        return found

    def answer(self) -> str:
        return self.run("return [...document.querySelectorAll('.text')].at(-1).textContent")

    def done(self) -> str:
        """The line under the last answer, once it is there."""
        return self.until(lambda: self.all(".message:last-child .told"))[0].text

    def bars(self) -> list[float]:
        script = "return [...document.querySelectorAll('.bar')].map(b => b.offsetHeight)"
        return self.run(script)

    def run(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    @contextmanager
    def seen_on(self, width: int, height: int, scheme: str = "light"):
        """As on a screen of that size, by someone who likes it light or dark."""
        do = self.driver.execute_cdp_cmd
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        try:
            do("Emulation.setDeviceMetricsOverride", size)
            do("Emulation.setEmulatedMedia", {"features": features})
            yield
        finally:
            do("Emulation.clearDeviceMetricsOverride", {})
            do("Emulation.setEmulatedMedia", {"features": []})

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


def speaking(tokenizer, text=TEXT, **settings) -> Scripted:
    return Scripted([*tokenizer.encode(text), 0], **settings)
