"""`attend` by itself: against float64, and against transformers' own layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bf16_rows import EPS, close, drawn_rows, norm
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3 import modeling_qwen3

from twellctl.bundle.twell_spec import HEADS_A_BLOCK, PAGE
from twellctl.decoding.attention import (
    AttendLayer,
    Rotary,
    attend,
    head_width,
    open_workspace,
    plan_attend,
    rotary_tables,
)
from twellctl.decoding.paged_cache import cache_argument
from twellctl.decoding.pages import pages_for

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NAN = float("nan")
# H, Hkv, D: alone and shared by 2, 3, 4, 7 (two blocks, one not full); all head sizes
HEADS = [(3, 3, 64), (4, 2, 64), (6, 2, 64), (8, 2, 128), (7, 1, 64), (2, 2, 96), (3, 1, 96)]
HEADS += [(2, 2, 256), (4, 2, 256), (3, 1, 256), (4, 1, 80)]
HEADS += [(4, 2, 112), (3, 1, 160), (4, 2, 100), (3, 1, 88), (7, 1, 38)]
# positions of rows: first token, ends of batches and pages, several pages, several splits
SHORT = [0, 1, 15, 31, 32, 63, 64, 65]
LONG = [700, 127, 0, 1023, 128]


def random_bf16(*shape: int, **how: float) -> Tensor:
    return drawn_rows(*shape, device=DEVICE, **how)


class Pages:
    """Keys and values of rows, in pages in a random order; all that is not theirs is NaN."""

    def __init__(self, positions: list[int], Hkv: int, D: int, seed: int = 0):
        counts = [pages_for(position + 1) for position in positions]
        order = 1 + np.random.default_rng(seed).permutation(sum(counts))
        self.positions, self.width = positions, max(counts) + 2
        wide = torch.full((len(counts), self.width + 3), 2**30, dtype=torch.int32)  # no such page
        wide[:, : self.width] = 0
        self.tables = wide.to(DEVICE)[:, : self.width]
        for table, pages in zip(self.tables, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            table[: len(pages)] = torch.from_numpy(pages)
        shape, self.D = (sum(counts) + 1, Hkv, PAGE, head_width(D)), D
        self.keys, self.values = (
            torch.full(shape, NAN, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
        )
        for cached in (self.keys, self.values):
            cached[..., D:] = 0
        for row, position in enumerate(positions):
            old = [random_bf16(Hkv, position, D, seed=9 * row + i) for i in (1, 2)]
            self.put(row, *old)

    def put(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values `[Hkv, positions, D]` from position 0 on."""
        for p in range(keys.shape[1]):
            page = int(self.tables[row, p // PAGE])
            self.keys[page, :, p % PAGE, : self.D] = keys[:, p]
            self.values[page, :, p % PAGE, : self.D] = values[:, p]

    def of_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[Hkv, positions + 1, D]`."""
        pages = self.tables[row].long()
        end = self.positions[row] + 1
        return tuple(
            c[pages].transpose(0, 1).flatten(1, 2)[:, :end, : self.D]
            for c in (self.keys, self.values)
        )


def tables_of_angles(D: int, turned: int | None = None) -> Rotary:
    turned = turned or D
    angles = torch.arange(2048)[:, None] * 1e4 ** (-torch.arange(0, turned, 2) / turned)
    angles = F.pad(torch.cat((angles, angles), 1), (0, head_width(D) - turned))
    return Rotary(angles.cos().bfloat16().to(DEVICE), angles.sin().bfloat16().to(DEVICE), turned)


def layer_of(pages: Pages, window: int | None, normed: bool, cap: float | None) -> AttendLayer:
    """A layer over these pages; `normed`: with RMSNorms over heads."""
    D, rest = pages.D, (0, head_width(pages.D) - pages.D)
    weights = [1 + random_bf16(D, seed=i, scale=0.1) if normed else None for i in (3, 4)]
    wide = [None if weight is None else F.pad(weight, rest) for weight in weights]
    return AttendLayer(pages.keys, pages.values, D**-0.5, window, *wide, EPS, cap)


def new_heads(qkv: Tensor, rotary, pages: Pages, layer: AttendLayer, H: int, Hkv: int):
    """q, k, v of the new tokens `[B, heads, D]`, as transformers makes them in bf16."""
    q, k, v = qkv.view(len(qkv), H + 2 * Hkv, -1).split((H, Hkv, Hkv), 1)
    if layer.q_norm is not None:
        D = q.shape[-1]
        q, k = norm(q, layer.q_norm[:D]), norm(k, layer.k_norm[:D])
    at = torch.tensor(pages.positions, device=DEVICE)
    turned = rotary.turned
    both = [part[..., :turned] for part in (q, k)]
    both = apply_rotary_pos_emb(*both, rotary.cos[at, :turned], rotary.sin[at, :turned])
    q, k = (torch.cat((new, old[..., turned:]), -1) for new, old in zip(both, (q, k), strict=True))
    return q, k, v


def wanted_rows(pages: Pages, q: Tensor, layer: AttendLayer) -> Tensor:
    """softmax(q K^T scale) V in float64, of each row's own length: `[B, H D]`."""
    rows = []
    for row, position in enumerate(pages.positions):
        start = max(0, position + 1 - layer.window) if layer.window else 0
        k, v = (part[:, start:].double() for part in pages.of_row(row))
        sharing = q.shape[1] // len(k)
        scores = torch.einsum("gsd,gpd->gsp", q[row].double().unflatten(0, (-1, sharing)), k)
        scores *= layer.scale
        if layer.cap:
            scores = layer.cap * (scores / layer.cap).tanh()
        rows.append(torch.einsum("gsp,gpd->gsd", scores.softmax(-1), v).flatten())
    return torch.stack(rows)


def check_attend(
    kernels,
    heads,
    positions,
    *,
    window=None,
    normed=False,
    splits=None,
    warps=None,
    whole=1,
    split_batches=1,
    turned=None,
    cap=None,
) -> Tensor:
    """One step over random pages; the rows it gives."""
    H, Hkv, D = heads
    pages = Pages(positions, Hkv, D)
    layer = layer_of(pages, window, normed, cap)
    plan = plan_attend(len(positions), H, Hkv, D, pages.width * PAGE, 132)
    plan = replace(
        plan,
        splits=splits or plan.splits,
        num_warps=max(warps or 0, plan.num_warps) if D > 128 else warps or plan.num_warps,
        whole_batches=whole,
        split_batches=split_batches,
    )
    qkv = random_bf16(len(positions), (H + 2 * Hkv) * D, seed=5)
    rotary = tables_of_angles(D, turned=turned)
    workspace = open_workspace([plan], torch.device(DEVICE))
    at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    args = (qkv, at, pages.tables, rotary, workspace)
    found = attend(kernels, plan, layer, *args)

    q, k, v = new_heads(qkv, rotary, pages, layer, H, Hkv)
    for row, position in enumerate(positions):
        new_k, new_v = (part[:, position] for part in pages.of_row(row))
        assert torch.equal(new_v, v[row]), f"row {row}: v in the cache"
        if normed:
            close(new_k, k[row], 2)
        else:
            assert torch.equal(new_k, k[row]), f"row {row}: k in the cache"
    # a q that is rounded otherwise moves its scores
    close(found, wanted_rows(pages, q, layer), 2 if normed else 1, 1e-3 if normed else None)
    for cached in (pages.keys, pages.values):
        assert not cached[..., D:].any()
    untouched = sum((~cached[..., :D].isnan()).sum() for cached in (pages.keys, pages.values))
    assert untouched == sum(position + 1 for position in positions) * Hkv * D * 2

    again = attend(kernels, plan, layer, *args)
    assert torch.equal(found.view(torch.int16), again.view(torch.int16)), "differs from run to run"
    assert not workspace.tickets.any()
    return found


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("positions", [SHORT, LONG], ids=["short", "long"])
def test_attend(kernels, heads, positions):
    check_attend(kernels, heads, positions, whole=3)


@pytest.mark.parametrize("heads", HEADS[::2], ids=str)
@pytest.mark.parametrize(
    ("splits", "warps", "whole", "of_split"), [(5, 5, 1, 1), (16, 4, 1, 2), (3, 8, 2, 1)]
)
def test_splits(kernels, heads, splits, warps, whole, of_split):
    how = {"splits": splits, "warps": warps, "whole": whole}
    check_attend(kernels, heads, LONG, split_batches=of_split, **how)


@pytest.mark.parametrize("heads", HEADS[1::2], ids=str)
@pytest.mark.parametrize("window", [1, 33, 64, 300, 5000])
def test_window(kernels, heads, window):
    check_attend(kernels, heads, LONG, window=window, splits=3, warps=4)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_norm_of_heads(kernels, heads):
    check_attend(kernels, heads, [0, 77, 300], normed=True, splits=2, warps=4)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_scores_that_are_capped(kernels, heads):
    check_attend(kernels, heads, [0, 77, 300], cap=0.7, splits=2, warps=4)


@pytest.mark.parametrize(
    ("heads", "turned"), [((4, 2, 64), 48), ((4, 2, 128), 96), ((3, 1, 256), 16), ((4, 1, 100), 50)]
)
def test_heads_that_are_turned_in_part(kernels, heads, turned):
    check_attend(kernels, heads, [0, 77, 300], turned=turned)


def check_queries(
    kernels,
    heads,
    spans: list[tuple[int, int]],
    *,
    window=None,
    normed=False,
    splits=None,
    warps=None,
    split_batches=1,
    cap=None,
    turned=None,
) -> None:
    """Several new tokens of each row, (position of the first, how many) in one launch.

    Results and what is cached have the bits of steps with one token, and are near to float64.
    """
    H, Hkv, D = heads
    B, Q = len(spans), max(count for _, count in spans)
    lasts = [first + count - 1 for first, count in spans]
    pages, others = (Pages(lasts, Hkv, D) for _ in range(2))
    for made in (pages, others):
        for row, (first, count) in enumerate(spans):
            for position in range(first, first + count):
                page, slot = int(made.tables[row, position // PAGE]), position % PAGE
                made.keys[page, :, slot] = made.values[page, :, slot] = (
                    NAN  # the columns behind, too
                )
    layer, other = (layer_of(made, window, normed, cap) for made in (pages, others))
    plan = plan_attend(B, H, Hkv, D, pages.width * PAGE, 132, Q)
    plan = replace(plan, splits=splits or plan.splits, num_warps=warps or plan.num_warps)
    plan = replace(plan, whole_batches=1, split_batches=split_batches)
    alone = replace(plan, B=1, queries=1)
    workspace = open_workspace([plan, alone], torch.device(DEVICE))
    rotary = tables_of_angles(D, turned=turned)
    qkv = random_bf16(B * Q, (H + 2 * Hkv) * D, seed=5)
    at = torch.full((B, Q), -1, dtype=torch.int32)
    for row, (first, count) in enumerate(spans):
        at[row, Q - count :] = torch.arange(first, first + count)
    at = at.flatten().to(DEVICE)
    tables = pages.tables.repeat_interleave(Q, 0)
    found = attend(kernels, plan, layer, qkv, at, tables, rotary, workspace)
    for token in (at >= 0).nonzero().flatten().tolist():
        one, row = slice(token, token + 1), token // Q
        table = others.tables[row : row + 1]
        single = attend(kernels, alone, other, qkv[one], at[one], table, rotary, workspace)
        assert torch.equal(single.view(torch.int16)[0], found.view(torch.int16)[token]), token
        others.positions = [int(at[token])] * B
        q, _, _ = new_heads(qkv[one].expand(B, -1), rotary, others, other, H, Hkv)
        wanted = wanted_rows(others, q, other)[row]
        close(single[0], wanted, 2 if normed else 1, 1e-3 if normed else None)
    for cached, known in ((pages.keys, others.keys), (pages.values, others.values)):
        assert torch.equal(cached.view(torch.int16), known.view(torch.int16))
    assert not workspace.tickets.any()


# rows in the middle of a page, over its end, from the first token on, with fewer tokens than others
SPANS = {
    1: [(700, 1), (0, 1)],
    2: [(127, 2), (62, 1), (0, 2)],
    5: [(701, 5), (61, 5), (0, 3), (1020, 1)],
    16: [(1000, 16), (0, 16), (120, 9)],
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("queries", SPANS)
def test_several_tokens_of_a_row(kernels, heads, queries):
    check_queries(kernels, heads, SPANS[queries])


@pytest.mark.parametrize(
    ("heads", "how"),
    [
        ((4, 2, 64), {"window": 33, "splits": 3}),
        ((8, 2, 128), {"normed": True, "splits": 16}),
        ((7, 1, 38), {"turned": 20, "cap": 0.7}),
        ((3, 1, 256), {"normed": True, "window": 300, "splits": 5, "warps": 8}),
        ((12, 2, 128), {"splits": 9, "split_batches": 2}),
        ((4, 2, 100), {"normed": True, "turned": 50, "splits": 2}),
    ],
    ids=str,
)
def test_several_tokens_of_a_row_of_other_models(kernels, heads, how):
    check_queries(kernels, heads, SPANS[5], **how)


@pytest.mark.parametrize("heads", [(12, 2, 128), (7, 1, 64), (8, 2, 256)], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_blocks_of_any_number_of_heads_give_the_same_bits(kernels, heads, queries):
    H, Hkv, D = heads
    rotary, qkv = tables_of_angles(D), random_bf16(queries, (H + 2 * Hkv) * D, seed=5)
    found = []
    for num in HEADS_A_BLOCK:
        pages = Pages([1000 + queries - 1], Hkv, D)
        plan = plan_attend(1, H, Hkv, D, pages.width * PAGE, 132, queries)
        plan = replace(plan, heads=num, split_batches=2)
        at = torch.arange(1000, 1000 + queries, dtype=torch.int32, device=DEVICE)
        layer = AttendLayer(pages.keys, pages.values, D**-0.5)
        tables = pages.tables.expand(queries, -1)
        workspace = open_workspace([plan], torch.device(DEVICE))
        found.append(attend(kernels, plan, layer, qkv, at, tables, rotary, workspace))
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found)


def test_rows_do_not_depend_on_their_neighbours(kernels):
    H, Hkv, D = 4, 2, 64
    plan = replace(plan_attend(4, H, Hkv, D, 1024, 132), splits=3, num_warps=4)
    qkv, rotary = random_bf16(4, (H + 2 * Hkv) * D, seed=7), tables_of_angles(D)
    workspace = open_workspace([plan], torch.device(DEVICE))
    pages = Pages([600, 600, 600, 600], Hkv, D)
    pages.tables[1:] = 0  # rows that only fill up the batch, at the dump
    found = []
    for row in range(4):
        at = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        at[row] = 600
        tables, rows = torch.zeros_like(pages.tables), qkv.clone()
        tables[row], rows[row] = pages.tables[0], qkv[0]
        layer = AttendLayer(pages.keys, pages.values, D**-0.5)
        found.append(attend(kernels, plan, layer, rows, at, tables, rotary, workspace)[row])
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("length", [1, 65, 200])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_as_transformers(kernels, family, length):
    config, module = {
        "llama": (LlamaConfig, modeling_llama.LlamaAttention),
        "qwen3": (Qwen3Config, modeling_qwen3.Qwen3Attention),
    }[family]
    H, Hkv, D, K = 8, 4, 64, 128
    config = config(
        hidden_size=K,
        num_attention_heads=H,
        num_key_value_heads=Hkv,
        head_dim=D,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    theirs = module(config, 0).to(DEVICE, torch.bfloat16).requires_grad_(False)
    theirs.o_proj = torch.nn.Identity()
    embedding = {
        "llama": modeling_llama.LlamaRotaryEmbedding,
        "qwen3": modeling_qwen3.Qwen3RotaryEmbedding,
    }[family](config).to(DEVICE)
    x = random_bf16(1, length + 1, K, seed=2, scale=4.0)
    at = torch.arange(length + 1, device=DEVICE)[None]
    cos, sin = embedding(x, at)
    cache = DynamicCache(config=config)
    cached = {cache_argument(theirs): cache}
    theirs(x[:, :-1], (cos[:, :-1], sin[:, :-1]), None, **cached)
    pages = Pages([length], Hkv, D)
    pages.put(0, cache.layers[0].keys[0], cache.layers[0].values[0])
    wanted, _ = theirs(x[:, -1:], (cos[:, -1:], sin[:, -1:]), None, **cached)

    norms = (theirs.q_norm.weight, theirs.k_norm.weight) if family == "qwen3" else (None, None)
    layer = AttendLayer(pages.keys, pages.values, theirs.scaling, None, *norms, config.rms_norm_eps)
    weights = [part.weight for part in (theirs.q_proj, theirs.k_proj, theirs.v_proj)]
    qkv = F.linear(x[:, -1], torch.cat(weights))
    plan = plan_attend(1, H, Hkv, D, 512, 132)
    found = attend(
        kernels,
        plan,
        layer,
        qkv,
        torch.tensor([length], dtype=torch.int32, device=DEVICE),
        pages.tables,
        rotary_tables(embedding, 512, D, DEVICE),
        open_workspace([plan], torch.device(DEVICE)),
    )
    keys, values = pages.of_row(0)
    close(keys, cache.layers[0].keys[0], 2)
    close(values, cache.layers[0].values[0], 2)
    largest = wanted.abs().max().item()  # theirs rounds probabilities, too
    torch.testing.assert_close(found, wanted[0], rtol=2**-6, atol=2**-9 * largest)
