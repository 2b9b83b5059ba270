"""A head over whole windows: against one token at a time, and against the layer it begins as."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from twellctl.heads import original as of_original
from twellctl.heads.last_layer import begun_head, lower_layers
from twellctl.heads.loss import LESS, guessing_loss
from twellctl.heads.unroll import unroll

S, AHEAD = 12, 4


@pytest.fixture
def windows():
    return torch.randint(512, (2, S), generator=torch.Generator().manual_seed(2))


def stock(original, ids):
    """Of one window: the outputs of lower layers and states `[S, (1 + n) K]`, keys and values `[S,
    Hkv, D]` of the last layer, as transformers itself returns them."""
    layers, outputs = original.model.model.layers, []
    lower = [layers[number] for number in lower_layers(len(layers))]
    hooks = [
        layer.register_forward_hook(lambda module, given, made: outputs.append(made))
        for layer in lower
    ]
    found = original.model.model(input_ids=ids[None], use_cache=True)
    for hook in hooks:
        hook.remove()
    cached = getattr(found, "cache", None) or found.past_key_values
    last = cached.layers[-1]
    return torch.cat((*outputs, found.last_hidden_state), -1)[0], *(
        part[0].transpose(0, 1) for part in (last.keys, last.values)
    )


def seen_one_by_one(keys, values):
    """Attention of one token over lists of keys and values `[Hkv, D]`."""

    def attend(q, k, v):
        keys.append(k)
        values.append(v)
        given = torch.zeros_like(q)
        for head in range(len(q)):
            group = head // (len(q) // len(k))
            scores = torch.stack([q[head] @ key[group] / q.shape[-1] ** 0.5 for key in keys])
            shares = scores.softmax(0)
            given[head] = sum(s * value[group] for s, value in zip(shares, values, strict=True))
        return given

    return attend


@torch.no_grad()
def test_every_base_and_step_is_what_one_token_after_the_other_gives(
    model_folder, open_original, windows
):
    original = open_original(model_folder, S, torch.float64)
    head = begun_head(original.model, torch.arange(512), 0).double()
    found = unroll(head, original, original.read(windows), AHEAD)
    assert [one.shape for one in found] == [(2, S - AHEAD, 32)] * AHEAD
    embeddings = original.model.get_input_embeddings()
    for window, ids in enumerate(windows):
        states, keys, values = stock(original, ids)
        for base in range(S - AHEAD):
            state = states[base]
            attend = seen_one_by_one([*keys[: base + 1]], [*values[: base + 1]])
            for step in range(AHEAD):
                place = base + 1 + step
                angles = original.model.model.rotary_emb(states, torch.tensor([[place]]))
                cos, sin = (part[0, 0] for part in angles)
                state = head(embeddings(ids[place]), state, (cos, sin), attend)
                torch.testing.assert_close(found[step][window, base], state)


@torch.no_grad()
def test_a_head_begins_as_the_last_layer(model_folder, open_original, windows):
    """What goes into that layer is given as the state, which `join` and norms let through."""
    original = open_original(model_folder, S, torch.float64)
    given = []
    last = original.model.model.layers[-1]
    hook = last.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    read = original.read(windows)
    hook.remove()
    head = begun_head(original.model, torch.arange(512), 0).double()
    head.norm_state = nn.Identity()
    head.join.weight.copy_(torch.eye(32, 64).roll(32, 1))
    shifted = replace(read, all_states=given[0].roll(-1, 1))
    (found,) = unroll(head, original, shifted, 1)
    # norms of transformers are computed in float32
    torch.testing.assert_close(found, read.states[:, 1:], rtol=1e-4, atol=1e-5)
    assert read.all_states.shape[-1] == 32 * (1 + len(head.sizes.lower))
    assert torch.equal(head.merged(read.all_states), read.states)


def test_what_a_head_begins_with_beside_the_layer(model_folder, open_original):
    original = open_original(model_folder, S)
    tokens = torch.arange(0, 512, 2)
    heads = [begun_head(original.model, tokens, seed) for seed in (0, 0, 1)]
    embedding, state = heads[0].join.weight.split(32, 1)
    assert 0 < embedding.std() < 0.02
    assert (state - torch.eye(32)).std() < 0.02
    assert (heads[0].norm_embedding.weight == 1).all()
    assert (heads[0].norm_state.weight == 1).all()
    assert torch.equal(heads[0].tokens, tokens)
    assert torch.equal(heads[0].join.weight, heads[1].join.weight)
    assert not torch.equal(heads[0].join.weight, heads[2].join.weight)


def test_in_bf16_as_on_a_gpu(model_folder, open_original, windows):
    """Weights stay float32, and what is made of them is near to what float32 makes."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        original = open_original(model_folder, S, dtype)
        head = begun_head(original.model, torch.arange(512), 0)
        read = original.read(windows)
        guesses = unroll(head, original, read, AHEAD)
        loss = guessing_loss(guesses, read.states, original.rows_of(head.tokens))
        assert {one.dtype for one in guesses} == {dtype}
        loss.backward()
        assert {part.grad.dtype for part in head.parameters()} == {torch.float32}
        found.append((loss, torch.cat([part.grad.flatten() for part in head.parameters()])))
    (loss, gradient), (rough_loss, rough) = found
    assert 0 < (loss - rough_loss).abs() < 0.02 * loss
    assert torch.cosine_similarity(gradient, rough, 0) > 0.9


def plain_loss(guesses, states, rows):
    """By the whole logits of every step."""
    total = 0
    for step, one in enumerate(guesses):
        wanted = (states[:, 1 + step : 1 + step + one.shape[1]] @ rows.T).softmax(-1)
        log_p = (one @ rows.T).log_softmax(-1)
        total = total - LESS**step * (wanted * log_p).sum(-1).mean()
    return total


@pytest.mark.parametrize("at_once", [1 << 25, 20 * 7, 1])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(monkeypatch, at_once):
    monkeypatch.setattr(of_original, "LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    states, rows = torch.randn(3, S, 16).double(), torch.randn(20, 16).double()
    guesses = [torch.randn(3, S - AHEAD, 16).double().requires_grad_() for _ in range(AHEAD)]
    losses = [f(guesses, states, rows) for f in (guessing_loss, plain_loss)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, guesses) for loss in losses))
