"""write on the CPU: people's prompts are answered in whole lines; what is refused."""

import copy
import json
import os
import resource
import shutil
import sys

import pytest
import torch
from edits import jsonl

from twellctl.decoding.batch import Batch
from twellctl.decoding.bulk import Bulk
from twellctl.errors import TwellError, UsageError, counted
from twellctl.generate import generate
from twellctl.models import loading
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.text.blocks import token_stream
from twellctl.text.reading import read_texts
from twellctl.text.tokens import encode_prompt
from twellctl.write import Writing, _Answers, write

SMALL = {"tokens": 600, "max_tokens": 12, "batch_size": 16}
OURS = '{"text": "so", "by": "twellctl write"}\n'


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict:
    """What `write` is called with: prompts, and little to write."""
    path = tmp_path_factory.mktemp("asked") / "prompts.jsonl"
    rows = (json.dumps({"prompt": f"What is {i}{' and more' * (i % 5)}?"}) for i in range(40))
    path.write_text("\n".join(rows))
    return SMALL | {"prompts": path}


def lines(path) -> list[dict]:
    with path.open(encoding="utf-8") as file:  # str.splitlines would part them at U+0085, too
        return [json.loads(line) for line in file]


def chats(path) -> list[tuple[str, str]]:
    """Questions and answers."""
    rows = [row["messages"] for row in lines(path)]
    assert all([turn["role"] for turn in row] == ["user", "assistant"] for row in rows)
    return [(question["content"], answer["content"]) for question, answer in rows]


def test_texts_that_never_come_are_noticed(silu_llama, tmp_path, monkeypatch, small):
    monkeypatch.setattr(_Answers, "row", lambda *given: None)
    monkeypatch.setattr(sys.modules["twellctl.write"], "_PATIENCE", 10)
    with pytest.raises(TwellError, match="the model ended 11 answers in a row before their first"):
        write(silu_llama, tmp_path / "own.jsonl", **small | {"tokens": 10**6})


def test_a_text_ends_before_a_token_that_is_no_text(
    silu_llama, tokenizer, tmp_path, monkeypatch, small
):
    """Some such end no text by the model's configs; what follows would be dropped, and counted."""
    folder, special = tmp_path / "model", set(range(300, 364))
    shutil.copytree(silu_llama, folder)
    changed = loading.load_tokenizer(open_checkpoint(folder))
    words = tokenizer.convert_ids_to_tokens(sorted(special))
    changed.add_special_tokens({"additional_special_tokens": words})
    changed.save_pretrained(folder)
    drawn, row = [], _Answers.row

    def remembered(made, sequence, ends):
        drawn.append(sequence.tokens[sequence.num_prompt :])
        return row(made, sequence, ends)

    monkeypatch.setattr(_Answers, "row", remembered)
    write(folder, tmp_path / "own.jsonl", **small | {"tokens": 2000, "max_tokens": 40})
    assert any(tokens[-1] in special for tokens in drawn)
    assert not any(special.intersection(tokens[:-1]) for tokens in drawn)


def test_a_seed_gives_its_chats_however_many_are_written_at_once(silu_llama, tmp_path, small):
    def made(name: str, **how) -> set:
        out = tmp_path / f"{name}.jsonl"
        write(silu_llama, out, **(small | {"tokens": 1200} | how))
        return set(chats(out))

    first, again, other = made("a"), made("b", batch_size=7), made("c", seed=1)
    assert len(first & again) > 0.6 * len(first)
    assert not first & other


