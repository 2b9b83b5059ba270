"""Text files: what of them is read, what is refused and how."""

import codecs
import json
import lzma
import re

import pyarrow
import pyarrow.parquet
import pytest
from edits import write_table

from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.questions import read_tasks
from twellctl.firing.grouping import grouped_windows
from twellctl.text import blocks, files, reading
from twellctl.text.blocks import token_stream, write_tokens
from twellctl.text.reading import read_prompts, read_texts, text_files


def rows(*texts) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_folders_that_links_lead_to_are_read(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "one.txt").write_text("one")
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "a" / "b" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "two.txt").write_text("two")
    assert list(read_texts([str(tmp_path / "a")], "text")) == ["one", "two"]


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    """As YAML and --data=~/one.txt give it, which no shell expands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "one.txt").write_text("one")
    assert list(read_texts(["~/one.txt"], "text")) == ["one"]
    with pytest.raises(TwellError, match=r"^~nobody-here/one\.txt does not exist"):
        text_files(["~nobody-here/one.txt"])


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (("a.txt", b"so"), ("b.jsonl", rows("so", "and so"))):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content)
    assert list(read_texts([str(tmp_path)], "text")) == ["so", "so", "and so"]
    question = {"query": "Q", "choices": ["a", "b"], "gold": 0}
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + json.dumps(question).encode())
    (task,) = read_tasks([str(tmp_path / "b.jsonl")])
    assert task.questions[0].query == "Q"


def test_lines_of_a_txt_file_end_as_in_unix(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\r\n")
    (tmp_path / "b.jsonl").write_bytes(rows("a\r\nb").replace(b"\n", b"\r\n"))
    assert list(read_texts([str(tmp_path)], "text")) == ["one\n\ntwo\n", "a\r\nb"]


@pytest.mark.parametrize(
    "content", ['[\n{"text": "one"},\n {"text": "two"}\n]\n', '[{"text": "one"},{"text": "two"}]']
)
def test_a_file_that_is_one_array(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert list(read_texts([str(tmp_path / "a.json")], "text")) == ["one", "two"]
    for broken in (content.replace("}", "", 1), content[: content.rindex("]")]):
        (tmp_path / "a.json").write_text(broken)
        said = r"a\.json is not valid JSON .*: correct it, or fetch it again"
        with pytest.raises(TwellError, match=said):
            list(read_texts([str(tmp_path / "a.json")], "text"))


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
PROMPT, S = CHAT[:1], [{"role": "system", "content": "S"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
PARTS = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
WRITTEN = "<|user|>hi\n<|assistant|>ho\n"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": CHAT}, WRITTEN),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            WRITTEN,
        ),
        ({"conversations": CHAT, "system": "S"}, "<|system|>S\n" + WRITTEN),
        ({"messages": PARTS}, WRITTEN),
        ({"prompt": "hi", "completion": "ho"}, WRITTEN),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, WRITTEN),
        ({"instruction": "hi", "input": "", "output": "ho"}, WRITTEN),
        ({"instruction": "hi", "input": "x", "output": "ho"}, "<|user|>hi\n\nx\n<|assistant|>ho\n"),
        ({"instruction": "hi", "context": None, "response": "ho", "category": 3}, WRITTEN),
        ({"question": "hi", "answer": "ho"}, WRITTEN),
        ({"input": "hi", "output": "ho"}, WRITTEN),
        ({"instruction": "hi", "answer": "ho"}, WRITTEN),
        ({"system_prompt": "S", "question": "hi", "response": "ho"}, "<|system|>S\n" + WRITTEN),
        ({"problem": "hi", "solution": "ho", "answer": "4"}, WRITTEN),
        ({"prompt": "hi", "chosen": "ho", "rejected": "no"}, WRITTEN),
        ({"prompt": "hi", "chosen": CHAT, "rejected": CHAT[:1]}, WRITTEN),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]}, WRITTEN),
        ({"chosen": CHAT, "rejected": CHAT}, WRITTEN),
        ({"chosen": S + CHAT, "rejected": CHAT}, "<|system|>S\n" + WRITTEN),
        ({"question": "hi", "context": "x", "answer": "ho"}, "<|user|>hi\n\nx\n<|assistant|>ho\n"),
        (
            {"messages": [CHAT[0], {"role": "model", "content": None}]},
            "<|user|>hi\n<|assistant|>\n",
        ),
        ({"messages": [{"role": "developer", "content": "S"}, *CHAT]}, "<|system|>S\n" + WRITTEN),
        ({"prompt": "hi", "completion": CHAT[1:]}, WRITTEN),
        ({"question": "", "prompt": "hi", "answer": "ho"}, WRITTEN),
        ({"text": "as it is", "messages": CHAT}, "as it is"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "json"])
def test_rows_as_the_hub_has_them(tokenizer, tmp_path, row, text, kind):
    path = tmp_path / f"a.{kind}"
    if kind in ("parquet", "arrow"):
        write_table(path, pyarrow.Table.from_pylist([row, row]))
    else:
        path.write_text(json.dumps([row, row]) if kind == "json" else json.dumps(row) + "\n" * 2)
    assert set(read_texts([str(path)], "text", tokenizer)) == {text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "hi"}, PROMPT),
        ({"system": "S", "prompt": "hi"}, S + PROMPT),
        ({"system_prompt": "S", "question": "hi", "answer": "ho"}, S + PROMPT),
        ({"system": "S", "messages": S + PROMPT}, S + PROMPT),
        ({"instruction": "hi", "input": "x"}, [{"role": "user", "content": "hi\n\nx"}]),
        ({"input": "hi", "output": "ho"}, PROMPT),
        ({"problem": "hi", "solution": "ho"}, PROMPT),
        ({"query": "hi"}, PROMPT),
        ({"prompt": PROMPT}, PROMPT),
        ({"messages": PARTS[:1]}, PROMPT),
        ({"chosen": CHAT, "rejected": CHAT}, PROMPT),
        ({"chosen": S + CHAT, "rejected": S + CHAT}, S + PROMPT),
        ({"chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, PROMPT),
        ({"question": "hi", "context": "x"}, [{"role": "user", "content": "hi\n\nx"}]),
        (
            {"messages": [*PROMPT, {"role": "assistant", "tool_calls": [CALL]}, *PROMPT]},
            [*PROMPT, {"role": "assistant", "tool_calls": [CALLED], "content": ""}, *PROMPT],
        ),
        ({"messages": CHAT}, PROMPT),
        ({"messages": CHAT + PROMPT}, CHAT + PROMPT),
        ({"prompt": "hello", "messages": CHAT}, PROMPT),
        ({"conversations": [{"from": "human", "value": "hi"}]}, PROMPT),
        (CHAT, PROMPT),
        ("hi", PROMPT),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "json"])
def test_prompts_as_the_hub_has_them(tmp_path, row, messages, kind):
    path = tmp_path / f"a.{kind}"
    if kind in ("parquet", "arrow"):
        if isinstance(row, dict):  # else there are no columns
            write_table(path, pyarrow.Table.from_pylist([row, row]))
            assert read_prompts(path) == [messages] * 2
        return
    path.write_text(json.dumps([row, row]) if kind == "json" else (json.dumps(row) + "\n") * 2)
    assert read_prompts(path) == [messages] * 2


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_that_cannot_be_read(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    write_table(path, pyarrow.table({"text": [f"text {number:03}" for number in range(1000)]}))
    assert files.num_table_rows(path) == 1000
    size = path.stat().st_size
    assert reading.estimated_text_bytes([str(path)], "text") == 8000
    for content in (path.read_bytes()[: size // 2], b"", b"ARROW1 PAR1"):
        path.write_bytes(content)
        with pytest.raises(TwellError, match=rf"a\{suffix} is not a readable (parquet|Arrow) file"):
            list(read_texts([str(path)], "text"))


def test_a_data_set_that_was_saved_to_disk(tmp_path):
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text('{"split": null}')
    for number in range(2):
        table = pyarrow.table({"text": [f"text {number}"] * 70, "id": list(range(70))})
        write_table(tmp_path / f"data-0000{number}-of-00002.arrow", table)
    assert list(read_texts([str(tmp_path)], "text")) == ["text 0"] * 70 + ["text 1"] * 70


def test_a_table_without_prompts(tmp_path):
    write_table(tmp_path / "a.arrow", pyarrow.table({"id": [1]}))
    with pytest.raises(TwellError, match="has no column of prompts, only id: rename one"):
        read_prompts(tmp_path / "a.arrow")


def test_rows_without_a_prompt_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    empty = [{"prompt": ""}, {"prompt": None}, {"prompt": " "}, {"text": "so"}, {"messages": []}]
    path.write_text("\n".join(map(json.dumps, [{"prompt": "hi"}, *empty, {"prompt": "ho"}])))
    assert [chat[-1]["content"] for chat in read_prompts(path)] == ["hi", "ho"]
    said = f"5 of 7 rows of {path} are left out; the first: {path}:2 has nothing in a column such"
    assert said in caplog.text


@pytest.mark.parametrize(
    ("content", "column", "expected"),
    [
        (["one", "two"], "text", ["one", "two"]),
        ([CHAT, CHAT], "text", [WRITTEN, WRITTEN]),
        ([{"input_ids": [1, 2]}], "text", "token ids (input_ids), which are not read: give text"),
        ([{"input_ids": [1, 2]}], "input_ids", "token ids (input_ids), which are not read"),
        ([[1, 2], [3]], "text", "each row must be an object, or a list of messages"),
        ([3], "text", "is 3: each row must be an object, or a list of messages"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_rows_that_are_no_objects(tmp_path, tokenizer, content, column, expected, kind):
    path = tmp_path / f"a.{kind}"
    lines = "\n".join(map(json.dumps, content))
    path.write_text(json.dumps(content) if kind == "json" else lines)
    if isinstance(expected, list):
        assert list(read_texts([str(path)], column, tokenizer)) == expected
        return
    with pytest.raises(TwellError, match=re.escape(expected)):
        list(read_texts([str(path)], column, tokenizer))
    with pytest.raises(TwellError, match=re.escape(expected)):
        read_prompts(path)


def test_pairs_without_a_template_are_plain_text(tmp_path):
    pairs = [{"prompt": "1 + 1 =", "completion": " 2"}, {"instruction": "Add.", "output": "2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    assert list(read_texts([str(tmp_path)], "text")) == ["1 + 1 = 2", "Add.\n\n2"]


def test_rows_without_text_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows("one", None, "", "two") + b'{"other": 3}\n')
    assert list(read_texts([str(path)], "text")) == ["one", "two"]
    said = f"3 of 5 rows of {path} are left out; the first: {path}:2 has no text in 'text'"
    assert said in caplog.text
    path.write_text('{"other": 3, "body": "x"}\n{"text": null}')
    with pytest.raises(TwellError, match=r"a\.jsonl:1 has no text in 'text', only other, body: "):
        list(read_texts([str(path)], "text"))


@pytest.mark.parametrize("packed", ["gz", "bz2", "zst", "xz"])
def test_packed_files(tmp_path, packed):
    content = rows(*(f"text {number}" for number in range(8_000)))
    path = tmp_path / f"a.jsonl.{packed}"
    if packed == "xz":
        path.write_bytes(lzma.compress(content))
    else:
        kind = {"gz": "gzip", "bz2": "bz2", "zst": "zstd"}[packed]
        with pyarrow.output_stream(str(path), compression=kind) as file:
            file.write(content)
    found = list(read_texts([str(tmp_path)], "text"))
    assert (len(found), found[-1]) == (8_000, "text 7999")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TwellError, match=rf"a\.jsonl\.{packed}"):
        list(read_texts([str(path)], "text"))


def test_a_folder_of_a_data_set_is_read_without_what_describes_it(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "data" / "train.jsonl").write_bytes(rows("one"))
    for name in (".cache/x.jsonl", "dataset_infos.json", ".gitattributes", "README.md", "a.py"):
        (tmp_path / name).write_text('{\n "config": 1\n}')
    assert list(read_texts([str(tmp_path)], "text")) == ["one"]


def test_a_long_text_comes_in_pieces_that_are_one_text(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 1000)
    monkeypatch.setattr(reading, "PIECE", 1000)
    text = "".join(f"line {number} of it\n" for number in range(500)) + "x" * 3000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_bytes(rows(text))
    for name in ("a.txt", "b.jsonl"):
        pieces = list(read_texts([str(tmp_path / name)], "text"))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 1000
        goes_on = [isinstance(piece, files.More) for piece in pieces]
        assert goes_on == [False] + [True] * (len(pieces) - 1)
        ids = [int(i) for tokens in token_stream(iter(pieces), tokenizer) for i in tokens]
        assert ids[0] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in ids[1:]
        assert tokenizer.decode(ids[1:]) == text


def test_text_is_tokenised_only_as_far_as_it_is_wanted(tmp_path, tokenizer, monkeypatch):
    for module in (blocks, files, reading):
        monkeypatch.setattr(module, "PIECE", 10_000)
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n" * 5_000)
    read = []

    def texts():
        for text in read_texts([str(tmp_path)], "text"):
            read.append(len(text))
            yield text

    write_tokens(token_stream(texts(), tokenizer), tmp_path / "tokens.bin", 300)
    assert len(read) <= 2


def test_a_small_file_of_large_rows_is_read_a_little_at_a_time(tmp_path, tokenizer):
    large = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 20_000), ["x " * 100_000])
    table = pyarrow.table({"text": large})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    windows = grouped_windows([str(tmp_path / "a.parquet")], "text", tokenizer, 2, 64)
    assert windows.ids.shape == (2, 64)


def test_a_line_without_an_end_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LONGEST_ROW", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "')
    with path.open("r+b") as file:
        file.truncate(1 << 31)
    with pytest.raises(TwellError, match="a line of more than 1 MiB"):
        list(read_texts([str(path)], "text"))


def test_lines_longer_than_what_is_read_at_a_time(tmp_path):
    texts = ["x" * size for size in (1, 70_000, 200_000, 5, 65_535)]
    (tmp_path / "a.jsonl").write_bytes(rows(*texts)[:-1])  # the last line has no end
    assert list(read_texts([str(tmp_path)], "text")) == texts


def test_what_is_no_text_is_named_with_its_place(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": list(range(3000))}), path)
    with pytest.raises(TwellError, match="row 0: 'text' must be a text, got 0: correct"):
        list(read_texts([str(path)], "text"))
    (tmp_path / "a.jsonl").write_bytes(rows(4, 3))
    with pytest.raises(TwellError, match=r"a.jsonl:1: 'text' must be a text, got 4: correct"):
        list(read_texts([str(tmp_path / "a.jsonl")], "text"))


def test_a_text_that_breaks_behind_its_first_piece_ends_there(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"word " * 300_000 + b"\xff")
    (tmp_path / "b.txt").write_text("whole")
    texts = list(read_texts([str(tmp_path)], "text"))
    assert (texts[0][:10], texts[-1]) == ("word word ", "whole")
    assert "the rest of a file of text is left out" in caplog.text
    assert "a.txt is not valid UTF-8 (byte 1500000)" in caplog.text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b'{"text": "cut', "is not valid JSON (Invalid control character"),
        (b'{"text": "\xff"}', "is not valid UTF-8 (byte 10)"),
        (b'{"text": 3}', ": 'text' must be a text, got 3"),
        (b"[1, 2]", "is [1, 2]: each row must be an object"),
        (b'{"messages": [3]}', ": messages must be objects"),
        (b'{"prompt": 3, "completion": "x"}', ": a question and its answer must be texts"),
        (b'{"text": "\\ud83d"}', "is not valid JSON (it holds the lone surrogate"),
    ],
)
def test_one_bad_row_is_left_out(tmp_path, tokenizer, caplog, row, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([rows("one").rstrip(), row, rows("two")]))
    assert list(read_texts([str(path)], "text", tokenizer)) == ["one", "two"]
    assert f"1 of 3 rows of {path} are left out; the first: {path}:2" in caplog.text
    assert said in caplog.text


def test_an_empty_file_is_left_out(tmp_path, caplog):
    for name, content in (("a.txt", b""), ("b.jsonl", rows("so")), ("c.txt", b"\xff")):
        (tmp_path / name).write_bytes(content)
    assert list(read_texts([str(tmp_path)], "text")) == ["so"]
    assert "2 of 3 files of text are left out; the first: " in caplog.text
    assert "a.txt holds no text" in caplog.text
    with pytest.raises(TwellError, match=r"a\.txt holds no text: give a file with text"):
        list(read_texts([str(tmp_path / "a.txt")], "text"))


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(rows("so"))
    with pytest.raises(UsageError, match="an empty name was given for a t"):
        text_files([""])
