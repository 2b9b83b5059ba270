"""The page at /: it chats, shows what fired, keeps the chat, and lets no text do harm."""

import re
import time

import pytest
from page_driver import TEXT, speaking
from serving_client import Scripted, get, serving

from twellctl.serving.access import Access

pytest.importorskip("selenium", reason="selenium drives the browser")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b>\n```'


class Flickering(Scripted):
    """Each token's densities differ from those of the one before."""

    def densities(self, place: int) -> tuple[float, ...]:
        return tuple((place * 7 % 11 + 1) * (layer + 1) / 1000 for layer in range(self.num_layers))


def test_it_chats_and_streams_and_shows_what_fired(open_page, tokenizer):
    engine = Flickering([*tokenizer.encode(TEXT), 0], delay=0.03, num_layers=5)
    with open_page(engine) as page:
        page.until(lambda: page["model"].text == "model")
        assert page.bars() == []
        page["open"].click()
        assert not page["key"].is_displayed()  # none is asked for
        page.say("Why does it pay?")
        texts, bars, paces = [], [], []
        while not page.all(".caption"):
            texts.append(page.answer())
            bars.append(page.bars())
            paces += page.texts(".pace")
            time.sleep(0.05)
        figures = page.done()
        assert page.answer() == TEXT
        assert all(TEXT.startswith(text) for text in texts)
        assert len({text for text in texts if 0 < len(text) < len(TEXT)}) > 3
        told = [re.fullmatch(r"(\d+) tokens · (\d+\.\d) tokens/s", pace) for pace in paces]
        rates = [(int(one[1]), float(one[2])) for one in told if one]
        assert len(set(rates)) > 3
        assert rates == sorted(rates, key=lambda rate: rate[0])
        assert page.all(".pace") == []
        seen = {tuple(heights) for heights in bars if heights}
        assert len(seen) > 3
        assert {len(heights) for heights in seen} == {5}
        assert all(list(heights) == sorted(heights) for heights in seen)  # later layers fire more
        count = len(engine.tokens)
        assert figures.startswith(f"{count} tokens · ")
        share = 100 * sum(sum(engine.densities(i)) for i in range(count - 1)) / (count - 1) / 5
        assert f"{share:.2f} % of the neurons fired" in figures
        page.until(lambda: page["which"].text.startswith(f"token {count - 1} of {count - 1}"))
        assert page.complaints() == []


def test_the_conversation_goes_on_and_begins_anew(open_page, tokenizer, seen):
    with open_page(speaking(tokenizer, "Yes.")) as page:
        page["open"].click()
        page["system"].send_keys("Be brief.")
        page["temperature"].clear()
        page["temperature"].send_keys("0")
        page.ask("One?")
        page.say("Two?")
        page.until(lambda: len(page.all(".caption")) == 2)
        page["fresh"].click()
        assert page.all(".message") == []
        page.ask("Three?")
    chats = [[(message["role"], message["content"]) for message in messages] for messages in seen]
    system, one, yes = ("system", "Be brief."), ("user", "One?"), ("assistant", "Yes.")
    assert chats == [
        [system, one],
        [system, one, yes, ("user", "Two?")],
        [system, ("user", "Three?")],
    ]


def test_a_new_chat_forgets_the_answer_that_was_being_written(open_page, tokenizer, seen):
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


def test_code_is_shown_apart_from_its_first_token_on(open_page, tokenizer):
    text = "Use **this** one:\n\n```python\nx = 1\nreturn x\n```\n\nor that."
    with open_page(speaking(tokenizer, text, delay=0.04)) as page:
        page.say("Which?")
        page.until(lambda: page.all("#log pre"))
        page.run("document.querySelector('#log pre').mark = 'the same'")
        seen = []
        while not page.all(".caption"):
            seen.append(page.answer())
            time.sleep(0.05)
        page.done()
        assert len(set(seen)) > 3
        assert not any("```" in text for text in seen)
        assert page.run("return document.querySelector('#log pre').mark") == "the same"
        assert page.all("pre code")[0].get_property("textContent") == "x = 1\nreturn x"
        assert "monospace" in page.all("pre code")[0].value_of_css_property("font-family")
        assert [p.text for p in page.all(".assistant p:not(.caption)")][-1] == "or that."
        # what was set apart is still linked to its tokens
        ActionChains(page.driver).move_to_element(page.all("pre .token")[-1]).perform()
        page.until(lambda: page.all("pre .token.picked"))
        assert page.complaints() == []


def test_a_chat_outlives_a_reload_and_can_be_cleared(open_page, tokenizer, seen):
    with open_page(speaking(tokenizer, "**Yes.**")) as page:
        page["open"].click()
        page["temperature"].clear()
        page["temperature"].send_keys("0")
        figures = page.ask("One?")
        bars = page.until(page.bars)
        page.driver.refresh()
        assert page.done() == figures
        assert [part.text for part in page.all(".text")] == ["One?", "**Yes.**"]
        page.until(lambda: page.bars() == bars)
        assert page["temperature"].get_attribute("value") == "0"
        page.say("Two?")
        page.until(lambda: len(page.all(".caption")) == 2)
        assert [message["content"] for message in seen[-1]] == ["One?", "**Yes.**", "Two?"]
        page["fresh"].click()
        page.driver.refresh()
        page.until(lambda: page["model"].text == "model")
        assert page["empty"].is_displayed()
        assert page.all(".message") == []
        assert page.complaints() == []