def test_rows_are_full_and_no_more_are_begun_than_wanted(silu_llama, tmp_path, monkeypatch, small):
    launch, running = Batch.launch, []

    def launches(batch, *how):
        running.append(batch._num_rows)
        return launch(batch, *how)

    monkeypatch.setattr(Batch, "launch", launches)
    done = write(silu_llama, tmp_path / "a.jsonl", **small | {"tokens": 3000, "batch_size": 8})
    assert running[: len(running) // 2] == [8] * (len(running) // 2)
    assert 3000 <= done.tokens < 3000 + 8 * 100
    one = write(silu_llama, tmp_path / "b.jsonl", **small | {"tokens": 1, "batch_size": 64})
    assert one.texts == 1


def test_what_is_there_is_not_replaced_without_overwrite(silu_llama, cli, success, tmp_path, small):
    out = tmp_path / "own.jsonl"
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in small.items()]
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
    said, _ = success("write", silu_llama, out, *flags, "--overwrite")
    assert said.startswith(f"{out}: {len(chats(out))} texts, ")
    assert said.endswith(f"next: twellctl convert {silu_llama} RELU --data {out}\n")


def test_what_fails_before_the_first_chat_leaves_what_was_there(
    silu_llama, tmp_path, monkeypatch, small
):
    def fail(*_):
        raise torch.OutOfMemoryError("of 3 GiB")

    monkeypatch.setattr(Bulk, "_launch", fail)
    out = tmp_path / "own.jsonl"
    out.write_text(OURS)
    with pytest.raises(TwellError, match="out of memory: lower --batch-size or --max-tokens"):
        write(silu_llama, out, **small, overwrite=True)
    assert out.read_text() == OURS


def test_ctrl_c_leaves_whole_lines_and_says_how_many(silu_llama, tmp_path, monkeypatch, small):
    monkeypatch.setattr(sys.modules["twellctl.write"], "_SHOWN_EVERY", 0)

    def interrupt(going) -> None:
        if going.share > 0.5:
            raise KeyboardInterrupt

    out, said = tmp_path / "own.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        write(silu_llama, out, **small, progress=interrupt, note=said.append)
    assert said[0].startswith(f"{out} holds {counted(len(chats(out)), 'text')}, ")


def test_on_a_full_disk_the_file_is_named_and_holds_whole_lines(silu_llama, tmp_path, small):
    out, before = tmp_path / "own.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
    try:
        with pytest.raises(TwellError, match=r"own\.jsonl could not be written: .*holds [1-9]"):
            write(silu_llama, out, **small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.read_bytes().endswith(b"\n")
    assert all(json.loads(line) for line in out.read_text().splitlines())


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_appears_at_out_meanwhile_is_not_lost(silu_llama, tmp_path, kind, small):
    out, precious = tmp_path / "own.jsonl", tmp_path / "precious"
    precious.write_text("precious")

    def another(doing):
        if not os.path.lexists(out):
            out.symlink_to(precious) if kind == "link" else out.write_text("precious")

    with pytest.raises(TwellError, match="was created by another process meanwhile"):
        write(silu_llama, out, **small, doing=another)
    assert out.read_text() == precious.read_text() == "precious"


def test_texts_fit_into_a_short_context_by_default(silu_llama, tmp_path, small):
    out = tmp_path / "own.jsonl"
    how = small | {"max_tokens": None, "tokens": 300}
    assert write(silu_llama, out, **how).tokens >= 300  # of a context of 256


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 0}, "max-tokens must be >= 1"),
        ({"temperature": 2.5}, "temperature must be >= 0 and <= 2"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"max_tokens": 256}, "max-tokens must be at most"),
    ],
)
def test_wrong_numbers_are_refused(silu_llama, tmp_path, wrong, said, small):
    with pytest.raises(UsageError, match=said):
        write(silu_llama, tmp_path / "own.jsonl", **(small | wrong))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the model has no chat template, so it cannot answer prompts"),
        ("{{ raise_exception('not so') }}", "refuses these messages: not so"),
        ("{{ messages[0].content + 1 }}", "the chat template refuses these messages"),
        ("{% for", "the chat template refuses these messages"),
        ("{{ '' }}", "prompt 1: the chat template makes no token of it"),
    ],
)
def test_templates_that_do_not_serve_are_refused(silu_llama, tmp_path, template, said, small):
    file = shutil.copytree(silu_llama, tmp_path / "model") / "chat_template.jinja"
    file.unlink() if template is None else file.write_text(template)
    with pytest.raises(TwellError, match=said):
        write(tmp_path / "model", tmp_path / "own.jsonl", **small)
    assert not (tmp_path / "own.jsonl").exists()


