""".ci/picture.py: what is recorded of a tiny model on the CPU, and what the picture says of it."""

import json
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from edits import jsonl
from fits import fits_of

from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.rounds import Drafts
from twellctl.errors import TwellError

CI = Path(__file__).resolve().parent.parent / ".ci"
pytestmark = pytest.mark.skipif(not CI.is_dir(), reason="no checkout around the tests")
NUM = 20  # tokens of an answer
HOSTILE = "</text><script>alert('&')</script>\x00\u202e]]>\n\tdone 日本"


@pytest.fixture(scope="module")
def drawn():
    return runpy.run_path(str(CI / "side_by_side.py"))["drawn"]


def answer(
    each: float, drafter: str | None = None, other_from: int = NUM, text: str = "is "
) -> dict:
    """`NUM` tokens, `each` ms one; from one on with other ids."""
    tokens = [
        {"id": n + (n >= other_from), "text": text, "ms": each * n, "draft": drafter if n else None}
        for n in range(NUM)
    ]
    return {"tokens_per_second": 1000 / each, "tokens": tokens}


def recorded(*gains: float, right: bool = True, other_from: int = NUM, text: str = "is ") -> dict:
    """Of prompts of which the original answers at 1,250 tokens a second."""
    found = {
        "device": "NVIDIA <H200>",
        "original": "Some-1.5B",
        "drafted": "drafted in 4 bits",
        "prompts": [],
    }
    for gain in gains:
        exact = answer(0.8 / gain, "lookup", text=text)
        forms = {"original": answer(0.8, None, other_from, text), "exact": exact}
        row = {"kind": "edit", "prompt": f"Make it {gain}.\nAll of it.", "forms": forms}
        found["prompts"].append(row | {"exact_is_stable": right})
    return found


def texts(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    return ["".join(element.itertext()) for element in root.iter() if "text" in element.tag]


def rects(svg: str, looks: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(svg).iter() if element.get("class") == looks]


def test_a_picture_says_what_was_recorded(drawn):
    said = texts(svg := drawn(recorded(2, 3.2, 2.5), "edit"))
    assert {"1,250tokens/s", "3,125tokens/s", "6 ms", "all 20 tokens"} <= {*said}  # of 2.5x
    assert {"8 of 20 tokens", "through at 15 ms", "through at 6 ms", "Make it 2.5. …"} <= {*said}
    assert {"the original", "the original with --exact"} <= {*said}
    assert "kept: 19 copied from the text, 0 drafted in 4 bits" in said
    assert "2.5x as fast; over 3 such prompts 2.0x to 3.2x, median 2.5x" in said
    assert said[-1] == (
        "Some-1.5B, one NVIDIA <H200>, one greedy sequence, timed from the first token. Every "
        "token is the same."
    )
    assert rects(svg, "kept tint")
    assert not rects(svg, "differs tint")
    assert "prefers-color-scheme: dark" in svg


def test_a_picture_says_what_drafted(drawn):
    found = recorded(2) | {"drafted": "drafted by its draft head"}
    for token in found["prompts"][0]["forms"]["exact"]["tokens"][5:9]:
        token["draft"] = "head"
    said = texts(drawn(found, "edit"))
    assert "kept: 15 copied from the text, 4 drafted by its draft head" in said


def test_where_the_fastest_form_differs_is_marked(drawn):
    found = recorded(2, 2.1, other_from=5)
    assert rects(svg := drawn(found, "edit"), "differs tint")
    assert "Same up to token 5, then marked." in texts(svg)[-1]
    same = recorded(4)
    found["prompts"] += same["prompts"]  # not in the middle, but the same to the end
    assert "4.0x as fast" in " ".join(texts(drawn(found, "edit")))


def test_what_a_model_says_stays_text(drawn):
    found = recorded(2, text=HOSTILE)
    found["prompts"][0]["prompt"] = found["original"] = HOSTILE
    said = texts(svg := drawn(found, "edit"))
    assert "<script" not in svg
    assert "</text><script>alert('&')</script>\ufffd\ufffd]]>" in said
    assert "    done 日本</text><script>alert('&')</script>\ufffd\ufffd]]>" in said
    assert "… 4 more lines" in said


def test_what_cannot_be_drawn_is_refused(drawn):
    with pytest.raises(TwellError, match="no prompt is of kind chat: there are edit"):
        drawn(recorded(2), "chat")
    with pytest.raises(TwellError, match="is not the stable original's"):
        drawn(recorded(2, right=False), "edit")


def always_drafting(**how):
    """Here drafts do not pay."""
    return open_scheduler(drafts=Drafts(3) if "draft" in how else None, **how)


def test_a_tiny_model_is_recorded_and_drawn(
    silu_llama, text_file, tmp_path, tmp_path_factory, monkeypatch, capsys
):
    fit = fits_of(silu_llama, text_file, tmp_path_factory, {"fit": {}})["fit"]
    rows = [{"prompt": "class A:\n    x = 1\n", "kind": "code"}, {"prompt": "a", "kind": "chat"}]
    prompts, out, svg = jsonl(tmp_path / "p.jsonl", rows), tmp_path / "o.json", tmp_path / "p.svg"
    monkeypatch.syspath_prepend(str(CI))
    script = runpy.run_path(str(CI / "picture.py"))
    monkeypatch.setitem(script["record"].__globals__, "open_scheduler", always_drafting)
    script["record"](str(silu_llama), str(fit), prompts, out, tokens=12, device="cpu", commit="abc")
    found = json.loads(out.read_text())
    assert (found["device"], found["commit"]) == ("CPU", "abc")
    assert found["drafted"] == "drafted in 16 bits"
    assert (found["original"], found["draft"]) == (silu_llama.name, fit.name)
    assert [row["kind"] for row in found["prompts"]] == ["code", "chat"]
    for row in found["prompts"]:
        assert row["exact_is_stable"]
        assert [*row["forms"]] == ["original, stable", "original", "exact", "fit alone"]
        for form in row["forms"].values():
            times = [token["ms"] for token in form["tokens"]]
            assert times[0] == 0
            assert times == sorted(times)
            assert form["tokens_per_second"] == pytest.approx(
                1000 * sum(time > 0 for time in times) / times[-1], rel=1e-3
            )
        exact = row["forms"]["exact"]["tokens"]
        assert {token["draft"] for token in exact} == {None, "fit"}
    script["draw"](out, svg, "code")
    rate = found["prompts"][0]["forms"]["exact"]["tokens_per_second"]
    assert f"{rate:,.0f}tokens/s" in texts(svg.read_text())
    assert capsys.readouterr().out.count("exact is stable") == 2
