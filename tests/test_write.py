"""write on the CPU: questions and answers of a chat model, texts of others, what is refused."""

import json
import shutil

import pytest

from twellctl.errors import TwellError, UsageError
from twellctl.models import loading
from twellctl.models.checkpoint import open_checkpoint
from twellctl.text.data import read_texts
from twellctl.text.tokens import encode_chat
from twellctl.write import QUESTION_TOKENS, write

SMALL = {"tokens": 600, "max_tokens": 12, "batch_size": 5}


@pytest.fixture(scope="module")
def plain(silu_llama, tmp_path_factory):
    """The same model without a chat template."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(silu_llama, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_chat_model_writes_questions_and_answers(silu_llama, tokenizer, tmp_path):
    out = tmp_path / "own.jsonl"
    done = write(silu_llama, out, **SMALL)
    rows = lines(out)
    assert (done.out, done.texts) == (out, len(rows))
    assert 600 <= done.tokens < 600 + 200
    for row in rows:
        question, answer = row["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"].strip()
        assert answer["content"].strip()
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)  # all different
    assert len(list(read_texts([str(out)], "text", tokenizer))) == len(rows)  # as finetune reads it


def test_an_answer_is_what_the_model_says_behind_the_question(silu_llama, tokenizer, tmp_path):
    """At a temperature next to 0 it is the greedy one of transformers."""
    out = tmp_path / "own.jsonl"
    write(silu_llama, out, tokens=1, max_tokens=12, batch_size=1, temperature=1e-4)
    question, answer = lines(out)[0]["messages"]
    stock = loading.load_model(open_checkpoint(silu_llama))
    prompt = encode_chat(tokenizer, [question])
    ids = stock.generate(
        stock.dummy_inputs["input_ids"].new_tensor([prompt]), do_sample=False, max_new_tokens=12
    )
    said = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
    assert answer["content"] == said.strip()


def test_a_model_without_a_template_writes_texts(plain, tmp_path):
    out = tmp_path / "own.jsonl"
    done = write(plain, out, **SMALL)
    assert done.texts > 20
    assert all(list(row) == ["text"] and row["text"].strip() for row in lines(out))


def test_a_seed_gives_its_texts_however_many_are_written_at_once(plain, tmp_path):
    def texts(name: str, **how) -> set[str]:
        out = tmp_path / f"{name}.jsonl"
        write(plain, out, **(SMALL | how))
        return {row["text"] for row in lines(out)}

    first, again, other = texts("a"), texts("b", batch_size=3), texts("c", seed=1)
    assert len(first & again) > 0.8 * len(first)
    assert not first & other


def test_what_is_there_is_not_replaced_unasked(silu_llama, cli, tmp_path):
    out = tmp_path / "own.jsonl"
    out.write_text("mine\n")
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    code, _, err = cli("write", silu_llama, out, *flags)
    assert (code, out.read_text()) == (1, "mine\n")
    assert "exists" in err[-1]
    code, said, _ = cli("write", silu_llama, out, *flags, "--overwrite")
    assert code == 0
    assert f"{out}: {len(lines(out))} texts, " in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": 0}, "tokens must be 1 or more"),
        ({"max_tokens": 0}, "max-tokens must be 1 or more"),
        ({"batch_size": 0}, "batch-size must be 1 or more"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"seed": -1}, "seed must be 0 to"),
    ],
)
def test_wrong_numbers_are_refused(silu_llama, tmp_path, wrong, said):
    with pytest.raises(UsageError, match=said):
        write(silu_llama, tmp_path / "own.jsonl", **(SMALL | wrong))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_or_does_not_fit_is_refused(silu_llama, plain, tmp_path):
    with pytest.raises(UsageError, match=r"no \.jsonl file"):
        write(silu_llama, tmp_path / "own.txt")
    most = 256 - QUESTION_TOKENS
    for model, max_tokens in ((silu_llama, most), (plain, 256)):
        with pytest.raises(TwellError, match="lower --max-tokens"):
            write(model, tmp_path / "own.jsonl", tokens=10, max_tokens=max_tokens)
