"""The run folder of a fit: its settings, and its text as tokens.

`OUT.run` holds them while the fit runs, and each layer that is done (`kept.py`). The same call
again goes on after the last of them.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import staged
from twellctl.files.strict_json import read_json, to_json
from twellctl.fitting.settings import Fit, windows_held_out
from twellctl.fitting.source import num_kept
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import load_tokenizer
from twellctl.text.blocks import (
    STRIPES,
    hold_out,
    in_turn,
    read_blocks,
    token_stream,
    windows_from_starts,
    write_tokens,
)
from twellctl.text.reading import read_texts
from twellctl.text.tokens import end_of_text

SETTINGS_FILE = "fit.json"
RUN_FORMAT = 2  # of what lies in a run folder
LONGEST_TEXT = 4096  # tokens in a row of one text, for others to come in
NEIGHBOURS = 2 * STRIPES  # windows at most that are neither fitted on nor held out
LEAST_DIFFERENT = 64  # tokens that a text must have
TOKENS_A_WEIGHT = 4  # the least number of tokens for each of the N + K unknowns of an output


def prepare_fit(run: Path, checkpoint: Checkpoint, fit: Fit, overwrite: bool) -> bool:
    """Make the run folder, or find the one of the same call; True if it goes on with layers."""
    settings = _settings(checkpoint, fit)
    if run.exists() and not overwrite:
        if not (run / SETTINGS_FILE).is_file():
            raise TwellError(
                f"{run} is not a run of twellctl (no {SETTINGS_FILE} in it): remove it"
            )
        if read_json(run / SETTINGS_FILE, "start again with --overwrite") == settings:
            return num_kept(run) > 0
        if num_kept(run):
            raise UsageError(
                f"{run} holds a fit with other settings, or of another version: repeat those, or "
                "start again with --overwrite"
            )
    with staged(run, overwrite=True, not_ours=_not_ours) as stage:
        _write_text(checkpoint, stage, fit)
        _check_enough(checkpoint, stage, fit)
        (stage / SETTINGS_FILE).write_text(to_json(settings, indent=2), encoding="utf-8")
    return False


def _settings(checkpoint: Checkpoint, fit: Fit) -> dict[str, Any]:
    """As JSON has them: its lists are no tuples."""
    of_run = {"data": list(fit.data), "model": checkpoint.origin, "format": RUN_FORMAT}
    return dataclasses.asdict(fit) | of_run


def _write_text(checkpoint: Checkpoint, run: Path, fit: Fit) -> None:
    """Write the tokens of as many windows as the fit takes, of all its text in turn."""
    tokenizer = load_tokenizer(checkpoint)
    vocabulary = checkpoint.config.get("vocab_size")
    wanted = fit.tokens + (windows_held_out(fit) + 1 + NEIGHBOURS) * fit.seq_len

    def stream(path: str) -> Iterator[np.ndarray]:
        texts = read_texts([path], fit.text_column, tokenizer)
        return token_stream(texts, tokenizer, vocabulary)

    texts = in_turn((stream(path) for path in fit.data), LONGEST_TEXT)
    windows = windows_from_starts(texts, fit.seq_len, end_of_text(tokenizer))
    write_tokens(windows, run / "tokens.bin", wanted)


def _not_ours(run: Path) -> str | None:
    return None if (run / SETTINGS_FILE).is_file() else "is not a run of twellctl"


def _check_enough(checkpoint: Checkpoint, run: Path, fit: Fit) -> None:
    fitted, _ = windows_of(run, fit)
    unknowns = checkpoint.ffn.intermediate_size + checkpoint.ffn.hidden_size
    if fitted.numel() < TOKENS_A_WEIGHT * unknowns:
        raise TwellError(
            f"{fitted.numel()} tokens are too few to fit {unknowns} weights an output on: give "
            f"{TOKENS_A_WEIGHT * unknowns} or more with --data and --tokens"
        )
    different = len(fitted.unique())
    if different < LEAST_DIFFERENT:
        raise TwellError(
            f"the text is all alike, {different} different tokens: give text of the kind that the "
            "model is for"
        )


def windows_of(run: Path, fit: Fit) -> tuple[Tensor, Tensor]:
    """(to fit on, held out) `[W, L]` and `[H, L]`.

    Windows next to those held out are in neither: they can have tokens in common with them.
    """
    count = (run / "tokens.bin").stat().st_size // (4 * fit.seq_len)
    num_held = windows_held_out(fit, count)
    train, held = hold_out(count, min(1.0, num_held / max(1, count)))
    train = np.setdiff1d(train, [held - 1, held + 1])
    if not len(train):
        raise TwellError(
            f"the text makes {count} windows of {fit.seq_len} tokens, and {num_held} are "
            "held out: give more text, or lower --seq-len"
        )
    train = train[: max(1, fit.tokens // fit.seq_len)]
    blocks = read_blocks(run / "tokens.bin", fit.seq_len)
    fitted, held_out = (torch.from_numpy(blocks[part].astype(np.int64)) for part in (train, held))
    return fitted, held_out
