"""The lists that `plan` makes of a packed gate, in plain NumPy: cases, expected lists, checks.

Written from the head of kernels/ffn/plan.cu and not from its code. Pairs are (token, column,
value); everything here is exact.
"""

import itertools
from dataclasses import dataclass

import numpy as np

TILE, GROUP, ROUND, CLASSES = 256, 8, 16, 8
PAD = 0x8000
NOT_FINITE = 1 << 30
COLUMN_BITS = 13
ROUND_HALVES = 32
# of a round's 32 units of 16 bits: where the value of slot s lies, its code is 4 behind
VALUE_AT = np.array([s % 8 // 2 * 8 + s // 8 * 2 + s % 2 for s in range(ROUND)])
LINK_AT = np.array([s % 8 // 2 * 4 + s // 8 * 2 + s % 2 for s in range(ROUND)])
NO_LINK = 0xFFFFFFFF


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Shape:
    """Sizes that `plan` receives."""

    M: int
    N: int
    S: int
    cap: int
    tile_tokens: int
    panel_rows: int
    most: int | None = None  # cap, unless it is said

    @property
    def T(self) -> int:
        return ceil_div(self.N, TILE)

    @property
    def num_groups(self) -> int:
        return ceil_div(self.M, GROUP)

    @property
    def num_panels(self) -> int:
        return ceil_div(self.N, self.panel_rows)

    @property
    def num_tiles(self) -> int:
        return ceil_div(self.M, self.tile_tokens)

    @property
    def num_neuron_groups(self) -> int:
        return ceil_div(self.N, 8)

    @property
    def group_rounds(self) -> int:
        return ceil_div(min(self.cap, self.panel_rows), 2)

    def least_shared_bytes(self) -> int:
        """Dynamic shared memory that a block of `plan_cluster` needs; more is its stage."""
        P, groups = self.num_panels, ceil_div(self.tile_tokens // GROUP, 8)
        lists = 16 * self.num_neuron_groups + (12 + 16 * P) * groups
        return lists + (40 * P + 3072) * 512 // 32 + 256

    def buffers(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """(shape, dtype) of all that `plan` writes, by the names of its arguments."""
        q = self.num_groups * self.num_panels
        return {
            "num_rounds": ((q,), np.int32),
            "rounds": ((q, self.group_rounds, ROUND_HALVES), np.uint16),
            "links": ((q, self.group_rounds, ROUND), np.uint32),
            "pair_start": ((self.num_tiles, self.num_neuron_groups + 1), np.int32),
            "pairs": ((self.num_tiles, self.tile_tokens * self.cap), np.uint32),
            "heavy_rows": ((self.M,), np.int32),
            "heavy_count": ((1,), np.int32),
        }


# ---- packed gates


def packed_gate(
    shape: Shape, fired: np.ndarray, rng: np.random.Generator, not_finite: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(counts [M, T], entries [M, T, S]) of bool `fired` [M, N]; values at random, not -0.

    Within a tile entries lie in any order, as from `gate_pack`; slots behind the count hold
    garbage. Tiles of bool `not_finite` [M, T] carry the flag.
    """
    M, T, S = shape.M, shape.T, shape.S
    counts = np.zeros((M, T), np.int32)
    entries = rng.integers(-(2**31), 2**31, (M, T, S)).astype(np.int32)
    for tile in range(T):
        part = fired[:, tile * TILE : (tile + 1) * TILE]
        counts[:, tile] = part.sum(1)
        for row in part.any(1).nonzero()[0]:
            columns = rng.permutation(part[row].nonzero()[0])[:S] + tile * TILE
            values = rng.integers(0, 0x7F80, len(columns))
            entries[row, tile, : len(columns)] = (values << 16 | columns).astype(np.int32)
    if not_finite is not None:
        counts[not_finite] |= NOT_FINITE
    return counts, entries


def heavy_rows(shape: Shape, counts: np.ndarray) -> np.ndarray:
    """Bool [M]: rows that get no pairs."""
    nnz = (counts & (NOT_FINITE - 1)).sum(1)
    most = shape.cap if shape.most is None else shape.most
    heavy = (counts > shape.S).any(1) | (nnz > most)
    for first in range(0, shape.M, GROUP):
        left = np.where(heavy, 0, nnz)[first : first + GROUP]
        while left.sum() > GROUP * shape.cap:
            heavy[first + left.argmax()] = True
            left[left.argmax()] = 0
    return heavy


def light_pairs(
    shape: Shape, counts: np.ndarray, entries: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token, column, value) of all pairs, in the order in which `plan` numbers a group's."""
    light = np.where(heavy_rows(shape, counts)[:, None], 0, counts)
    filled = np.arange(shape.S) < light[..., None]
    token, tile, slot = filled.nonzero()
    # of a row: every fourth tile belongs to one lane
    order = np.lexsort((slot, tile, tile % 4, token))
    token, tile, slot = token[order], tile[order], slot[order]
    entry = entries[token, tile, slot].view(np.uint32)
    return token, (entry & 0xFFFF).astype(np.int64), (entry >> 16).astype(np.uint16)


# ---- expected rounds


def expected_rounds(codes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """uint16 [R, 32] of the pairs of one (group, panel), given in their order."""
    counts = np.bincount(codes % CLASSES, minlength=CLASSES)
    R = ceil_div(int(counts.sum()), ROUND)
    slots = np.full((R, ROUND, 2), PAD, np.uint16)  # value, code
    slots[..., 1] = np.arange(ROUND) % CLASSES
    taken = np.minimum(counts, 2 * R)
    places = np.empty((len(codes), 2), np.int64)  # round, slot
    beyond = []
    for c in range(CLASSES):
        own = (codes % CLASSES == c).nonzero()[0]
        ranks = np.arange(len(own))
        places[own] = np.stack((ranks // 2, c + 8 * (ranks % 2)), 1)
        beyond.extend(own[2 * R :])
    free = [(i // 2, c + 8 * (i % 2)) for c in range(CLASSES) for i in range(taken[c], 2 * R)]
    for pair, place in zip(beyond, free, strict=False):
        places[pair] = place
    slots[places[:, 0], places[:, 1], 0] = values
    slots[places[:, 0], places[:, 1], 1] = codes
    rounds = np.empty((R, ROUND_HALVES), np.uint16)
    rounds[:, VALUE_AT] = slots[..., 0]
    rounds[:, VALUE_AT + 4] = slots[..., 1]
    return rounds


# ---- what was written


def decode_rounds(
    shape: Shape, num_rounds: np.ndarray, rounds: np.ndarray, links: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(token, column, value, link) of every slot that holds a pair; checks pads and ranges."""
    P = shape.num_panels
    assert (num_rounds >= 0).all()
    assert (num_rounds <= shape.group_rounds).all(), "more rounds than there is room for"
    q, r = (np.arange(shape.group_rounds) < num_rounds[:, None]).nonzero()
    units = rounds[q, r]
    value, code = units[:, VALUE_AT], units[:, VALUE_AT + 4].astype(np.int64)
    in_panel, token = code & ((1 << COLUMN_BITS) - 1), code >> COLUMN_BITS
    column = (q % P)[:, None] * shape.panel_rows + in_panel
    assert (in_panel < shape.panel_rows).all(), "a column outside of its panel"
    assert (column < shape.N).all(), "a column outside of the gate"
    pad = value == PAD
    assert (token[pad] == 0).all()
    slot_class = np.broadcast_to(np.arange(ROUND) % CLASSES, pad.shape)
    assert (in_panel[pad] % CLASSES == slot_class[pad]).all(), "a pad outside of its class"
    link = links[q, r][:, LINK_AT]
    assert (link[pad] == NO_LINK).all(), "a pad with a link"
    token = (q // P)[:, None] * GROUP + token
    return token[~pad], column[~pad], value[~pad], link[~pad]


def decode_pairs(
    shape: Shape, pair_start: np.ndarray, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token, column, place) of all pairs; checks that they lie with their neurons, alternating."""
    found = []
    for tile in range(shape.num_tiles):
        starts = pair_start[tile]
        assert starts[0] == 0
        assert (np.diff(starts) >= 0).all()
        assert starts[-1] <= shape.tile_tokens * shape.cap
        token, column = pairs[tile, : starts[-1]] & 0xFFFF, pairs[tile, : starts[-1]] >> 16
        owner = np.repeat(np.arange(shape.num_neuron_groups), np.diff(starts))
        assert (column // 8 == owner).all(), "a pair with other neurons"
        half = token >> 2 & 1
        for first, stop in itertools.pairwise(starts):
            of_group = half[first:stop]
            mixed = 2 * min((of_group == 0).sum(), (of_group == 1).sum())
            assert (of_group[:mixed] == np.arange(mixed) % 2).all(), "halves do not alternate"
        assert (token < shape.tile_tokens).all()
        place = tile * pairs.shape[1] + np.arange(starts[-1])
        found.append((token + tile * shape.tile_tokens, column, place))
    return tuple(np.concatenate(part).astype(np.int64) for part in zip(*found, strict=True))


def _sorted(*keys: np.ndarray) -> np.ndarray:
    stacked = np.stack([key.astype(np.int64) for key in keys], 1)
    return stacked[np.lexsort(stacked.T[::-1])]


def check_lists(
    shape: Shape, counts: np.ndarray, entries: np.ndarray, lists: dict[str, np.ndarray]
) -> None:
    """Asserts that `lists`, by the names of `Shape.buffers`, are those of the packed gate."""
    heavy = heavy_rows(shape, counts)
    assert lists["heavy_count"][0] == heavy.sum()
    listed = np.sort(lists["heavy_rows"][: heavy.sum()])
    np.testing.assert_array_equal(listed, heavy.nonzero()[0])

    token, column, value = light_pairs(shape, counts, entries)
    num_rounds, rounds = lists["num_rounds"], lists["rounds"]
    down = decode_rounds(shape, num_rounds, rounds, lists["links"])
    np.testing.assert_array_equal(_sorted(*down[:3]), _sorted(token, column, value))
    up = decode_pairs(shape, lists["pair_start"], lists["pairs"])
    np.testing.assert_array_equal(_sorted(*up), _sorted(down[0], down[1], down[3]))

    # every bit of the rounds
    q_of_pair = token // GROUP * shape.num_panels + column // shape.panel_rows
    order = np.argsort(q_of_pair, kind="stable")
    bounds = np.searchsorted(q_of_pair[order], np.arange(len(num_rounds) + 1))
    codes = (token % GROUP << COLUMN_BITS | column % shape.panel_rows)[order]
    for q, (first, stop) in enumerate(itertools.pairwise(bounds)):
        expected = expected_rounds(codes[first:stop], value[order][first:stop])
        assert num_rounds[q] == len(expected), f"rounds of (group, panel) {q}"
        assert (rounds[q, : len(expected)] == expected).all(), f"(group, panel) {q}"


# ---- cases


def fired_at_random(shape: Shape, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Bool [M, N]: which neurons fire."""
    M, N = shape.M, shape.N
    if kind == "none":
        return np.zeros((M, N), bool)
    if kind == "all":
        return np.ones((M, N), bool)
    if kind == "one class":
        return (rng.random((M, N)) < 0.06) & (np.arange(N) % CLASSES == 3)
    if kind == "some rows":
        return (rng.random((M, N)) < 0.01) & (rng.random((M, 1)) < 0.3)
    density = rng.gamma(1.0, 0.006, (1, N))
    if kind == "skewed":  # hot neurons, rows from empty to too dense
        density = density * rng.exponential(3.0, (M, 1))
        density[:, rng.choice(N, max(1, N // 200), replace=False)] = 0.9
        density[:, N // 2 // TILE * TILE :][:, :TILE] += 0.08
    return rng.random((M, N)) < density


def cases() -> list[tuple[str, Shape]]:
    """(kind of gate, shape). Ragged, one row, empty, full, one class, too dense, several panels."""
    return [
        ("usual", Shape(1000, 1408, 64, 64, 248, 1408)),
        ("usual", Shape(1, 256, 64, 64, 8, 256)),
        ("usual", Shape(13, 264, 64, 64, 8, 264)),
        ("skewed", Shape(333, 2056, 32, 88, 128, 2056)),
        ("skewed", Shape(333, 2056, 32, 88, 128, 520)),
        ("skewed", Shape(100, 8192, 48, 344, 64, 8192)),
        ("skewed", Shape(90, 11008, 64, 464, 40, 5504)),
        ("none", Shape(70, 512, 64, 64, 32, 512)),
        ("some rows", Shape(257, 768, 256, 768, 120, 384)),
        ("one class", Shape(120, 2048, 64, 96, 64, 2048)),
        ("one class", Shape(120, 2048, 64, 96, 64, 1000)),
        ("all", Shape(9, 512, 64, 64, 8, 512)),
        ("all", Shape(19, 1032, 256, 1032, 16, 1032)),
        ("all", Shape(19, 1032, 256, 1032, 16, 344)),
        ("skewed", Shape(50, 20000, 256, 20000, 24, 2912)),
        ("skewed", Shape(16, 65536, 256, 65536, 8, 6960)),
        ("usual", Shape(1030, 264, 64, 64, 1024, 264)),
        ("skewed", Shape(333, 2056, 64, 24, 128, 2056, most=2056)),
        ("skewed", Shape(333, 2056, 64, 24, 128, 520, most=200)),
        ("all", Shape(30, 520, 256, 264, 16, 520, most=520)),
    ]


def make_case(kind: str, shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(counts, entries) of a case; with S < TILE some tiles are not finite."""
    rng = np.random.default_rng(seed)
    fired = fired_at_random(shape, kind, rng)
    flagged = None
    if shape.S < TILE:
        flagged = rng.random((shape.M, shape.T)) < 0.02 / shape.T
    return packed_gate(shape, fired, rng, flagged)