def test_what_was_only_converted_writes_nothing(relu_llama, tmp_path, small):
    with pytest.raises(TwellError, match="was converted and not fine-tuned, so what it writes is"):
        write(relu_llama, tmp_path / "own.jsonl", **small)


def test_two_do_not_write_one_file(silu_llama, tmp_path, small):
    out, refused = tmp_path / "own.jsonl", []

    def second(going) -> None:
        if not refused:
            with pytest.raises(TwellError, match="being written by another twellctl") as error:
                write(silu_llama, out, **small, overwrite=True)
            refused.append(error)

    done = write(silu_llama, out, **small, progress=second)
    assert refused
    assert len(chats(out)) == done.texts
    assert list(tmp_path.iterdir()) == [out]


def test_models_and_files_that_do_not_serve_are_refused(make_model, silu_llama, tmp_path, small):
    with pytest.raises(UsageError, match=r"is not a \.jsonl file"):
        write(silu_llama, tmp_path / "own.txt", prompts="p.jsonl")
    with pytest.raises(TwellError, match="8 tokens is too short to write in: the shortest prompt"):
        write(make_model("llama", max_position_embeddings=8), tmp_path / "own.jsonl", **small)
    with pytest.raises(TwellError, match="but the model has 80 tokens"):
        write(make_model("llama", vocab_size=80), tmp_path / "own.jsonl", **small)


ASKED = [[{"role": "user", "content": f"What is {i}{' and more' * i}?"}] for i in range(12)]
ASKED += [[{"role": "system", "content": "Be short."}, *ASKED[0], *ASKED[1]]]


def test_prompts_are_answered_as_generate_does(silu_llama, tokenizer, tmp_path):
    rows = [{"prompt": chat[0]["content"]} for chat in ASKED[:-1]] + [{"messages": ASKED[-1]}]
    rows[0] = {"instruction": ASKED[0][0]["content"], "input": "", "output": "of no use"}
    rows[1] = {"question": ASKED[1][0]["content"], "answer": "of no use"}
    file, out, said = jsonl(tmp_path / "prompts.jsonl", rows), tmp_path / "own.jsonl", []
    how = {"prompts": file, "max_tokens": 12, "batch_size": 4, "temperature": 0.0}
    done = write(silu_llama, out, **how, tokens=10**6, note=said.append)
    assert said == ["each prompt was answered once: a second greedy answer would be the same"]
    stock = loading.load_model(open_checkpoint(silu_llama))
    known = []
    for chat in ASKED:
        prompt = torch.tensor([encode_prompt(tokenizer, chat)])
        ids = stock.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
        text = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        known.append([*chat, {"role": "assistant", "content": text}])
    made = [row["messages"] for row in lines(out)]
    assert sorted(made, key=str) == sorted(known, key=str)
    assert (done.texts, done.cut) == (len(ASKED), len(ASKED))  # random models seldom end
    assert len(list(read_texts([str(out)], "text", tokenizer))) == len(ASKED)


THINKS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
SAID = "    one, two</think>\n\n  It is 2."


