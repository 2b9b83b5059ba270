"""The page at /, driven in a real Chromium without a screen."""

import re
import shutil
import time
from contextlib import contextmanager

import pytest
from serving_client import Scripted, get, running

from twellctl.serving import plan
from twellctl.serving.access import Access
from twellctl.serving.plan import ServedModel

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
TEXT = "The gate decides which neurons fire, and only those are read."
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b>\n```'


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("needs Chromium and ChromeDriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.add_argument("--window-size=1280,800")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


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
        self["prompt"].send_keys(text + Keys.ENTER)

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

    def run(self, script: str):
        return self.driver.execute_script(script)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def open_page(chromium, tokenizer):
    """`with open_page(engine) as page`."""

    @contextmanager
    def opened(engine, **settings):
        with running(ServedModel("model", tokenizer, engine), **settings) as client:
            page = Page(chromium, client)
            yield page
            page.run("sessionStorage.clear()")

    return opened


def speaking(tokenizer, text=TEXT, **settings) -> Scripted:
    return Scripted([*tokenizer.encode(text), 0], **settings)


class Flickering(Scripted):
    """Each token's densities differ from those of the one before."""

    def densities(self, place: int) -> tuple[float, ...]:
        return tuple((place * 7 % 11 + 1) * (layer + 1) / 1000 for layer in range(self.num_layers))


def test_it_chats_and_streams_and_shows_what_fired(open_page, tokenizer):
    engine = Flickering([*tokenizer.encode(TEXT), 0], delay=0.03, num_layers=5)
    with open_page(engine) as page:
        page.until(lambda: page["model"].text == "model")
        assert page.bars() == []
        page.say("Why does it pay?")
        texts, bars = [], []
        while not page.all(".told"):
            texts.append(page.answer())
            bars.append(page.bars())
        told = page.done()
        assert page.answer() == TEXT
        assert all(TEXT.startswith(text) for text in texts)
        assert len({text for text in texts if 0 < len(text) < len(TEXT)}) > 3
        seen = {tuple(heights) for heights in bars if heights}
        assert len(seen) > 3
        assert {len(heights) for heights in seen} == {5}
        assert all(list(heights) == sorted(heights) for heights in seen)  # later layers fire more
        count = len(engine.tokens)
        assert told.startswith(f"{count} tokens · ")
        share = 100 * sum(sum(engine.densities(i)) for i in range(count - 1)) / (count - 1) / 5
        assert f"{share:.2f} % of the neurons fired" in told
        page.until(lambda: page["which"].text.startswith(f"token {count - 1} of {count - 1}"))
        assert page.complaints() == []


def test_the_conversation_goes_on_and_begins_anew(open_page, tokenizer, monkeypatch):
    seen = []
    encode = plan.encode_chat
    monkeypatch.setattr(plan, "encode_chat", lambda t, m: seen.append(m) or encode(t, m))
    with open_page(speaking(tokenizer, "Yes.")) as page:
        page["open"].click()
        page["system"].send_keys("Be brief.")
        page["temperature"].clear()
        page["temperature"].send_keys("0")
        page.say("One?")
        page.done()
        page.say("Two?")
        page.until(lambda: len(page.all(".told")) == 2)
        page["fresh"].click()
        assert page.all(".message") == []
        page.say("Three?")
        page.done()
    told = [[(message["role"], message["content"]) for message in messages] for messages in seen]
    system, one, yes = ("system", "Be brief."), ("user", "One?"), ("assistant", "Yes.")
    assert told == [
        [system, one],
        [system, one, yes, ("user", "Two?")],
        [system, ("user", "Three?")],
    ]


def test_a_new_chat_forgets_the_answer_that_was_being_written(open_page, tokenizer, monkeypatch):
    seen = []
    encode = plan.encode_chat
    monkeypatch.setattr(plan, "encode_chat", lambda t, m: seen.append(m) or encode(t, m))
    engine = Scripted(tokenizer.encode("x") * 2000, delay=0.03)
    engine.context = 10_000
    with open_page(engine) as page:
        page.say("One?")
        page.until(lambda: len(page.answer()) > 2)
        page["fresh"].click()
        page.until(lambda: page["send"].is_displayed() and engine.num_running == 0)
        page.say("Two?")
        page.until(lambda: len(seen) == 2)
        assert seen[1] == [{"role": "user", "content": "Two?"}]
        assert len(page.all(".user")) == 1


def test_stop_stops(open_page, tokenizer):
    engine = Scripted(tokenizer.encode("x") * 2000, delay=0.03)
    engine.context = 10_000
    with open_page(engine) as page:
        page.say("Count.")
        page.until(lambda: len(page.answer()) > 5)
        assert not page["send"].is_displayed()
        page["stop"].click()
        assert "stopped" in page.done()
        page.until(lambda: engine.num_running == 0)
        stopped_at = len(page.answer())
        time.sleep(0.2)
        assert len(page.answer()) == stopped_at < 1000
        assert page["send"].is_displayed()
        assert not page["error"].is_displayed()
        page.say("Again.")
        page.until(lambda: len(page.all(".assistant")) == 2)
        page.until(lambda: len(page.answer()) > 2)
        page["prompt"].send_keys(Keys.ESCAPE)
        page.until(lambda: engine.num_running == 0)


def test_markup_stays_text(open_page, tokenizer):
    with open_page(speaking(tokenizer, HOSTILE)) as page:
        page["prompt"].send_keys(HOSTILE.partition("\n")[0] + Keys.ENTER)
        page.done()
        assert page.answer() == HOSTILE
        assert page.all("#log img, #log script, #log b") == []
        assert page.run("return window.hacked") is None
        assert page.all(".user .text")[0].text == HOSTILE.partition("\n")[0]
        page["strip"].send_keys(Keys.ARROW_DOWN)
        assert page.all("#which img, #which b") == []
        # nor could a slip of the page's own do harm
        for slip in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.createElement('img').setAttribute('onerror', 'window.hacked = 1')",
            "document.createElement('script').textContent = 'window.hacked = 1'",
        ):
            caught = page.run(f"try {{ {slip} }} catch (error) {{ return error.name }}")
            assert caught == "TypeError", slip


def test_a_wrong_key_is_told_and_a_right_one_helps(open_page, tokenizer):
    access = Access("geheim")
    with open_page(speaking(tokenizer), access=access, api_key="geheim") as page:
        page.until(lambda: "a key is needed" in page["error"].text)
        assert page.run("return document.activeElement.id") == "key"
        page["key"].send_keys("falsch" + Keys.TAB)
        page.until(lambda: "not this server's" in page["error"].text)
        page["key"].clear()
        page["key"].send_keys("geheim" + Keys.TAB)
        page.until(lambda: page["model"].text == "model")
        assert not page["error"].is_displayed()
        page.say("Hello.")
        page.done()
        assert page.answer() == TEXT
        page.driver.refresh()  # the session keeps it
        page.until(lambda: page["model"].text == "model")


def test_an_error_gives_the_text_back(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        page.until(lambda: page["model"].text == "model")
        page.say("x" * 600)
        page.until(lambda: "context" in page["error"].text)
        assert page["prompt"].get_attribute("value") == "x" * 600
        assert page.all(".message") == []
        page["prompt"].clear()
        page.say("Hello.")
        page.done()
        assert not page["error"].is_displayed()


def test_a_model_without_a_chat_template_goes_on_from_text(open_page, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with open_page(speaking(tokenizer, " end.")) as page:
        page.until(lambda: page["prompt"].get_attribute("placeholder").startswith("Text for"))
        page.say("The")
        page.done()
        assert page.answer() == " end."
        assert page.bars()
        page["open"].click()
        assert not page["system"].is_displayed()
        assert page.complaints() == []


def test_pointing_at_a_token_shows_its_densities(open_page, tokenizer):
    engine = speaking(tokenizer)
    with open_page(engine) as page:
        page.say("Hello.")
        page.done()
        last = len(engine.tokens) - 1
        title = "return document.querySelectorAll('.layer')[2].title"
        page.until(lambda: page["which"].text.startswith(f"token {last} of {last}"))
        ActionChains(page.driver).move_to_element(page.all(".token")[3]).perform()
        page.until(lambda: page["which"].text.startswith(f"token 4 of {last}"))
        assert page.run(title).startswith(f"layer 2: {100 * engine.densities(3)[2]:.2f} %, mean ")
        ActionChains(page.driver).move_to_element(page["prompt"]).perform()
        page.until(lambda: page["which"].text.startswith(f"token {last} of"))
        page["strip"].send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
        page.until(lambda: page["which"].text.startswith(f"token {last - 2} of"))
        assert page.all(".token.picked")[0].text.strip() in TEXT
        page["strip"].send_keys(Keys.ESCAPE)
        page.until(lambda: page["which"].text.startswith(f"token {last} of"))
        # the newest token is the strip's first row, and the one that fired most
        pixels = page.run(
            "const c = document.getElementById('strip'), p = c.getContext('2d');"
            "return [1, 40].map(y => p.getImageData(c.width - 4, y, 1, 1).data[0])"
        )
        assert pixels[0] < pixels[1]  # darker


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(open_page, tokenizer, width, scheme):
    with open_page(speaking(tokenizer)) as page:
        size = {"width": width, "height": 640, "deviceScaleFactor": 1, "mobile": False}
        scheme_feature = [{"name": "prefers-color-scheme", "value": scheme}]
        try:
            page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme_feature})
            page["open"].click()
            page.say("Hello.")
            page.done()
            page.until(page.bars)
            assert page.run("return document.scrollingElement.scrollWidth") <= width
            for name in ("prompt", "send", "strip", "bars", "fresh", "open", "key"):
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
        finally:
            page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_it_loads_nothing_else(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        page.say("Hello.")
        page.done()
        loaded = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
        assert loaded
        assert all(url.startswith((page.url, "data:")) for url in loaded)


def test_its_policy_names_its_script_and_style_alone(tokenizer):
    with running(ServedModel("model", tokenizer, Scripted([5]))) as client:
        answer = get(client, "/")
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    for directive in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[directive])
    assert b"http://" not in answer.body
    assert b"https://" not in answer.body
    assert b"innerHTML" not in answer.body
