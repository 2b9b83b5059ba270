"""write on the CPU: a model's chats and documents, where they end, what is refused."""

import copy
import json
import os
import resource
import shutil
import sys

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from twellctl.decoding.batch import Batch
from twellctl.decoding.bulk import Bulk
from twellctl.drawn import QUESTION_TOKENS, Chats, Documents
from twellctl.errors import TwellError, UsageError
from twellctl.models import loading
from twellctl.models.checkpoint import open_checkpoint
from twellctl.text.reading import read_texts
from twellctl.text.tokens import encode_chat
from twellctl.write import write

SMALL = {"tokens": 600, "documents": 0.0, "max_tokens": 12, "batch_size": 16}
OURS = '{"text": "so", "by": "twellctl write"}\n'
INST = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.fixture
def changed(silu_llama, tmp_path):
    """`changed(template)`: the model with another chat template, or with none."""

    def change(template: str | None):
        folder = tmp_path / "model"
        shutil.copytree(silu_llama, folder)
        file = folder / "chat_template.jinja"
        file.unlink() if template is None else file.write_text(template)
        return folder

    return change


def lines(path) -> list[dict]:
    with path.open(encoding="utf-8") as file:  # str.splitlines would part them at U+0085, too
        return [json.loads(line) for line in file]


def chats(path) -> list[tuple[str, str]]:
    """Questions and answers."""
    rows = [row["messages"] for row in lines(path)]
    assert all([turn["role"] for turn in row] == ["user", "assistant"] for row in rows)
    return [(question["content"], answer["content"]) for question, answer in rows]


def test_a_model_writes_questions_and_answers(silu_llama, tokenizer, tmp_path):
    out = tmp_path / "own.jsonl"
    done = write(silu_llama, out, **SMALL)
    made = chats(out)
    assert (done.out, done.texts) == (out, len(made))
    assert 600 <= done.tokens < 600 + 2 * 256  # what is begun is written to its end
    assert all(question.strip() and answer.strip() for question, answer in made)
    assert len({question for question, _ in made}) == len(made)  # all different
    assert len(list(read_texts([str(out)], "text", tokenizer))) == len(made)  # as finetune reads it


def test_an_answer_is_what_the_model_says_behind_the_question(silu_llama, tokenizer, tmp_path):
    """At a temperature next to 0 it is the greedy one of transformers."""
    out = tmp_path / "own.jsonl"
    write(silu_llama, out, **SMALL | {"tokens": 1, "batch_size": 1}, temperature=1e-4)
    ((question, answer),) = chats(out)
    stock = loading.load_model(open_checkpoint(silu_llama))
    prompt = encode_chat(tokenizer, [{"role": "user", "content": question}])
    ids = stock.generate(
        stock.dummy_inputs["input_ids"].new_tensor([prompt]), do_sample=False, max_new_tokens=12
    )
    said = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
    assert answer == said.strip()


def test_half_of_what_a_chat_model_writes_are_documents(silu_llama, tokenizer, tmp_path):
    out = tmp_path / "own.jsonl"
    done = write(silu_llama, out, **SMALL | {"tokens": 2000, "documents": None})
    rows = lines(out)
    texts = [row["text"] for row in rows if set(row) == {"text", "by"}]
    assert 0.4 * done.texts < len(texts) < 0.6 * done.texts
    chats = [row for row in rows if set(row) == {"messages", "by"}]
    assert len(texts) + len(chats) == len(rows) == done.texts
    assert len({text[:2] for text in texts}) > 0.7 * len(texts)  # by their first tokens
    for column in ("text", "content"):  # as finetune reads it
        assert len(list(read_texts([str(out)], column, tokenizer))) == len(rows)
    assert all(row["by"] == "twellctl write" for row in rows)
    out.write_text(json.dumps({"text": "a", "body": "b"}) + "\n")
    with pytest.raises(TwellError, match="no text in 'content', only text, body"):
        list(read_texts([str(out)], "content", tokenizer))


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_a_model_without_a_chat_template_writes_documents(changed, tmp_path, max_tokens):
    out = tmp_path / "own.jsonl"
    done = write(changed(None), out, **SMALL | {"documents": None, "max_tokens": max_tokens})
    assert [set(row) for row in lines(out)] == [{"text", "by"}] * done.texts


