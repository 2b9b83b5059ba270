"""Texts as tokens, and tokens in blocks.

Texts are joined into one stream with an end-of-text id before each, and the stream is cut into
blocks: no padding, every token counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from twellctl.errors import TwellError
from twellctl.text.files import PIECE, More
from twellctl.text.tokens import check_ids, end_of_text, opening_of

WAITING = 64  # texts, for a window to be filled with those that fit
CONTEXT = 8  # 1 of so many parts of a window is read again before the end of a long text
STRIPES = 8  # of neighbours that are held out together, at most


def token_stream(
    texts: Iterable[str], tokenizer: Any, vocabulary: int | None = None
) -> Iterator[np.ndarray]:
    """The int32 tokens of each text, an end-of-text id before them, and what opens a text.

    Neither is before `More`, which goes on from the text before it.
    Ids that a model of `vocabulary` tokens does not have are refused.
    """
    first, texts = end_of_text(tokenizer), iter(texts)
    opening = [token for token in opening_of(tokenizer) if token != first]
    while some := _some(texts):
        encoded = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
        for text, ids in zip(some, encoded, strict=True):
            before = [first, *opening]
            if isinstance(text, More):
                before = []
            elif opening and ids[: len(opening)] == opening:  # a chat template wrote it
                before = [first]
            tokens = np.array([*before, *ids], dtype=np.int32)
            if not len(tokens):
                continue
            check_ids(int(tokens.max()), vocabulary)
            yield tokens


def _some(texts: Iterator[str]) -> list[str]:
    """The next texts: so many that encoding them together is fast, and takes little memory."""
    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if len(some) == 256 or size >= PIECE:
            break
    return some


def in_turn(streams: Iterable[Iterator[np.ndarray]], longest: int) -> Iterator[np.ndarray]:
    """What several streams hold; of each equally many tokens, as long as it lasts.

    A text of more than `longest` tokens is cut, for others to come in between.
    """
    taken = {_cut(stream, longest): 0 for stream in streams}
    while taken:
        stream = min(taken, key=taken.__getitem__)
        tokens = next(stream, None)
        if tokens is None:
            del taken[stream]
            continue
        taken[stream] += len(tokens)
        yield tokens


def _cut(stream: Iterator[np.ndarray], longest: int) -> Iterator[np.ndarray]:
    for tokens in stream:
        for start in range(0, len(tokens), longest):
            yield tokens[start : start + longest]


def windows_from_starts(
    stream: Iterable[np.ndarray], seq_len: int, first: int
) -> Iterator[np.ndarray]:
    """Windows `[seq_len]` that begin where texts begin, without the end-of-text id `first`.

    A model reads a text so, and what it computes for the first token is like nothing after it. No
    text loses its end. A short text is whole in a window, and others that fit follow it. The room
    that is left takes the beginning of the next text, which is whole in the next window. A long
    text is cut into windows; what is left of it is taken for a short text, see `_end_of`. The last
    window, if it is not full, takes the beginning of the one before.
    """
    texts, waiting = iter(stream), list[np.ndarray]()
    before: np.ndarray = np.zeros(0, np.int32)
    while waiting := waiting + list(islice(texts, WAITING - len(waiting))):
        text = waiting.pop(0)
        if text[0] == first:
            text = text[1:]
        whole = len(text) - len(text) % seq_len
        if whole:
            windows = text[:whole].reshape(-1, seq_len)
            yield from windows
            before = windows[-1]
            if whole < len(text):
                waiting.append(_end_of(text, whole, seq_len, first))
            continue
        window = _filled(text, waiting, seq_len)
        before = np.append(window, before[: seq_len - len(window)])
        if len(before) == seq_len:  # else there is no other
            yield before


def _end_of(text: np.ndarray, start: int, seq_len: int, first: int) -> np.ndarray:
    """What of `text` is left from `start` on, less than a window, after the id `first`.

    Some tokens before it are read once more, since the model predicts it by what goes before.
    """
    start = max(start - seq_len // CONTEXT, len(text) - seq_len + 1)
    return np.append(np.array(first, text.dtype), text[start:])


def _filled(text: np.ndarray, waiting: list[np.ndarray], seq_len: int) -> np.ndarray:
    """`text` and those of the `waiting` ones, which it takes, that fill its window best."""
    parts, room = [text], seq_len - len(text)
    while fits := [number for number, other in enumerate(waiting) if len(other) <= room]:
        longest = max(fits, key=lambda number: len(waiting[number]))
        parts.append(waiting.pop(longest))
        room -= len(parts[-1])
    if waiting:
        parts.append(waiting[0][:room])
    return np.concatenate(parts)


def apart(texts: Sequence[np.ndarray], share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(most, held out) `texts`: the latter, evenly spread, hold a `share` of the tokens."""
    most, held_out = list[np.ndarray](), list[np.ndarray]()
    seen = held = 0
    for text in texts:
        is_held = held < share * seen
        (held_out if is_held else most).append(text)
        seen, held = seen + len(text), held + is_held * len(text)
    return most, held_out


