"""Draft heads are trained: what is learnt, what is kept, and that it is the same each time."""

import copy

import pytest
import torch
from scheduled import all_of, tokens_of

from twellctl.decoding.engine import Sampling
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.sequence import Sequence
from twellctl.errors import TwellError
from twellctl.heads.folder import load_head, open_head, save_head
from twellctl.heads.kept import counted_kept, kept_drafts
from twellctl.heads.last_layer import begun_head
from twellctl.heads.settings import HeadTraining
from twellctl.heads.training import frequent_tokens, rate_at, train_head
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

S = 48


@pytest.fixture(scope="module")
def repeating(silu_llama, open_original):
    """A model that goes by the last token mostly, so that it repeats itself, and windows that it
    wrote."""
    original = open_original(silu_llama, S)
    with torch.no_grad():
        for name, weight in original.model.named_parameters():
            if "norm" not in name:
                weight.mul_(0.3 if "layers" in name else 3)
    firsts = torch.randint(1, 512, (72, 2), generator=torch.Generator().manual_seed(3))
    how = {"max_new_tokens": 3 * S, "min_new_tokens": 3 * S, "do_sample": False}
    written = original.model.generate(firsts, **how, eos_token_id=None, pad_token_id=0)
    return original, written[:, -S:]


def trained(repeating, **settings):
    losses = []
    original, windows = repeating
    how = HeadTraining(seq_len=S, **{"step_tokens": 8 * S, "learning_rate": 5e-3} | settings)
    done = train_head(original, windows[:64], how, lambda *far: losses.append(far))
    return done, losses


@pytest.fixture(scope="module")
def learnt(repeating):
    return trained(repeating, epochs=12)


def test_a_head_learns_what_a_model_repeats(repeating, learnt):
    original, windows = repeating
    before = begun_head(original.model, torch.arange(512), 0)
    done, far = learnt
    assert (done.steps, len(far)) == (96, 96)
    assert [step for step, *_ in far] == [*range(1, 97)]
    assert far[0][3] is None
    assert far[-1][3] == 0
    assert far[-1][2] == done.loss < 0.5 * far[0][2]
    first, last = (kept_drafts(head, original, windows[64:], 3) for head in (before, done.head))
    assert first.by_depth[0] < 0.5
    assert last.by_depth[0] > 0.8
    assert last.tokens == 8 * (S - 7)
    assert sorted(last.tokens_a_pass) == last.tokens_a_pass
    assert last.tokens_a_pass[-1] > 4


@pytest.mark.parametrize("count", [1, 3])
def test_rounds_keep_what_was_counted(repeating, learnt, count):
    """The same head drafts in the engine, and what that writes is counted."""
    (original, windows), head = repeating, learnt[0].head
    model = copy.deepcopy(original.model)
    model.set_attn_implementation("sdpa")
    scheduler = open_scheduler(model, draft=head, drafts=Drafts(count))
    texts = []
    for window in windows[64:].tolist():
        asked = Sequence(window[:4], Sampling(S - 4, 0, ignore_eos=True))
        texts.append(window[:4] + tokens_of(all_of(scheduler, [asked])[asked]))
    passes = scheduler.tally.drafted.passes
    counted = kept_drafts(head, original, torch.tensor(texts), 8).tokens_a_pass[count - 1]
    assert 8 * (S - 4) / passes == pytest.approx(counted, rel=0.1)
    assert counted > 1.5


def test_the_same_training_gives_the_same_bits(repeating):
    heads = [trained(repeating, epochs=1, seed=seed)[0].head for seed in (0, 0, 1)]
    one, again, other = (torch.cat([p.flatten() for p in head.parameters()]) for head in heads)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_what_is_kept_does_not_depend_on_how_many_windows_go_together(repeating):
    original, windows = repeating
    head = begun_head(original.model, torch.arange(0, 512, 3), 0)
    found = [kept_drafts(head, original, windows, at_once) for at_once in (1, 5, 72)]
    assert found[0] == found[1] == found[2]


def test_a_loss_that_is_no_number_ends_the_training(repeating):
    with pytest.raises(TwellError, match="its loss is no number: give a lower --learning-rate"):
        trained(repeating, epochs=50, learning_rate=1e30)


def test_rounds_and_depths_of_what_is_kept():
    """One window: 2 kept, then none; the next: all. Rounds with 2 drafts begin at 0, 3 and 4."""
    found = counted_kept(torch.tensor([[2, 1, 0, 0, 7], [7, 7, 7, 7, 7]]))
    assert found.tokens == 10
    assert found.by_depth[:3] == [0.8, 7 / 8, 6 / 7]
    assert found.by_depth[3:] == [1] * 4
    assert found.tokens_a_pass[0] == pytest.approx((2 + 1 + 1 + 2 + 2 * 3) / 7)
    assert found.tokens_a_pass[1] == pytest.approx((3 + 1 + 3 + 3 + 3) / 5)
    assert found.tokens_a_pass[6] == pytest.approx((3 + 1 + 8 + 8) / 4)


def test_nothing_is_kept():
    found = counted_kept(torch.zeros(2, 5, dtype=torch.int64))
    assert found.by_depth == [0.0] * 7
    assert found.tokens_a_pass == [1.0] * 7


def test_tokens_are_the_frequent_ones_and_then_the_lowest():
    windows = torch.tensor([[9, 9, 9, 4], [4, 7, 9, 2]])
    assert frequent_tokens(windows, 12, 2).tolist() == [4, 9]
    assert frequent_tokens(windows, 12, 6).tolist() == [0, 1, 2, 4, 7, 9]
    assert frequent_tokens(windows, 12, 99).tolist() == [*range(12)]


def test_the_rate_rises_over_50_steps_and_falls_to_0():
    rates = [rate_at(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(0.02)
    assert max(rates) == rates[49] > 0.99
    assert rates[500] == pytest.approx(0.5)
    assert rates[-1] < 1e-4
    assert rate_at(0, 1) == 1


def test_a_head_is_read_as_it_was_written(model_folder, tmp_path):
    model = load_model(open_checkpoint(model_folder))
    head = begun_head(model, torch.arange(5, 300), 0)
    save_head(head, model, tmp_path, {"source": "owner/model"})
    folder = open_head("head", tmp_path)
    assert folder.source == "owner/model"
    again = load_head(folder, model, "model")
    assert again.sizes == head.sizes
    assert torch.equal(again.tokens, head.tokens)
    for name, part in head.named_parameters():
        assert torch.equal(again.get_parameter(name), part.bfloat16().float()), name
    load_head(folder, model.bfloat16(), "model")
    sizes = folder.facts["sizes"]
    for lower in ([0, 99], [-1, 1], ["0", 1]):
        folder.facts["sizes"] = sizes | {"lower": lower}
        with pytest.raises(TwellError, match=r"cannot be loaded \(it reads layers .* of 2\)"):
            load_head(folder, model, "model")
    folder.facts["sizes"] = sizes
    with torch.no_grad():
        model.model.norm.weight[3] += 0.1
    with pytest.raises(TwellError, match="head was trained for another model than other"):
        load_head(folder, model, "other")
