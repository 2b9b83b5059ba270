"""eval on a GPU: sparse models answer tasks over TwELL, and as the dense model does."""

import json

import pytest
import torch
from conftest import stdlib_texts

from twellctl.bundle.twell_model import TwellFFN, gated_ffns
from twellctl.convert import convert
from twellctl.evaluate import evaluate
from twellctl.evaluation import choices
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("route", ["auto", "twell"])
def test_answers_over_twell_are_those_of_the_dense_model(
    make_model, tmp_path, monkeypatch, text_file, route
):
    monkeypatch.setenv("TWELL_ROUTE", route)
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    silu = make_model("llama", hidden_size=128, intermediate_size=512, initializer_range=0.05)
    convert(silu, tmp_path / "relu")
    words = stdlib_texts(1)[0].split()
    rows = [
        {"query": " ".join(words[i : i + 20]), "choices": words[i + 20 : i + 23], "gold": 0}
        for i in range(40)
    ]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, inner = [], choices.log_likelihoods

    def likelihoods(model, continuations, progress):
        found = inner(model, continuations, progress)
        asked.append((model, continuations, found))
        return found

    monkeypatch.setattr(choices, "log_likelihoods", likelihoods)
    done = evaluate(
        tmp_path / "relu",
        text_file,
        reference=silu,
        tasks=tmp_path / "words.jsonl",
        windows=4,
        seq_len=64,
    )
    (sparse, continuations, found), (dense_silu, _, _) = asked
    assert all(isinstance(ffn, TwellFFN) for ffn in gated_ffns(sparse))
    assert not any(isinstance(ffn, TwellFFN) for ffn in gated_ffns(dense_silu))
    dense = load_model(open_checkpoint(tmp_path / "relu"), dtype=torch.bfloat16)
    expected = torch.tensor(inner(dense, continuations))
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0.02, atol=0.1)
    assert done.dtype == "bfloat16"
    assert done.text.score.kl > 0
