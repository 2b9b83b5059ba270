"""Lists as `plan` makes them, of pairs at random, and what `up`, `hidden` and `down` make of them.

For tests of those kernels by themselves: NumPy only, nothing here runs a kernel.
"""

import itertools
from dataclasses import dataclass

import list_reference
import numpy as np


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of float `values` rounded to nearest even; finite ones."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """The float32 of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Lists:
    """Pairs (token, column, gate bits) of the rows that are not heavy, and the lists of them."""

    shape: list_reference.Shape
    token: np.ndarray
    column: np.ndarray
    gate: np.ndarray
    dest: np.ndarray  # of a pair's value in the rounds, in 16-bit units
    place: np.ndarray  # of a pair among `pairs`, counted through all tiles
    num_rounds: np.ndarray
    rounds: np.ndarray
    links: np.ndarray
    pair_start: np.ndarray
    pairs: np.ndarray

    def dense_gate(self) -> np.ndarray:
        """float64 [M, N]: the gate where it fired in rows that are not heavy."""
        gate = np.zeros((self.shape.M, self.shape.N))
        gate[self.token, self.column] = from_bf16(self.gate)
        return gate


def build_lists(shape: list_reference.Shape, kind: str, seed: int) -> Lists:
    """Lists of a gate of this kind (`list_reference.fired_at_random`); gates lie in 0.1 .. 2.

    What no kernel may read holds garbage.
    """
    rng = np.random.default_rng(seed)
    counts, entries = list_reference.packed_gate(
        shape, list_reference.fired_at_random(shape, kind, rng), rng
    )
    token, column, _ = list_reference.light_pairs(shape, counts, entries)
    gate = to_bf16(rng.uniform(0.1, 2.0, len(token)))
    garbage = {
        n: rng.integers(0, 250, s, np.uint8).repeat(np.dtype(d).itemsize, -1).view(d)
        for n, (s, d) in shape.buffers().items()
    }
    num_rounds, rounds, links = garbage["num_rounds"], garbage["rounds"], garbage["links"]

    # rounds of each (group, panel)
    dest = np.empty(len(token), np.int64)
    q_of_pair = token // list_reference.GROUP * shape.num_panels + column // shape.panel_rows
    codes = token % list_reference.GROUP << list_reference.COLUMN_BITS | column % shape.panel_rows
    order = np.argsort(q_of_pair, kind="stable")
    bounds = np.searchsorted(q_of_pair[order], np.arange(len(num_rounds) + 1))
    for q, (first, stop) in enumerate(itertools.pairwise(bounds)):
        of_q = order[first:stop]
        if not len(of_q):
            num_rounds[q] = 0
            continue
        made = list_reference.expected_rounds(codes[of_q], gate[of_q])
        num_rounds[q] = len(made)
        rounds[q, : len(made)] = made
        links[q, : len(made)] = list_reference.NO_LINK
        at = np.arange(len(made))[:, None] * list_reference.ROUND_HALVES + list_reference.VALUE_AT
        filled = made.reshape(-1)[at] != 0x8000
        place_of_code = dict(
            zip(made.reshape(-1)[at + 4][filled].tolist(), at[filled].tolist(), strict=True)
        )
        start = q * shape.group_rounds * list_reference.ROUND_HALVES
        dest[of_q] = [start + place_of_code[c] for c in codes[of_q].tolist()]

    # pairs of each neuron group
    pair_start, pairs = garbage["pair_start"], garbage["pairs"]
    place = np.empty(len(token), np.int64)
    for tile in range(shape.num_tiles):
        in_tile = (token // shape.tile_tokens == tile).nonzero()[0]
        groups = column[in_tile] // 8
        pair_start[tile] = np.searchsorted(np.sort(groups), np.arange(shape.num_neuron_groups + 1))
        for group in np.unique(groups):
            own = rng.permutation(in_tile[groups == group])
            own = own[_alternating(token[own] >> 2 & 1)]
            at = pair_start[tile, group] + np.arange(len(own))
            pairs[tile, at] = token[own] % shape.tile_tokens | column[own] << 16
            place[own] = tile * pairs.shape[1] + at
    links.reshape(-1)[dest // 8 * 4 + dest % 8] = place
    return Lists(
        shape, token, column, gate, dest, place, num_rounds, rounds, links, pair_start, pairs
    )


def _alternating(half: np.ndarray) -> np.ndarray:
    low, high = (half == 0).nonzero()[0], (half == 1).nonzero()[0]
    both = min(len(low), len(high))
    mixed = np.stack((low[:both], high[:both]), 1).reshape(-1)
    return np.concatenate((mixed, low[both:], high[both:]))


def masks_of(lists: Lists) -> np.ndarray:
    """uint32 [(groups, panels), ceil(group_rounds / 8), 32], see kernels/tile/round_masks.cuh.

    Bits of rounds that there are not are at random.
    """
    shape, num = lists.shape, lists.num_rounds
    batches = -(-shape.group_rounds // 8)
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2**32, (len(num), batches, 32), np.uint32)
    lane = np.arange(32)
    for q, r in zip(*(np.arange(shape.group_rounds) < num[:, None]).nonzero(), strict=True):
        records = lists.rounds[q, r].reshape(4, 8)[lane % 4]
        for slot in range(4):
            same = (records[:, 4 + slot] >> list_reference.COLUMN_BITS) == lane // 4
            bit = np.uint32(1 << (8 * slot + r % 8))
            masks[q, r // 8] = np.where(same, masks[q, r // 8] | bit, masks[q, r // 8] & ~bit)
    return masks