def test_a_document_is_what_the_model_says_behind_its_first_token(silu_llama, tokenizer, tmp_path):
    """At a temperature next to 0 it is the greedy one of transformers."""
    out = tmp_path / "own.jsonl"
    one = {"tokens": 1, "documents": 1.0, "batch_size": 1}
    write(silu_llama, out, **SMALL | one, temperature=1e-4)
    text = json.loads(out.read_text("utf-8"))["text"]
    stock = loading.load_model(open_checkpoint(silu_llama))
    first = tokenizer.encode(text, add_special_tokens=False)[:1]
    ids = stock.dummy_inputs["input_ids"].new_tensor([first])
    ids = stock.generate(ids, do_sample=False, max_new_tokens=12)[0]
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("single", ["F $A", "F $A E"])
def test_documents_begin_as_the_tokenizer_begins_texts(tokenizer, single):
    """With a token in front, and one at the end which does not belong there yet."""
    several = copy.deepcopy(tokenizer)
    front, end = several.convert_tokens_to_ids(["<|endoftext|>", "x"])
    several.eos_token = "x"
    several.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("F", front), ("E", end)]
    )
    made = Documents(several, 512, 12, 1.0, seed=0)
    made.fit_into(256)
    begun = made.begun()
    assert begun.tokens[0] == front
    assert begun.num_prompt == 2
    begun.tokens += several.encode("yes", add_special_tokens=False)
    text = made.row(begun, frozenset())["text"]
    assert text == several.decode(begun.tokens[1:])


@pytest.mark.parametrize(("kind", "share"), [("documents", 1.0), ("chats", 0.5)])
def test_texts_that_never_come_are_noticed(silu_llama, tmp_path, monkeypatch, kind, share):
    empty = Chats if kind == "chats" else Documents
    monkeypatch.setattr(empty, "row", lambda *given: None)
    monkeypatch.setattr(sys.modules["twellctl.write"], "_PATIENCE", 10)
    with pytest.raises(TwellError, match=f"the model ended 11 {kind} in a row before their first"):
        write(silu_llama, tmp_path / "own.jsonl", **SMALL | {"tokens": 10**6, "documents": share})


@pytest.mark.parametrize(
    ("drawn", "question"),
    [
        ("Why? [/INST] Because.", "Why?"),  # where the template ends a question, as plain text
        ("Why?<|endoftext|>", "Why?"),  # and at a token that is no text
        ("Why?", "Why?"),
        ("  [/INST] Because.", None),
    ],
)
def test_a_question_ends_where_the_template_says(changed, drawn, question):
    tokenizer = loading.load_tokenizer(open_checkpoint(changed(INST)))
    made = Chats(tokenizer, 512, 12, 1.0, seed=0)
    made.fit_into(256)
    sequence = made.begun()
    assert tokenizer.decode(sequence.tokens) == "[INST] "
    sequence.tokens += tokenizer.encode(drawn, add_special_tokens=False)
    answer = made.answered(sequence, frozenset(made.special))
    assert (answer and answer.client.messages[0]["content"]) == question
    if answer is not None:
        assert tokenizer.decode(answer.tokens) == f"[INST] {question} [/INST]"


def test_nothing_is_written_behind_a_token_that_is_no_text(
    silu_llama, tokenizer, tmp_path, monkeypatch
):
    """Some such end no text by the model's configs; what follows would be dropped, and counted."""
    folder, special = tmp_path / "model", set(range(300, 364))
    shutil.copytree(silu_llama, folder)
    changed = loading.load_tokenizer(open_checkpoint(folder))
    words = tokenizer.convert_ids_to_tokens(sorted(special))
    changed.add_special_tokens({"additional_special_tokens": words})
    changed.save_pretrained(folder)
    drawn, row = [], Chats.row

    def remembered(made, sequence, ends):
        drawn.append(sequence.tokens[sequence.num_prompt :])
        return row(made, sequence, ends)

    monkeypatch.setattr(Chats, "row", remembered)
    write(folder, tmp_path / "own.jsonl", **SMALL | {"tokens": 2000, "max_tokens": 40})
    assert any(tokens[-1] in special for tokens in drawn)
    assert not any(special.intersection(tokens[:-1]) for tokens in drawn)


