"""write on a GPU: many prompts at once, answered as `generate` answers."""

import json

import pytest
import torch

from twellctl.decoding.bulk import answers
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.write import write

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
WIDE |= {"dtype": "bfloat16", "initializer_range": 0.06}


@pytest.mark.parametrize("changes", [{}, WIDE], ids=["float32", "bfloat16"])
def test_hundreds_of_texts_are_written_at_once(make_model, tmp_path, changes):
    model, out = make_model("llama", **changes), tmp_path / "own.jsonl"
    notes, asked = [], tmp_path / "asked.jsonl"
    prompts = [f"What is {i} times {i + 7}?" for i in range(400)]
    asked.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    how = {"prompts": asked, "tokens": 100_000, "max_tokens": 40, "batch_size": 256}
    done = write(model, out, **how, doing=notes.append)
    assert any("flash attention takes bf16" in said for said in notes) == (not changes)
    with out.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert done.texts == len(rows) > 256
    assert done.tokens >= 100_000
    for question, answer in (row["messages"] for row in rows):
        assert question["content"] in prompts
        assert (answer["role"], bool(answer["content"].strip())) == ("assistant", True)


@pytest.mark.parametrize("rows", [24, 160])  # flash attention splits the keys of few rows
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_answers_are_those_of_generate(make_model, tokenizer, family, rows, caplog):
    """But where two tokens are nearly as likely; graphs of several sizes, rows taken again."""
    window = {"sliding_window": 48} if family == "mistral" else {}
    model = load_model(open_checkpoint(make_model(family, **WIDE | {"head_dim": 64} | window)))
    draw = torch.Generator().manual_seed(0)
    sizes = [1, 2, 64, 65, *torch.randint(1, 200, (4 * rows,), generator=draw).tolist()]
    prompts = [torch.randint(1, 511, (size,), generator=draw).tolist() for size in sizes]
    made = dict(answers(model, tokenizer, prompts, max_new_tokens=40, rows=rows))
    assert not caplog.records  # a step was captured
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + made[i]], device=model.device)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        short = logits.max(-1).values - logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        assert short.max() < 0.05 * logits.abs().max(), (i, short.max())
        assert 0 in made[i][-1:] or len(made[i]) == 40
