"""write on a GPU: many texts at once, chats each with its answer, over kernels or not."""

import json

import pytest
import torch

from twellctl.write import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


OVER_KERNELS = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
OVER_KERNELS |= {"dtype": "bfloat16", "initializer_range": 0.06}


@pytest.mark.parametrize("changes", [{}, OVER_KERNELS], ids=["transformers", "kernels"])
def test_hundreds_of_texts_are_written_at_once(make_model, tmp_path, changes):
    model, out = make_model("llama", **changes), tmp_path / "own.jsonl"
    told = []
    how = {"tokens": 100_000, "max_tokens": 40, "batch_size": 256}
    done = write(model, out, **how, doing=told.append)
    assert any("twellctl's kernels" in said for said in told) == bool(changes)
    with out.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert done.texts == len(rows) > 256
    chats = [row["messages"] for row in rows if "messages" in row]
    assert 0.35 * len(rows) < len(chats) < 0.65 * len(rows)
    assert done.tokens >= 100_000
    for question, answer in chats:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"].strip()
        assert answer["content"].strip()
    assert len({question["content"] for question, _ in chats}) > 0.9 * len(chats)