def test_a_reload_within_an_answer_keeps_what_was_there(open_page, tokenizer):
    engine = Scripted(tokenizer.encode("x") * 2000, delay=0.03)
    engine.context = 10_000
    with open_page(engine) as page:
        page.say("Count.")
        page.until(lambda: len(page.answer()) > 3)
        page.driver.refresh()
        assert "broken off" in page.done()
        assert 3 < len(page.answer()) < 100
        assert set(page.answer()) == {"x"}
        page.until(lambda: engine.num_running == 0)


def test_a_chat_with_another_model_is_not_taken_up(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        page.ask("One?")
        page.run("model.id = 'another'")  # what is kept as the page goes
        page.driver.refresh()
        page.until(lambda: page["model"].text == "model")
        assert page.all(".message") == []


def test_what_was_kept_and_makes_no_sense_is_forgotten(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        for kept in ("no JSON", '{"model": "model", "chat": true, "turns": [{}]}'):
            page.until(lambda: page["model"].text == "model")
            page.run("save = () => {}; sessionStorage.setItem(CHAT, arguments[0])", kept)
            page.driver.refresh()
            page.until(lambda: page["model"].text == "model")
            assert page.all(".message") == []
        page.ask("Hello.")
        assert page.answer() == TEXT
        assert page.complaints() == []


def test_a_chat_too_long_to_keep_is_kept_without_its_densities(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        page.ask("One?")
        kept = page.run(
            "turns[0].answer.pieces[0].densities = [Array(1_000_000).fill(0.12345)]; save();"
            "return sessionStorage.getItem(CHAT)"
        )
        assert "One?" in kept
        assert "tokens/s" in kept  # a number that is not of densities
        assert "0.12345" not in kept


def test_the_settings_reach_the_engine(open_page, tokenizer):
    engine = speaking(tokenizer)
    with open_page(engine) as page:
        page["open"].click()
        page.until(lambda: page["model"].text == "model")
        for name, value in {"temperature": "0.5", "top-p": "0.25", "seed": "7"}.items():
            page[name].clear()
            page[name].send_keys(value)
        page.ask("One?")
        page["seed"].clear()
        page.say("Two?")
        page.until(lambda: len(page.all(".caption")) == 2)
        page["open"].click()
        page.run("at('top-p').value = 2")
        page.say("Three?")
        assert page["top-p"].is_displayed()  # with what the browser has to say of it
    one, two = engine.samplings
    assert (one.temperature, one.top_p, one.seed) == (0.5, 0.25, 7)
    assert (two.temperature, two.top_p, two.seed) == (0.5, 0.25, None)


def test_an_empty_chat_has_an_example(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        page.until(lambda: page["example"].is_displayed())
        example = page["example"].text
        page["example"].send_keys(Keys.ENTER)
        page.done()
        assert page.all(".user .text")[0].text == example
        assert not page["example"].is_displayed()
        page["fresh"].click()
        assert page["example"].is_displayed()


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
        assert page.answer() == HOSTILE.removesuffix("\n```")  # which opens a block of code
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


def test_a_wrong_key_is_reported_and_a_right_one_helps(open_page, tokenizer):
    access = Access("geheim")
    with open_page(speaking(tokenizer), access=access, api_key="geheim") as page:
        page.until(lambda: "A key is needed" in page["error"].text)
        assert page.run("return document.activeElement.id") == "key"
        described_by = page["key"].get_attribute("aria-describedby")
        assert "TWELL_API_KEY" in page[described_by].text
        page["key"].send_keys("falsch" + Keys.TAB)
        page.until(lambda: "not this server's" in page["error"].text)
        page["key"].clear()
        page["key"].send_keys("geheim" + Keys.TAB)
        page.until(lambda: page["model"].text == "model")
        assert not page["error"].is_displayed()
        page.ask("Hello.")
        assert page.answer() == TEXT
        page.driver.refresh()  # the session keeps it
        page.until(lambda: page["model"].text == "model")


def test_an_error_gives_the_text_back(open_page, tokenizer):
    with open_page(speaking(tokenizer)) as page:
        page.until(lambda: page["model"].text == "model")
        page.run("at('prompt').value = 'x'.repeat(600)")  # a driver types slowly
        page.say("")
        page.until(lambda: "context" in page["error"].text)
        assert page["prompt"].get_attribute("value") == "x" * 600
        assert page.all(".message") == []
        page["prompt"].clear()
        page.ask("Hello.")
        assert not page["error"].is_displayed()


def test_a_model_without_a_chat_template_goes_on_from_text(open_page, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with open_page(speaking(tokenizer, " end.")) as page:
        page.until(lambda: page["prompt"].get_attribute("placeholder").startswith("Text for"))
        page.ask("The")
        assert page.answer() == " end."
        assert page.bars()
        page["open"].click()
        assert not page["system"].is_displayed()
        assert page.complaints() == []


def test_pointing_at_a_token_shows_its_densities(open_page, tokenizer):
    engine = speaking(tokenizer)
    with open_page(engine) as page:
        page.ask("Hello.")
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


def test_its_policy_names_its_script_and_style_alone(tokenizer):
    with serving(tokenizer, Scripted([5])) as client:
        answer = get(client, "/")
    parts = answer.headers["Content-Security-Policy"].split(";")
    policy = dict(part.strip().split(" ", 1) for part in parts)
    assert policy["default-src"] == "'none'"
    for directive in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[directive])
    assert b"http://" not in answer.body
    assert b"https://" not in answer.body
    assert b"innerHTML" not in answer.body
    assert len(answer.body) < 50_000
