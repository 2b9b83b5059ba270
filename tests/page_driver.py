"""The page at / as the tests see it."""

import time

from browser import complaints, seen_on
from serving_client import Scripted

TEXT = "The gate decides which neurons fire, and only those are read."


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
            time.sleep(0.04)
        return found

    def answer(self) -> str:
        return self.run("return [...document.querySelectorAll('.text')].at(-1).textContent")

    def texts(self, selector: str) -> list[str]:
        """Of elements that may be gone at once."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
        return self.run(script, selector)

    def done(self) -> str:
        """The line under the last answer, once it is there."""
        return self.until(lambda: self.all(".message:last-child .caption"))[0].text

    def ask(self, text: str) -> str:
        self.say(text)
        return self.done()

    def bars(self) -> list[float]:
        script = "return [...document.querySelectorAll('.bar')].map(b => b.offsetHeight)"
        return self.run(script)

    def run(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def seen_on(self, width: int, height: int, scheme: str = "light"):
        return seen_on(self.driver, width, height, scheme)

    def complaints(self) -> list[str]:
        return complaints(self.driver)


def speaking(tokenizer, text=TEXT, **settings) -> Scripted:
    return Scripted([*tokenizer.encode(text), 0], **settings)