def write_tokens(stream: Iterable[np.ndarray], path: Path, limit: int | None = None) -> None:
    """Write a stream to `path` as raw int32, whole or not at all; it ends after `limit` tokens."""
    part, count = path.with_suffix(".part"), 0
    with part.open("wb") as file:
        for tokens in stream:
            file.write(tokens.tobytes())
            count += len(tokens)
            if limit is not None and count >= limit:
                break
    part.rename(path)


def read_blocks(path: Path, seq_len: int) -> np.ndarray:
    """The blocks `[num_blocks, seq_len]` of a token file, mapped, not loaded."""
    tokens: np.ndarray = np.memmap(path, dtype=np.int32, mode="r")
    count = len(tokens) // seq_len
    return tokens[: count * seq_len].reshape(count, seq_len)


def spread_windows(stream: Iterable[np.ndarray], count: int, seq_len: int) -> torch.Tensor:
    """`[count, seq_len]` token ids at even strides through all the text; fewer if it is short."""
    ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *stream]))
    if len(ids) < seq_len:
        raise TwellError(
            f"the text holds {len(ids)} tokens, less than one window of {seq_len}: "
            "give more text, or a smaller --seq-len"
        )
    last = len(ids) - seq_len
    starts = torch.linspace(0, last, count).long().clamp_(max=last).unique()  # rounded, as floats
    return ids[starts[:, None] + torch.arange(seq_len)].long()


def hold_out(num_blocks: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) blocks by number: up to `STRIPES` runs of neighbours, evenly spread."""
    wanted = round(num_blocks * fraction)
    if fraction > 0 and not wanted:
        wanted = min(1, num_blocks - 1)
    held: np.ndarray = np.zeros(num_blocks, dtype=bool)
    stripes = min(STRIPES, wanted)
    for stripe in range(stripes):
        length = wanted * (stripe + 1) // stripes - wanted * stripe // stripes
        start = num_blocks * (2 * stripe + 1) // (2 * stripes) - length // 2
        held[start : start + length] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


class Blocks(Dataset):
    """Blocks `[num_blocks, seq_len]` of a stream, or those `picked` by number; nothing is copied.

    Item i is `{"input_ids": int64 [seq_len]}`.
    """

    def __init__(self, blocks: np.ndarray, picked: np.ndarray | None = None):
        self.blocks = blocks
        self.picked = np.arange(len(blocks)) if picked is None else picked

    def __len__(self) -> int:
        return len(self.picked)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: blocks[0] for name, blocks in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """A batch, `{"input_ids": int64 [len(indices), seq_len]}`, by numpy alone, in one piece.

        The GPU waits for it between two steps, and torch would wake its threads to put it together.
        """
        picked = np.asarray(self.blocks)[self.picked[indices]]
        return {"input_ids": torch.from_numpy(picked.astype(np.int64))}
