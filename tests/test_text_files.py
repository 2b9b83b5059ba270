"""Text files: what of them is read, what is refused and how, windows of long texts."""

import codecs
import json
import lzma
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from edits import write_table

from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.questions import read_tasks
from twellctl.firing.grouping import grouped_windows
from twellctl.text import blocks, files, reading
from twellctl.text.blocks import spread_windows, token_stream, write_tokens
from twellctl.text.reading import read_prompts, read_texts, text_files
from twellctl.text.tokens import Detokenizer, StopStrings


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


PROMPT, S = [CHAT[0]], [{"role": "system", "content": "S"}]


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
        ({"messages": CHAT}, PROMPT),
        ({"messages": CHAT + PROMPT}, CHAT + PROMPT),
        ({"prompt": "hello", "messages": CHAT}, PROMPT),
        ({"conversations": [{"from": "human", "value": "hi"}]}, PROMPT),
        (CHAT, PROMPT),
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
    assert f"{path}: 5 of 7 rows hold no prompt and are left out" in caplog.text


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


def test_pairs_without_a_template_are_plain_text(tmp_path):
    pairs = [{"prompt": "1 + 1 =", "completion": " 2"}, {"instruction": "Add.", "output": "2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    assert list(read_texts([str(tmp_path)], "text")) == ["1 + 1 = 2", "Add.\n\n2"]


def test_rows_without_text_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows("one", None, "", "two") + b'{"other": 3}\n')
    assert list(read_texts([str(path)], "text")) == ["one", "two"]
    assert f"{path}: 3 of 5 rows hold no text" in caplog.text
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
    (tmp_path / "a.jsonl").write_bytes(rows("so", 3))
    with pytest.raises(TwellError, match=r"a.jsonl:2: 'text' must be a text, got 3: correct"):
        list(read_texts([str(tmp_path / "a.jsonl")], "text"))


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(rows("so"))
    with pytest.raises(UsageError, match="an empty name was given for a t"):
        text_files([""])


def test_windows_of_more_tokens_than_a_float_tells_apart():
    last = 2**24 + 3
    ids = np.zeros(last + 256, np.int32)
    ids[-256:] = 1
    windows = spread_windows([ids], 8, 256)
    assert windows.shape == (8, 256)
    assert windows[-1].float().mean() == 1


END, EOT = 7, 0


def numbered(*sizes):
    """Texts of so many tokens, each after the end-of-text id, which end with END."""
    texts = [[*range(100 * n + 10, 100 * n + 9 + size), END] for n, size in enumerate(sizes, 1)]
    return [np.array([EOT, *text], np.int32) for text in texts]


@pytest.mark.parametrize(
    ("sizes", "begin_with", "ends"),
    [
        ((8, 8), [110, 210], 2),
        ((11,), [110, 113], 1),  # the second window overlaps the first
        ((24,), [110, 118, 126], 1),
        ((3, 3, 8), [110, 310], 3),  # two in a window, a separator between them
        ((5, 8, 2), [110, 210], 3),  # the third fills the first window
        ((5, 5, 8), [110, 210, 310], 3),  # what is left takes the beginning of the next
        ((5, 5), [110], 1),  # the last window is not full
        ((5,), [], 0),
    ],
)
def test_windows_begin_where_texts_begin_and_lose_no_end(sizes, begin_with, ends):
    windows = list(blocks.windows_from_starts(numbered(*sizes), 8, EOT))
    assert [len(window) for window in windows] == [8] * len(begin_with)
    assert [window[0] for window in windows] == begin_with
    assert sum((window == END).sum() for window in windows) == ends


def test_chats_longer_than_a_window_keep_the_ends_of_their_answers():
    """60 of 673 tokens in windows of 512: all ends are there, and all tokens."""
    random = np.random.default_rng(0)
    texts = [np.array([EOT, *random.integers(10, 500, 672), END]) for _ in range(60)]
    windows = list(blocks.windows_from_starts(texts, 512, EOT))
    assert (np.concatenate(windows) == END).sum() == 60
    assert len(windows) == 120


def test_short_texts_are_whole_in_some_window():
    random = np.random.default_rng(0)
    texts = [
        np.array([EOT, *random.integers(10, 500, size), END], np.int32)
        for size in random.integers(20, 300, 400)
    ]
    windows = list(blocks.windows_from_starts(texts, 512, EOT))
    whole = b"".join(window.tobytes() for window in windows)
    lost = [len(text) for text in texts if text[1:].tobytes() not in whole]
    assert sum(lost) < 512  # the last window is not full
    assert len(windows) * 512 < 1.1 * sum(map(len, texts))  # little is read twice


# ---- tokens to text, piece by piece: never half a character, never a stop string


UNDECODED = "\N{REPLACEMENT CHARACTER}"
TEXT = "import sys  # 日本語, ελληνικά, 🏳️‍🌈 and 👩🏽‍💻!\n\n\tdone  "


def pieces(tokenizer, tokens, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.add(token) for token in tokens], detokenizer.rest()


@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
def test_pieces_join_to_the_text_and_hold_no_half_character(request, kind):
    tokenizer = request.getfixturevalue(kind)
    text = TEXT if kind == "tokenizer" else "a b 日本 🏳️‍🌈 a"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    got, rest = pieces(tokenizer, tokens)
    assert "".join(got) == text
    assert rest == ""
    assert UNDECODED not in "".join(got)
    assert "" in got  # something was held back


def test_text_goes_out_as_soon_as_it_is_certain(tokenizer):
    snake = "🐍"
    assert len(tokenizer.encode(snake)) == 4
    got, _ = pieces(tokenizer, [*tokenizer.encode("a"), *tokenizer.encode(snake)])
    assert got == ["a", "", "", "", snake]


def test_bytes_that_are_no_text_come_out_once_that_is_certain(tokenizer):
    broken = tokenizer.encode("é")[:1]
    assert tokenizer.decode(broken) == UNDECODED
    after = tokenizer.encode("x")
    assert pieces(tokenizer, broken * 3 + after) == (["", "", "", UNDECODED * 3 + "x"], "")
    assert pieces(tokenizer, after + broken) == (["x", ""], UNDECODED)
    assert pieces(tokenizer, after + broken + after) == (["x", "", UNDECODED + "x"], "")


def test_special_tokens_are_no_text(sentencepiece):
    a, space_b = 257, 261
    assert pieces(sentencepiece, [a, 300, space_b]) == (["a", "", " b"], "")


def test_a_prompt_decides_about_the_first_space(sentencepiece):
    space_a, space_b = 260, 261
    assert pieces(sentencepiece, [space_b, space_a]) == (["b", " a"], "")
    assert pieces(sentencepiece, [space_b, space_a], [space_a] * 20) == ([" b", " a"], "")


def test_a_prompt_that_ends_within_a_character_is_gone_on_from(tokenizer):
    tokens = tokenizer.encode("é")
    assert len(tokens) == 2
    assert pieces(tokenizer, tokens[1:], tokens[:1]) == (["é"], "")


@pytest.mark.parametrize("prompt", ["aሰላም", "a🦄🦄🦄日", "a🦄🦄🦄b"])
def test_a_prompt_of_bytes_is_gone_on_from(sentencepiece, prompt):
    """Its last eight tokens may begin within a character."""
    tokens = sentencepiece.encode(prompt + "日a", add_special_tokens=False)
    got, rest = pieces(sentencepiece, tokens[-4:], tokens[:-4])
    assert (got, rest) == (["", "", "日", "a"], "")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "abc", ("abc", False)),
        (["b"], "abc", ("a", True)),
        (["abc", "b"], "abc", ("a", True)),  # "b" is complete first
        (["bc", "abc"], "abc", ("", True)),  # both at once: nothing of either is left
        (["\n\n"], "a\nb\n\nc", ("a\nb", True)),
        (["aab"], "aaaab", ("aa", True)),
        (["cd"], "abc", ("abc", False)),
        (["日本"], "a日日本", ("a日", True)),
    ],
)
def test_stop_strings_cut_alike_wherever_the_pieces_break(stops, text, expected):
    for breaks in range(2 ** (len(text) - 1)):
        cut, stopped, piece = StopStrings(stops), False, ""
        out = ""
        for i, character in enumerate(text):
            piece += character
            if breaks >> i & 1 or i == len(text) - 1:
                sent, stopped = cut.add(piece)
                out, piece = out + sent, ""
                if stopped:
                    break
        assert (out + ("" if stopped else cut.rest()), stopped) == expected


def test_only_what_may_begin_a_stop_string_is_held_back():
    cut = StopStrings(["\nUser:"])
    assert cut.add("Hello\nU") == ("Hello", False)
    assert cut.add("nit") == ("\nUnit", False)
    assert cut.rest() == ""


def test_bytes_that_never_become_text_are_not_held_without_end(tokenizer):
    broken = tokenizer.encode("é")[1:]
    detokenizer = Detokenizer(tokenizer)
    longest, text = 0, ""
    for token in broken * 1000:
        text += detokenizer.add(token)
        longest = max(longest, len(detokenizer._window))
    assert longest < 200
    assert text + detokenizer.rest() == UNDECODED * 1000
