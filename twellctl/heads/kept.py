"""What of a head's drafts its model would keep, on held-out text."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from twellctl.decoding.drafted import MOST_DRAFTS
from twellctl.heads.head import DraftHead
from twellctl.heads.original import Original, likeliest
from twellctl.heads.unroll import unroll


@dataclass(frozen=True)
class KeptDrafts:
    """On `tokens` of held-out text. `by_depth`: the share of first drafts that are what the model
    takes for likeliest, then that of second ones behind a kept one, and so on. `tokens_a_pass`: how
    many tokens a pass of the model gives on average, with 1, 2, .. drafts; it would be 1 without.

    Drafts follow the text, also where the model itself would have written something else.
    """

    tokens: int
    by_depth: list[float]
    tokens_a_pass: list[float]


@torch.no_grad()
def kept_drafts(head: DraftHead, original: Original, windows: Tensor, at_once: int) -> KeptDrafts:
    """On windows `[H, S]`, `at_once` of them in a forward of the model."""
    runs = [_kept_runs(head, original, ids) for ids in windows.split(at_once)]
    return counted_kept(torch.cat(runs))


def _kept_runs(head: DraftHead, original: Original, ids: Tensor) -> Tensor:
    """int64 `[B, T]`: how many drafts in a row are kept from each base on, up to `MOST_DRAFTS`."""
    read, rows = original.read(ids), original.rows_of(head.tokens)
    B, S = ids.shape
    chosen = original.chosen(read.states.flatten(0, 1)).view(B, S)
    kept = []
    for j, states in enumerate(unroll(head, original, read, MOST_DRAFTS)):
        best = head.tokens[likeliest(states.flatten(0, 1), rows)].view(states.shape[:2])
        kept.append(best == chosen[:, 1 + j : 1 + j + best.shape[1]])
    return torch.stack(kept, -1).long().cumprod(-1).sum(-1).cpu()


def counted_kept(runs: Tensor) -> KeptDrafts:
    """Of how many drafts are kept in a row, int `[H, T]`, from each base of some windows on."""
    reached = [int((runs >= depth).sum()) for depth in range(MOST_DRAFTS + 1)]
    by_depth = [kept / before if before else 0.0 for before, kept in pairwise(reached)]
    rows = runs.tolist()
    a_pass = [_tokens_a_pass(rows, most) for most in range(1, MOST_DRAFTS + 1)]
    return KeptDrafts(runs.numel(), by_depth, a_pass)


def _tokens_a_pass(rows: list[list[int]], most: int) -> float:
    """Of rounds through each window, with `most` drafts each."""
    passes = given = 0
    for kept in rows:
        place = 0
        while place < len(kept):
            tokens = min(kept[place], most) + 1
            place, given, passes = place + tokens, given + tokens, passes + 1
    return given / passes
