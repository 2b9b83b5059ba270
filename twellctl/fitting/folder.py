"""The run folder of a fit: what it is made of, and its text as tokens.

`OUT.run` holds them while the fit runs, and each layer that is done (`kept.py`). The same call
again, of the same model and text, goes on after the last of them.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twellctl.errors import TwellError
from twellctl.files.made_of import RECORD, Record, digest_of
from twellctl.files.outputs import staged
from twellctl.fitting.settings import Fit, least_tokens, windows_held_out
from twellctl.fitting.source import layer_file, num_kept
from twellctl.models.carried import model_files
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import load_tokenizer
from twellctl.settings import flag_name
from twellctl.text.blocks import write_tokens
from twellctl.text.reading import text_files
from twellctl.text.windows import windows_in

TOKENS_FILE, HELD_OUT_FILE = "tokens.bin", "held-out.bin"
LEAST_DIFFERENT = 64  # tokens that a text must have


def prepare_fit(run: Path, checkpoint: Checkpoint, fit: Fit, overwrite: bool) -> bool:
    """Make the run folder, or find the one of the same fit; True if it goes on with layers.

    One without layers holds nothing that could be lost, and is made again.
    """
    made_of = _made_of(checkpoint, fit)
    if run.exists() and not overwrite:
        if said := _not_ours(run):
            raise TwellError(f"{run} {said} (no {RECORD} in it): remove it")
        record = Record.read(run)
        if count := num_kept(record):
            record.refuse_other(made_of)
            if not all((run / name).exists() for name in (TOKENS_FILE, HELD_OUT_FILE)):
                _write_text(checkpoint, run, fit)
            record.leave(TOKENS_FILE, HELD_OUT_FILE, *map(layer_file, range(count)))
            return True
    with staged(run, overwrite=True, not_ours=_not_ours) as stage:
        _write_text(checkpoint, stage, fit)
        _check_enough(checkpoint, stage, fit)
        Record.begin(stage, made_of, TOKENS_FILE, HELD_OUT_FILE)
    return False


def _made_of(checkpoint: Checkpoint, fit: Fit) -> dict[str, Any]:
    settings = {flag_name(k): v for k, v in dataclasses.asdict(fit).items() if k != "data"}
    texts = [digest_of(text_files([path])) for path in fit.data]  # which are read in turn
    return {"model": digest_of(model_files(checkpoint)), "text": texts} | settings


def _write_text(checkpoint: Checkpoint, run: Path, fit: Fit) -> None:
    """Write windows to fit on, and held out ones."""
    parts = windows_in(
        fit.data,
        fit.text_column,
        load_tokenizer(checkpoint),
        checkpoint.config.get("vocab_size"),
        fit.seq_len,
        fit.tokens,
        partial(windows_held_out, fit),
    )
    for name, windows in zip((TOKENS_FILE, HELD_OUT_FILE), parts, strict=True):
        write_tokens(windows, run / name)


def _not_ours(run: Path) -> str | None:
    return None if (run / RECORD).is_file() else "is not a run of this version of twellctl"


def _check_enough(checkpoint: Checkpoint, run: Path, fit: Fit) -> None:
    fitted, _ = windows_of(run, fit)
    ffn = checkpoint.ffn
    least = least_tokens(ffn.hidden_size, ffn.intermediate_size)
    if fitted.numel() < least:
        raise TwellError(
            f"{fitted.numel()} tokens are too few to fit {ffn.intermediate_size + ffn.hidden_size} "
            f"weights an output on: give {least} or more with --data and --tokens"
        )
    different = len(fitted.unique())
    if different < LEAST_DIFFERENT:
        raise TwellError(
            f"the text is all alike, {different} different tokens: give text of the kind that the "
            "model is for"
        )


def windows_of(run: Path, fit: Fit) -> tuple[Tensor, Tensor]:
    """(to fit on, held out) `[W, L]` and `[H, L]`."""
    found = [np.fromfile(run / name, np.int32) for name in (TOKENS_FILE, HELD_OUT_FILE)]
    fitted, held_out = (torch.from_numpy(ids).long().view(-1, fit.seq_len) for ids in found)
    if not (len(fitted) and len(held_out)):
        raise TwellError(
            f"the text makes {len(fitted)} windows of {fit.seq_len} tokens to fit on, and "
            f"{len(held_out)} to hold out: give more text, or lower --seq-len"
        )
    return fitted, held_out
