"""eval on text: its figures against transformers' logits, and what it refuses."""

import json
import math
import shutil

import pytest
import torch
from edits import json_in
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import twellctl.evaluation.windows as windows_module
from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.evaluate import evaluate
from twellctl.models import head_loss
from twellctl.profile import profile
from twellctl.text.blocks import spread_windows, token_stream
from twellctl.text.reading import read_texts


@pytest.fixture
def small_parts(monkeypatch):
    """Batches of three windows, and the logits of ten tokens at once."""
    monkeypatch.setattr(windows_module, "BATCH_TOKENS", 3 * 32)
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 10 * 512)


@torch.no_grad()
def by_hand(folder, ids) -> torch.Tensor:
    """Log-probabilities `[B, S - 1, V]` by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(ids).logits[:, :-1].log_softmax(-1)


def windows_of(paths, tokenizer, count=8, seq_len=32) -> torch.Tensor:
    stream = token_stream(read_texts(list(map(str, paths)), "text", tokenizer), tokenizer)
    return spread_windows(stream, count, seq_len)


@pytest.mark.parametrize("family", ["llama", "phi3", "granite", "gemma"])
def test_figures_are_those_of_transformers(
    make_model, tmp_path, text_file, tokenizer, small_parts, no_answers, family
):
    more = {"granite": {"logits_scaling": 3.0}, "gemma": {"hidden_act": "gelu_pytorch_tanh"}}
    silu = make_model(family, seed=1, **more.get(family, {}))
    convert(silu, tmp_path / "relu")
    done = evaluate(tmp_path / "relu", text_file, reference=silu, windows=8, seq_len=32)
    ids = windows_of([text_file], tokenizer)
    p, q = by_hand(tmp_path / "relu", ids), by_hand(silu, ids)
    targets, score = ids[:, 1:, None], done.text.score
    assert score.tokens == targets.numel() == 8 * 31
    assert score.cross_entropy == pytest.approx(-p.gather(-1, targets).mean().item(), abs=1e-4)
    of_reference = -q.gather(-1, targets).mean().item()
    assert score.reference_cross_entropy == pytest.approx(of_reference, abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(score.cross_entropy))
    assert score.kl == pytest.approx((q.exp() * (q - p)).sum(-1).mean().item(), abs=1e-4)
    assert score.kl > 0.001
    assert score.same_top == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    counted = profile(tmp_path / "relu", text_file, windows=8, seq_len=32)
    assert done.text.density_by_layer == tuple(layer.density for layer in counted.layers)
    assert done.text.density == pytest.approx(counted.density)


def test_a_silu_model_fires_everywhere_and_agrees_with_itself(silu_llama, text_file, no_answers):
    text = evaluate(silu_llama, text_file, reference=silu_llama, windows=2, seq_len=16).text
    assert (text.score.kl, text.score.same_top, text.density) == (0, 1, 1)
    assert text.score.cross_entropy == text.score.reference_cross_entropy


def test_kinds_of_text_have_scores_of_their_own(relu_llama, tmp_path, tokenizer, text_file):
    chat = tmp_path / "chat.jsonl"
    turn = {"role": "user", "content": "say what you think of a long walk in the rain"}
    chat.write_text(json.dumps({"messages": [turn] * 40}) + "\n")
    both = [f"code={text_file}", f"talk={chat}"]
    text = evaluate(relu_llama, both, windows=20, seq_len=32).text
    ids = windows_of([text_file, chat], tokenizer, 20)
    losses = -by_hand(relu_llama, ids).gather(-1, ids[:, 1:, None])
    assert [part.kind for part in text.by_kind] == ["code", "talk"]
    assert sum(part.tokens for part in text.by_kind) == text.score.tokens == losses.numel()
    total = sum(part.tokens * part.cross_entropy for part in text.by_kind)
    assert total == pytest.approx(losses.sum().item(), rel=1e-5)
    talk = text.by_kind[1]
    alone = -by_hand(relu_llama, ids[-1:]).gather(-1, ids[-1:, 1:, None])  # the last window
    assert talk.tokens >= 31
    if talk.tokens == 31:
        assert talk.cross_entropy == pytest.approx(alone.mean().item(), abs=1e-4)
    assert text.density_by_kind[1].tokens >= 32


def test_another_tokenizer_is_refused(make_model, relu_llama, text_file, tmp_path, tokenizer):
    def with_tokenizer(name: str, change) -> str:
        folder = tmp_path / name
        shutil.copytree(relu_llama, folder)
        with json_in(folder / "tokenizer.json") as content:
            change(content)
        return folder

    fewer = with_tokenizer("merges", lambda t: t["model"].update(merges=t["model"]["merges"][:9]))
    assert Tokenizer.from_file(str(fewer / "tokenizer.json")).get_vocab() == tokenizer.get_vocab()

    def rename(content: dict) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]

    others = [fewer, with_tokenizer("vocabulary", rename), make_model("llama", vocab_size=600)]
    for other in others:
        with pytest.raises(TwellError, match=r"reference .* has a different tokenizer from"):
            evaluate(relu_llama, text_file, reference=other, windows=2, seq_len=16)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)


def test_bad_calls_are_refused(relu_llama, make_model, text_file):
    with pytest.raises(UsageError, match="nothing to evaluate on: give --data, --tasks or --p"):
        evaluate(relu_llama)
    with pytest.raises(UsageError, match="seq-len must be 2 to 256"):
        evaluate(relu_llama, text_file, seq_len=1)
    with pytest.raises(UsageError, match="limit must be >= 1, got 0"):
        evaluate(relu_llama, text_file, limit=0)
    with pytest.raises(UsageError, match="limit is for tasks and prompts"):
        evaluate(relu_llama, text_file, limit=3)
    short = make_model("llama", max_position_embeddings=64)
    with pytest.raises(UsageError, match=r"2 to 64, the context of .*, got 256"):
        evaluate(relu_llama, text_file, reference=short, seq_len=256)
    assert evaluate(relu_llama, text_file, reference=short, windows=2).text.seq_len == 64
    other = make_model("llama", hidden_act="relu2")
    with pytest.raises(TwellError, match="has hidden_act 'relu2'"):
        evaluate(other, text_file)


def test_tokens_that_the_model_does_not_have_are_refused(make_model, text_file):
    small = make_model("llama", vocab_size=300)
    with pytest.raises(TwellError, match=r"makes id \d+, but the model has 300 tokens"):
        evaluate(small, text_file, windows=2, seq_len=16)


def test_the_command_shows_what_it_writes(
    cli, relu_llama, silu_llama, text_file, tmp_path, no_answers
):
    words = ["eval", relu_llama, "--reference", silu_llama, "--data", text_file]
    words += ["--windows=2", "--seq-len=16"]
    file = tmp_path / "eval.json"
    code, out, err = cli(*words, "--json", file)
    written = json.loads(file.read_text())
    score = written["text"]["score"]
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["all"])
    assert (code, err) == (0, [])
    assert row[1:3] == ["30", f"{score['cross_entropy']:.4f}"]
    assert row[4:] == [
        f"{score['reference_cross_entropy']:.4f}",
        f"{score['kl']:.4f}",
        f"{score['same_top']:.2%}",
        f"{written['text']['density']:.2%}",
    ]
    assert (written["reference"], written["tasks"], written["mean"]) == (str(silu_llama), [], None)
    assert cli(*words, "--json", file)[0] == 0  # one of its own is replaced
    _, out, _ = cli(*words, "--json", "-")
    assert json.loads(out) == written
    file.write_text('{"schema_version": 1}')
    code, _, err = cli(*words, "--json", file)
    assert (code, err) == (1, [f"error: {file} exists and is no evaluation: choose another name"])
