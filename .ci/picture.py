"""Draws README's picture: the page of serve-local, and what fired for a model's answer.

    python .ci/picture.py MODEL OUT.png [PROMPT]

MODEL is any ReLU model, such as quickstart's demo/export. Needs what the tests need, and Chromium
with ChromeDriver.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from browser import start_chromium
from page_driver import Page
from serving_client import running

from twellctl.models.checkpoint import open_checkpoint
from twellctl.serve_local import load_served_model

SIZE = (1160, 520)
SETTINGS = {"temperature": 0.5, "seed": 2, "max-tokens": 60}


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("model")
    given.add_argument("out", type=Path)
    given.add_argument("prompt", nargs="?")
    given = given.parse_args()
    served = load_served_model(open_checkpoint(given.model))
    with tempfile.TemporaryDirectory() as folder, running(served) as client:
        driver = start_chromium(Path(folder))
        page = Page(driver, client)
        with page.seen_on(*SIZE):
            example = page.until(lambda: page["example"].text)
            for name, value in SETTINGS.items():
                page.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)
            page.say(given.prompt or example)
            page.until(lambda: page.all(".told"), 600)
            given.out.write_bytes(driver.get_screenshot_as_png())
        driver.quit()


if __name__ == "__main__":
    main()