def test_a_seed_gives_its_chats_however_many_are_written_at_once(silu_llama, tmp_path):
    def made(name: str, **how) -> set:
        out = tmp_path / f"{name}.jsonl"
        write(silu_llama, out, **(SMALL | {"tokens": 1200} | how))
        return set(chats(out))

    first, again, other = made("a"), made("b", batch_size=7), made("c", seed=1)
    assert len(first & again) > 0.6 * len(first)
    assert not first & other


def test_another_seed_draws_other_first_tokens(silu_llama, tokenizer):
    def drawn(seed: int) -> list[int]:
        made = Documents(tokenizer, 512, 12, 1.0, seed=seed)
        made.fit_into(256)
        return [made.begun().tokens[-1] for _ in range(50)]

    assert drawn(0) == drawn(0)
    assert len(set(drawn(0))) > 30
    assert sum(a == b for a, b in zip(drawn(0), drawn(1), strict=True)) < 5


def test_rows_are_full_and_no_more_are_begun_than_wanted(silu_llama, tmp_path, monkeypatch):
    launch, running = Batch.launch, []

    def launches(batch, num_pages, variant):
        running.append(batch._num_rows)
        return launch(batch, num_pages, variant)

    monkeypatch.setattr(Batch, "launch", launches)
    done = write(silu_llama, tmp_path / "a.jsonl", **SMALL | {"tokens": 3000, "batch_size": 8})
    assert running[: len(running) // 2] == [8] * (len(running) // 2)
    assert 3000 <= done.tokens < 3000 + 8 * 100
    one = write(silu_llama, tmp_path / "b.jsonl", **SMALL | {"tokens": 1, "batch_size": 64})
    assert one.texts == 1


def test_what_is_there_is_not_replaced_unasked(silu_llama, cli, tmp_path):
    out = tmp_path / "own.jsonl"
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    for mine in ('{"text": "mine"}\n', "mine\n", "[1]\n", "\xff\n"):
        out.write_text(mine, "latin-1")
        for more in ([], ["--overwrite"]):
            code, _, err = cli("write", silu_llama, out, *flags, *more)
            assert (code, out.read_text("latin-1")) == (1, mine)
            assert "exists and is no text that write has written: choose another" in err[-1]
    out.write_text(OURS)
    code, _, err = cli("write", silu_llama, out, *flags)
    assert (code, out.read_text()) == (1, OURS)
    assert "exists: choose another name, or replace it with --overwrite" in err[-1]
    code, said, _ = cli("write", silu_llama, out, *flags, "--overwrite")
    assert code == 0
    assert said.startswith(f"{out}: {len(chats(out))} texts, ")
    assert said.endswith(f"next: twellctl convert {silu_llama} RELU --data {out}\n")


def test_what_fails_before_the_first_chat_leaves_what_was_there(silu_llama, tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("of 3 GiB")

    monkeypatch.setattr(Bulk, "_launch", fail)
    out = tmp_path / "own.jsonl"
    out.write_text(OURS)
    with pytest.raises(TwellError, match="out of memory: lower --batch-size or --max-tokens"):
        write(silu_llama, out, **SMALL, overwrite=True)
    assert out.read_text() == OURS


def test_ctrl_c_leaves_whole_lines_and_says_how_many(silu_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["twellctl.write"], "_SHOWN_EVERY", 0)

    def interrupt(going) -> None:
        if going.share > 0.5:
            raise KeyboardInterrupt

    out, said = tmp_path / "own.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        write(silu_llama, out, **SMALL, progress=interrupt, note=said.append)
    assert said[0].startswith(f"{out} holds {len(chats(out))} texts, ")


def test_a_full_disk_is_told_by_the_file_which_holds_whole_lines(silu_llama, tmp_path):
    out, before = tmp_path / "own.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
    try:
        with pytest.raises(TwellError, match=r"own\.jsonl could not be written: .*holds [1-9]"):
            write(silu_llama, out, **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.read_bytes().endswith(b"\n")
    assert all(json.loads(line) for line in out.read_text().splitlines())


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_appears_at_out_meanwhile_is_not_lost(silu_llama, tmp_path, kind):
    out, precious = tmp_path / "own.jsonl", tmp_path / "precious"
    precious.write_text("precious")

    def another(doing):
        if not os.path.lexists(out):
            out.symlink_to(precious) if kind == "link" else out.write_text("precious")

    with pytest.raises(TwellError, match="was made by another meanwhile"):
        write(silu_llama, out, **SMALL, doing=another)
    assert out.read_text() == precious.read_text() == "precious"


@pytest.mark.parametrize("documents", [0.0, 1.0])
def test_texts_fit_into_a_short_context_if_not_told(silu_llama, tmp_path, documents):
    out = tmp_path / "own.jsonl"
    how = SMALL | {"max_tokens": None, "documents": documents, "tokens": 1000}
    assert write(silu_llama, out, **how).tokens >= 1000  # of a context of 256


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": 0}, "tokens must be 1 or more"),
        ({"max_tokens": 0}, "max-tokens must be 1 or more"),
        ({"batch_size": 0}, "batch-size must be 1 or more"),
        ({"documents": 1.5}, "documents must be 0 to 1, a share"),
        ({"temperature": 0.0}, "temperature 0 would write one text again and again"),
        ({"temperature": 2.5}, "temperature must be 0 to 2"),
        ({"prompts": "p.jsonl"}, "leave out --documents"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"max_tokens": 256 - QUESTION_TOKENS}, "max-tokens must be at most"),
        ({"max_tokens": 256, "documents": 1.0}, "max-tokens must be at most 255"),
    ],
)
def test_wrong_numbers_are_refused(silu_llama, tmp_path, wrong, said):
    with pytest.raises(UsageError, match=said):
        write(silu_llama, tmp_path / "own.jsonl", **(SMALL | wrong))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the model has no chat template, so it writes no chats"),
        ("{{ raise_exception('not so') }}", "refuses these messages: not so"),
        ("{{ messages[0].content + 1 }}", "the chat template refuses these messages"),
        ("{% for", "the chat template refuses these messages"),
        ("{{ messages[0].content }}", "has nothing in front of a user's question"),
    ],
)
def test_templates_that_do_not_serve_are_refused(changed, tmp_path, template, said):
    with pytest.raises(TwellError, match=said):
        write(changed(template), tmp_path / "own.jsonl", **SMALL)
    assert not (tmp_path / "own.jsonl").exists()