@pytest.mark.parametrize(
    ("answer", "ended", "cut"),
    [(SAID, True, {}), (SAID, False, {"cut": True}), ("    return 1\n", True, {})],
)
def test_what_was_written_is_what_is_read(tokenizer, tmp_path, answer, ended, cut):
    """To the token: thinking, spaces, an end only where the model ended."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = THINKS
    how = Writing(max_tokens=50)
    prompt = {"role": "user", "content": "1 + 1?"}
    answers = _Answers(tokenizer, [[prompt]], 512, how)
    answers.fit_into(256)
    text, end = answers.begun(), tokenizer.eos_token_id
    text.tokens += tokenizer.encode(answer) + [end] * ended
    row = answers.row(text, frozenset([end]))
    assert row["messages"] == [prompt, {"role": "assistant", "content": answer}]
    assert {key: row[key] for key in row.keys() & {"cut"}} == cut
    file = jsonl(tmp_path / "own.jsonl", [row | {"by": "twellctl write"}])
    (read,) = token_stream(read_texts([str(file)], "text", tokenizer), tokenizer)
    assert read.tolist() == [end, *text.tokens]
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    assert list(read_texts([str(file)], "text", other)) == [f"1 + 1?;{answer};"]


def test_half_a_character_is_not_written(tokenizer):
    answers = _Answers(tokenizer, ASKED[:1], 512, Writing())
    answers.fit_into(256)
    text = answers.begun()
    text.tokens += tokenizer.encode("a 🐍")[:-1]
    row = answers.row(text, frozenset([tokenizer.eos_token_id]))
    assert row["messages"][-1]["content"] == "a "
    assert row["text"].endswith("<|assistant|>a ")
    assert row["cut"]


def test_the_chat_template_receives_its_settings(cli, silu_llama, tmp_path):
    model, out = tmp_path / "model", tmp_path / "own.jsonl"
    shutil.copytree(silu_llama, model)
    template = "{{ messages[0].content }}{% if thinks %} I think so:{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    file, answers = jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Is it?"}]), []
    for given in ({"thinks": True}, {}):
        words = ["--max-tokens", 12, "--temperature", 0, "--overwrite", "--prompts", file]
        code, *_ = cli("write", model, out, *words, "--chat-template-kwargs", json.dumps(given))
        assert code == 0
        made = generate(model, "Is it?", max_tokens=12, chat_template_kwargs=given)
        answers.append(lines(out)[0]["messages"][1]["content"])
        assert answers[-1] == made.text().rstrip("\N{REPLACEMENT CHARACTER}")
    assert answers[0] != answers[1]


def test_prompts_are_answered_again_by_other_draws(silu_llama, tmp_path):
    file = jsonl(tmp_path / "prompts.jsonl", ({"messages": chat} for chat in ASKED))
    how = {"prompts": file, "max_tokens": 12, "batch_size": 4}
    once = write(silu_llama, tmp_path / "a.jsonl", **how)
    assert once.texts == len(ASKED)
    often = write(silu_llama, tmp_path / "b.jsonl", **how, tokens=3 * once.tokens)
    assert often.tokens >= 3 * once.tokens
    assert often.texts > 2 * len(ASKED)
    made = [str(row["messages"]) for row in lines(tmp_path / "b.jsonl")]
    assert len(set(made)) > 0.9 * len(made)


def test_a_sparse_model_answers(relu_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "is_only_converted", False)
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "Why?"}, {"prompt": "So " * 300}])
    said = []
    done = write(relu_llama, tmp_path / "own.jsonl", prompts=file, note=said.append)
    assert done.texts == 1
    assert said == ["1 prompts are left out: they fill the model's context"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "p.jsonl:1 has nothing in a column such as prompt, .*, only text"),
        ({"prompt": "  "}, "p.jsonl:1 has no text of a user's that could be answered"),
        ({"messages": [{"role": "user"}]}, "p.jsonl:1: a message must hold text, and nothing else"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "p.jsonl:1 has no text of a user"),
        ({"instruction": "a", "input": 7}, "p.jsonl:1: a question and its answer must be texts"),
        (7, "p.jsonl:1 is 7: each row must be an object"),
        (None, "p.jsonl holds no prompt"),
    ],
)
def test_prompts_without_text_are_refused_with_their_line(silu_llama, tmp_path, row, said):
    path = tmp_path / "p.jsonl"
    path.write_text("" if row is None else json.dumps(row))
    with pytest.raises(TwellError, match=said):
        write(silu_llama, tmp_path / "own.jsonl", prompts=path)
    assert not (tmp_path / "own.jsonl").exists()
