"""Attention and the norms of the decode engine, without a GPU: how they are launched, and plans."""

import pytest
import torch
from launched import Launches, bf16
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding import attention, norms

CPU = torch.device("cpu")
SHAPES = [(32, 32, 64), (32, 8, 128), (14, 2, 64), (9, 3, 64), (32, 32, 96), (71, 1, 64)]
SHAPES += [(12, 4, 256), (8, 4, 256), (16, 16, 256), (32, 8, 160), (32, 32, 100)]


def arguments(H: int, Hkv: int, D: int, B: int = 3, W: int = 4, queries: int = 1) -> dict:
    """What `attend` takes."""
    plan = attention.plan_attend(B, H, Hkv, D, W * PAGE, 132, queries)
    B *= queries
    return {
        "plan": plan,
        "layer": attention.AttendLayer(
            *(bf16(9, Hkv, PAGE, plan.width) for _ in range(2)), D**-0.5
        ),
        "qkv": bf16(B, (H + 2 * Hkv) * D),
        "positions": torch.zeros(B, dtype=torch.int32),
        "tables": torch.zeros(B, W, dtype=torch.int32),
        "rotary": attention.Rotary(bf16(W * PAGE, plan.width), bf16(W * PAGE, plan.width), D),
        "workspace": attention.open_workspace([plan], CPU),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attend_is_launched_as_its_source_says(shape):
    kernels, given = Launches(), arguments(*shape)
    out = attention.attend(kernels, **given)
    assert out.shape == (3, shape[0] * shape[2])
    ((_, grid, block, _, smem_bytes),) = kernels.made
    assert (grid, block, smem_bytes) == (
        given["plan"].grid,
        32 * given["plan"].num_warps,
        given["plan"].smem_bytes,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_of_several_tokens_are_stored_before_they_are_read(shape):
    kernels, given = Launches(), arguments(*shape, queries=5)
    out = attention.attend(kernels, **given)
    assert out.shape == (15, shape[0] * shape[2])
    (store, attend), one = kernels.made, Launches()
    assert store[:3] == ("store_keys", (shape[1], 15), 32)
    assert kernels.overlaps == [True, True]
    attention.attend(one, **arguments(*shape))
    ((name, (blocks, rows, splits), *rest),) = one.made
    assert attend[:2] == (name, (blocks, 5 * rows, splits))  # a token is split as if it were alone
    assert (attend[2], attend[4]) == (rest[0], rest[2])


def test_norms_are_launched_as_their_source_says():
    kernels = Launches()
    norms.rms_norm(kernels, bf16(3, 2056), bf16(2056), 1e-5)
    wide = bf16(3, 4112)[:, :2056]
    assert norms.rms_norm(kernels, wide, bf16(2056), 1e-5, out=wide) is wide
    z, x = bf16(2, 3, 2056)
    total, y = norms.add_norm(kernels, z, bf16(2056), x, bf16(2056), 1e-5)
    assert total is not y
    total, y = norms.add_norm(kernels, z, bf16(2056), x, None, 1e-5)
    assert total is y
    tokens, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    x, y = norms.embed_norm(kernels, tokens, bf16(9, 2056), bf16(2056), 1e-5, counts)
    assert x.shape == y.shape == (3, 2056)
    norms.embed_norm(kernels, tokens, bf16(9, 2056), bf16(2056), 1e-5, scale=2)
    x, y = norms.embed_norm(kernels, tokens, bf16(9, 2056), None, 1e-5)
    assert y is x
    given = tokens[:1], bf16(9, 2056), bf16(16, 2056), bf16(2, 2056), 1e-5
    read = torch.zeros(16, dtype=torch.int32)
    for among in (None, (read, tokens[:1])):
        y = norms.join_norms(kernels, *given, among)
        assert y.shape == (1, 4112)
        assert kernels.made[-1][3]["num_read"] == (16 if among else 0)
    names = ["rms_norm"] * 2 + ["add_norm"] * 2 + ["embed_norm"] * 3
    assert [name for name, *_ in kernels.made] == [*names, "join_norms", "join_norms"]
    grids = [(3,)] * 7 + [(2,)] * 2
    assert [launch[1:3] for launch in kernels.made] == [(grid, 288) for grid in grids]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("B", [1, 2, 16, 48, 64])
@pytest.mark.parametrize("max_positions", [64, 1024, 32768, 131072])
def test_plans_fit(shape, B, max_positions):
    H, Hkv, D = shape
    plan = attention.plan_attend(B, H, Hkv, D, max_positions, 132)
    blocks, rows, splits = plan.grid
    assert blocks * plan.heads >= H
    assert rows == B
    assert 1 <= splits <= 64
    assert 4 <= plan.num_warps <= 8
    assert plan.smem_bytes <= 48 * 1024
    assert (
        splits == 1 or (splits - 1) * plan.num_warps * attention.batch_positions(D) < max_positions
    )
    assert blocks * rows * splits <= max(8 * 264, blocks * rows)
    assert plan.num_parts * 4 <= 32 << 20
    assert (plan.num_parts > 0) == (plan.num_tickets > 0) == (splits > 1)


def test_what_the_kernels_do_not_take_is_said():
    assert attention.why_not_attend(32, 8, 128) is None
    for D in (81, 258):
        heads = "heads of an even number of columns up to 256"
        said = f"the attention kernel takes {heads}, not of {D}"
        assert attention.why_not_attend(32, 8, D) == said
        with pytest.raises(ValueError, match=said):
            attention.plan_attend(1, 32, 8, D, 1024, 132)
    assert "32 are not a multiple" in attention.why_not_attend(32, 5, 64)
    for queries in (0, 17):
        with pytest.raises(ValueError, match=f"1 to 16 new tokens in a launch, not {queries}"):
            attention.plan_attend(1, 32, 8, 64, 1024, 132, queries)
        with pytest.raises(ValueError, match=f"1 to 16 new tokens in a launch, not {queries}"):
            attention.plan_alike(1, 32, 8, 64, 1024, 132, queries, longest=1024)
    assert norms.why_no_norm(2048) is None
    assert norms.why_no_norm(100).endswith("not of 100")
    assert norms.why_no_norm(16392).endswith("not of 16392")
    states, read = bf16(33, 64), torch.zeros(33, dtype=torch.int32)
    with pytest.raises(ValueError, match="finds one of up to 32 states, not of 33"):
        norms.join_norms(None, read, states, states, states, 1e-5, (read, read))


def test_rotary_tables_are_what_the_model_computes():
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))
    made = attention.rotary_tables(rotary, 9000, 80, CPU)
    at = torch.tensor([[0, 1, 777, 8191, 8192, 8999]])
    wanted = rotary(bf16(1), at)
    assert made.turned == 64
    assert torch.equal(made.cos[at[0], :64], wanted[0][0])
    assert torch.equal(made.sin[at[0], :64], wanted[1][0])
    assert (made.cos[:, 64:] == 1).all()
    assert (made.sin[:, 64:] == 0).all()
