"""The norms of the decode engine by themselves: against transformers', and each other."""

import pytest
import torch
from bf16_rows import EPS, close, drawn_rows, norm
from torch import Tensor

from twellctl.decoding.norms import add_norm, embed_norm, join_norms, rms_norm

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def random_bf16(*shape: int, **how: float) -> Tensor:
    return drawn_rows(*shape, device=DEVICE, **how)


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("K", [8, 64, 264, 2048, 4096, 8200, 16384])
def test_norms(kernels, B, K):
    x = random_bf16(B, K, seed=1, scale=3.0)
    weight = 1 + random_bf16(K, seed=3, scale=0.2)
    found = rms_norm(kernels, x, weight, EPS)
    close(found, norm(x, weight), 2)
    share = (found == norm(x, weight)).float().mean()  # the sum's order may move a rounding
    assert share > 0.99


@pytest.mark.parametrize("K", [64, 2048, 8200])
def test_a_norm_that_is_added(kernels, K):
    z, x = random_bf16(2, 5, K, seed=1)
    weights = [1 + random_bf16(K, seed=seed, scale=0.2) for seed in (3, 4)]
    total, y = add_norm(kernels, z, weights[0], x, weights[1], EPS)
    assert torch.equal(total, x + rms_norm(kernels, z, weights[0], EPS))
    assert torch.equal(y, rms_norm(kernels, total, weights[1], EPS))
    alone, same = add_norm(kernels, z, weights[0], x, None, EPS)
    assert alone is same
    assert torch.equal(alone, total)


def test_a_norm_of_a_part_of_rows(kernels):
    x, weight = random_bf16(5, 704, seed=1), 1 + random_bf16(256, seed=3, scale=0.2)
    wanted = x.clone()
    wanted[:, 200:456] = rms_norm(kernels, x[:, 200:456].contiguous(), weight, EPS)
    part = x[:, 200:456]
    rms_norm(kernels, part, weight, EPS, out=part)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("K", [64, 2048, 8200])
def test_embeddings_and_their_norm(kernels, K):
    table, weight = random_bf16(11, K, seed=1), 1 + random_bf16(K, seed=3, scale=0.2)
    tokens = torch.tensor([3, 10, 0, 3], dtype=torch.int32, device=DEVICE)
    counts = torch.full((3, 700), 9, dtype=torch.int32, device=DEVICE)
    x, y = embed_norm(kernels, tokens, table, weight, EPS, counts)
    assert torch.equal(x, table[tokens.long()])
    assert torch.equal(y, rms_norm(kernels, x, weight, EPS))
    assert not counts.any()
    x, y = embed_norm(kernels, tokens, table, weight, EPS, scale=54.5)
    assert torch.equal(x, table[tokens.long()] * 54.5)
    assert torch.equal(y, rms_norm(kernels, x, weight, EPS))


@pytest.mark.parametrize("K", [64, 2048, 8200])
def test_norms_that_are_joined(kernels, K):
    table, x = random_bf16(11, K, seed=1), random_bf16(1, K, seed=2)
    weights = 1 + random_bf16(2, K, seed=3, scale=0.2)
    token = torch.tensor([10], dtype=torch.int32, device=DEVICE)
    made = join_norms(kernels, token, table, x, weights, EPS)
    each = [rms_norm(kernels, *of, EPS) for of in zip((table[10:], x), weights, strict=True)]
    assert torch.equal(made, torch.cat(each, 1))


@pytest.mark.parametrize("num_states", [1, 16, 32])
def test_a_state_that_is_found_by_its_position(kernels, num_states):
    """The first one of several; the first of all if there is none."""
    table, states = random_bf16(11, 512, seed=1), random_bf16(num_states, 512, seed=2)
    weights = 1 + random_bf16(2, 512, seed=3, scale=0.2)
    token = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    read = torch.arange(100, 100 + num_states, dtype=torch.int32, device=DEVICE)
    read[num_states // 2 :] = 100 + num_states // 2
    for at, place in ((100, 0), (100 + num_states // 2, num_states // 2), (7, 0)):
        position = torch.tensor([at + 1], dtype=torch.int32, device=DEVICE)
        given = kernels, token, table, states, weights, EPS
        made = join_norms(*given, among=(read, position))
        alone = join_norms(kernels, token, table, states[place : place + 1], weights, EPS)
        assert torch.equal(made, alone)


def test_norm_keeps_what_is_not_finite_in_its_row(kernels):
    x, weight = random_bf16(3, 512, seed=1), torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
    x[1, 7] = torch.nan
    found = rms_norm(kernels, x, weight, EPS)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