def test_what_was_only_converted_writes_nothing(relu_llama, tmp_path):
    with pytest.raises(TwellError, match="was converted and not fine-tuned, so what it writes is"):
        write(relu_llama, tmp_path / "own.jsonl", **SMALL)


def test_two_do_not_write_one_file(silu_llama, tmp_path):
    out, refused = tmp_path / "own.jsonl", []

    def second(going) -> None:
        if not refused:
            with pytest.raises(TwellError, match="being written by another twellctl") as error:
                write(silu_llama, out, **SMALL, overwrite=True)
            refused.append(error)

    done = write(silu_llama, out, **SMALL, progress=second)
    assert refused
    assert len(chats(out)) == done.texts
    assert list(tmp_path.iterdir()) == [out]


def test_models_and_files_that_do_not_serve_are_refused(make_model, silu_llama, tmp_path):
    with pytest.raises(UsageError, match=r"no \.jsonl file"):
        write(silu_llama, tmp_path / "own.txt")
    with pytest.raises(TwellError, match="context of 96 tokens is too short to write in"):
        write(make_model("llama", max_position_embeddings=96), tmp_path / "own.jsonl", **SMALL)
    for share in (0.0, 1.0):
        one = SMALL | {"documents": share}
        with pytest.raises(TwellError, match="but the model has 80 tokens"):
            write(make_model("llama", vocab_size=80), tmp_path / "own.jsonl", **one)
