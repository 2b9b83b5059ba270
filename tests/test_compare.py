"""compare: answers side by side, where they part, and what is said of models that agree."""

import shutil
import sys

import pytest

from twellctl.compare import PROMPTS, compare
from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.answers import Answer
from twellctl.models import verdict


def test_a_model_agrees_with_itself(success, silu_llama):
    out, _ = success("compare", silu_llama, silu_llama, "--limit", 2, "--max-tokens", 8)
    shown = out.splitlines()
    assert shown[0] == f"1. {PROMPTS[0]}"
    assert shown[1].startswith("   the same to the end, 8 tokens: ")
    assert "KL 0.0000" in out
    assert "2 of 2 agree to the end; " in out
    assert shown[-1].startswith(f"{silu_llama}: {verdict.STEPS[0][1]}")


def test_it_shows_where_answers_part(success, silu_llama, relu_llama, tokenizer, monkeypatch):
    said = {
        "silu": ["the sum is 391.", "<b>", "one two three"],
        "relu": ["the sum is 401.", "Yes, and more", "one two two" + " two" * 60],
    }

    def spoken(model, tokenizer, prompts, max_tokens, progress):
        texts = said[model.config.hidden_act]
        return [Answer(tuple(tokenizer.encode(text)), text, ended=len(text) < 40) for text in texts]

    monkeypatch.setattr(sys.modules["twellctl.compare"], "answers", spoken)
    out, _ = success("compare", silu_llama, relu_llama, "--limit", 3)
    shown = out.splitlines()
    same = tokenizer.encode("the sum is 391."), tokenizer.encode("the sum is 401.")
    tokens = next(i for i, (a, b) in enumerate(zip(*same, strict=False)) if a != b)
    assert shown[1] == f"   the same for {tokens} tokens, behind ...'the sum is'"
    assert shown[2:4] == [f"   {silu_llama}: 391.", f"   {relu_llama}: 401."]
    assert shown[6] == "   the same for 0 tokens"
    assert shown[12].endswith("three")
    assert shown[13].endswith("[repeats itself]")
    assert "0 of 3 agree to the end" in out
    assert "(the reference's: 3), 1 repeat (0)" in out
    found = compare(silu_llama, relu_llama, limit=3)
    page = found._repr_html_()  # of a notebook
    assert all(f"<td>{text}</td>" in page for text in ("391., 401.", "&lt;b&gt;, Yes, and more"))
    assert f"<td>{found.score.verdict}</td>" in page


def test_what_cannot_be_compared_is_refused(silu_llama, make_model, tmp_path):
    with pytest.raises(UsageError, match="limit must be >= 1, got 0"):
        compare(silu_llama, silu_llama, limit=0)
    other = make_model("llama", vocab_size=600)
    with pytest.raises(TwellError, match=r"the second model .* has another tokenizer than"):
        compare(silu_llama, other)


@pytest.mark.parametrize("command", ["compare", "eval"])
def test_the_chat_template_knows_what_it_is_told(cli, silu_llama, tmp_path, monkeypatch, command):
    shutil.copytree(silu_llama, tmp_path / "model")
    template = "{{ messages[0].content }}{% if thinks %} I think so:{% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Is it?"}')
    words = [tmp_path / "model", "--reference"] if command == "eval" else [tmp_path / "model"]
    asked = []

    def answers(model, tokenizer, prompts, *_, **__):
        asked.extend(tokenizer.decode(prompt) for prompt in prompts)
        raise TwellError("enough")

    monkeypatch.setattr(sys.modules["twellctl.compare"], "answers", answers)
    monkeypatch.setattr("twellctl.evaluation.agreement.answers", answers)
    words += [tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl"]
    code, _, err = cli(command, *words, "--chat-template-kwargs", '{"thinks": true}')
    assert (code, asked) == (1, ["Is it? I think so:"]), err
    code, _, err = cli(command, *words, "--chat-template-kwargs", "thinks")
    assert (code, asked[1:]) == (2, []), err
