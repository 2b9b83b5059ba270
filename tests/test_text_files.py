"""Text files: what of them is read, what is refused and how, windows of long texts."""

import codecs
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.questions import is_local, read_tasks
from twellctl.text.blocks import spread_windows
from twellctl.text.reading import read_texts, text_files


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


@pytest.mark.parametrize("content", ['[\n{"text": "one"}\n]\n', '[{"text": "one"}]\n'])
def test_an_array_is_no_line(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(TwellError, match=r"a\.json:1 is .*: each line must hold one object"):
        list(read_texts([str(tmp_path)], "text"))


def test_lines_longer_than_what_is_read_at_a_time(tmp_path):
    texts = ["x" * size for size in (1, 70_000, 200_000, 5, 65_535)]
    (tmp_path / "a.jsonl").write_bytes(rows(*texts)[:-1])  # the last line has no end
    assert list(read_texts([str(tmp_path)], "text")) == texts


def test_what_is_no_text_is_named_with_its_place(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text {number}" for number in range(3000)]
    texts[2500] = None
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(TwellError, match="row 2500: 'text' must be a text, got None: correct"):
        list(read_texts([str(path)], "text"))
    (tmp_path / "a.jsonl").write_bytes(rows("so", 3))
    with pytest.raises(TwellError, match=r"a.jsonl:2: 'text' must be a text, got 3: correct"):
        list(read_texts([str(tmp_path / "a.jsonl")], "text"))


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(rows("so"))
    for read in (lambda: text_files([""]), lambda: is_local("")):
        with pytest.raises(UsageError, match="an empty name was given for a t"):
            read()


def test_windows_of_more_tokens_than_a_float_tells_apart():
    last = 2**24 + 3
    ids = np.zeros(last + 256, np.int32)
    ids[-256:] = 1
    windows = spread_windows([ids], 8, 256)
    assert windows.shape == (8, 256)
    assert windows[-1].float().mean() == 1
