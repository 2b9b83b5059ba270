"""write on a GPU: many texts at once, chats each with its answer."""

import json

import pytest
import torch

from twellctl.write import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_hundreds_of_texts_are_written_at_once(silu_llama, tmp_path):
    out = tmp_path / "own.jsonl"
    done = write(silu_llama, out, tokens=100_000, max_tokens=40, batch_size=256)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert done.texts == len(rows) > 256
    chats = [row["messages"] for row in rows if "messages" in row]
    assert 0.4 * len(rows) < len(chats) < 0.6 * len(rows)
    assert done.tokens >= 100_000
    for question, answer in chats:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"].strip()
        assert answer["content"].strip()
    assert len({question["content"] for question, _ in chats}) > 0.9 * len(chats)
