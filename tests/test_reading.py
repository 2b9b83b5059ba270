"""One pass over text: losses and spreads against counts made here."""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from twellctl.convert import convert
from twellctl.firing.counts import LayerCount
from twellctl.profile import profile
from twellctl.text.blocks import token_stream
from twellctl.text.reading import read_texts

WINDOWS, LENGTH = 20, 48


@pytest.fixture(scope="module")
def two_texts(tmp_path_factory, text_file):
    """Two kinds of text, the windows over both, and the kind of each of their tokens."""
    folder = tmp_path_factory.mktemp("kinds")
    paths = [folder / "first.txt", folder / "second.txt"]
    for path, text in zip(paths, read_texts([str(text_file)], "text"), strict=False):
        path.write_text(text[:1500])
    return [str(path) for path in paths]


def windows_of(paths, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and by token the number of its text; both `[WINDOWS, LENGTH]`."""
    ids, kinds = [], []
    for kind, path in enumerate(paths):
        for part in token_stream(read_texts([path], "text"), tokenizer):
            ids += part.tolist()
            kinds += [kind] * len(part)
    starts = torch.linspace(0, len(ids) - LENGTH, WINDOWS).long()[:, None] + torch.arange(LENGTH)
    return torch.tensor(ids)[starts], torch.tensor(kinds)[starts]


def losses_of(folder, ids) -> torch.Tensor:
    """The cross-entropy of each token but the first, float64 `[WINDOWS, LENGTH - 1]`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(ids).logits[:, :-1].double()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        len(ids), -1
    )


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_losses_are_those_of_the_stock_class(make_model, tmp_path, two_texts, tokenizer, family):
    convert(make_model(family, seed=3), tmp_path / "model")
    found = profile(tmp_path / "model", two_texts, windows=WINDOWS, seq_len=LENGTH)
    ids, kinds = windows_of(two_texts, tokenizer)
    losses = losses_of(tmp_path / "model", ids)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    by_window = losses.mean(1).tolist()
    overlap = found.tokens / found.text_tokens
    assert overlap > 1  # so these windows say as much as fewer would
    error = statistics.stdev(by_window) / math.sqrt(WINDOWS / overlap)
    assert found.loss_error == pytest.approx(error, rel=1e-4)
    for number, part in enumerate(found.by_kind):
        assert part.loss == pytest.approx(float(losses[kinds[:, 1:] == number].mean()), rel=1e-5)
    assert found.by_position[0].loss is None  # nothing stands before the first token
    for part in found.by_position[1:]:
        expected = losses[:, part.first - 1 : part.last]
        assert part.loss == pytest.approx(float(expected.mean()), rel=1e-5)


def test_windows_of_one_token_have_no_loss(relu_llama, text_file):
    found = profile(relu_llama, str(text_file), windows=3, seq_len=1)
    assert (found.loss, found.loss_error, found.by_kind[0].loss) == (None, None, None)


def test_the_spread_of_a_layer():
    torch.manual_seed(0)
    gate = torch.rand(1000, 64) - torch.rand(1000, 1) ** 0.2  # tokens of many densities
    gate[:, :5] = -1
    count = LayerCount(64, 16, torch.device("cpu"))
    for part in gate.split(300):
        count.add(part, part.relu())
    found, nnz = count.summary(), sorted((gate > 0).sum(1).tolist())
    assert (found.nnz_p10, found.nnz_p90, found.dead) == (nnz[99], nnz[899], 5)
