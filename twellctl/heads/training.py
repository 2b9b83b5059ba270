"""A draft head is trained: the model reads each batch anew, so that no states are stored."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twellctl.errors import TwellError
from twellctl.heads.head import DraftHead
from twellctl.heads.last_layer import begun_head
from twellctl.heads.loss import guessing_loss
from twellctl.heads.original import Original
from twellctl.heads.settings import HeadTraining, Progress
from twellctl.heads.unroll import unroll

WARM_STEPS = 50  # or a tenth of a shorter training
BETAS, DECAY, LARGEST = (0.9, 0.95), 0.05, 1.0  # LARGEST: norm of the gradient


@dataclass(frozen=True)
class Trained:
    """A head in float32; `loss` is the last step's, in nats."""

    head: DraftHead
    steps: int
    loss: float
    seconds: float


def train_head(
    original: Original, windows: Tensor, training: HeadTraining, progress: Progress
) -> Trained:
    """Train a head on `windows` `[W, S]` of ids; `progress` after each step."""
    began = time.monotonic()
    tokens = frequent_tokens(windows, original.vocabulary, training.vocabulary)
    head = begun_head(original.model, tokens, training.seed)
    rows = original.rows_of(head.tokens)
    at_once = windows_at_once(training)
    total = training.epochs * -(-len(windows) // at_once)
    optimizer = torch.optim.AdamW(
        head.parameters(),
        lr=training.learning_rate,
        betas=BETAS,
        weight_decay=DECAY,
        fused=original.device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, total))
    random = torch.Generator().manual_seed(training.seed)
    done, loss, first = 0, math.nan, began
    for _ in range(training.epochs):
        for picked in torch.randperm(len(windows), generator=random).split(at_once):
            loss = _step(head, original, windows[picked], rows, training.ahead, optimizer)
            schedule.step()
            done += 1
            if done == 1:  # which takes longer than the others
                first = time.monotonic()
            each = (time.monotonic() - first) / (done - 1) if done > 1 else None
            progress(done, total, loss, each and each * (total - done))
    return Trained(head, done, loss, time.monotonic() - began)


def frequent_tokens(windows: Tensor, vocabulary: int, most: int) -> Tensor:
    """int64, ascending: the `most` frequent ids of `windows`, and of others the lowest.

    All of the `vocabulary`, if it has no more.
    """
    counts = torch.bincount(windows.flatten(), minlength=vocabulary)
    return counts.sort(descending=True, stable=True).indices[:most].sort().values


def windows_at_once(training: HeadTraining) -> int:
    return max(1, training.step_tokens // training.seq_len)


def rate_at(step: int, total: int) -> float:
    """The share of the learning rate that step 0 .. total - 1 has."""
    warm = min(WARM_STEPS, 1 + total // 10)
    return min(1.0, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * step / total))


def _step(
    head: DraftHead,
    original: Original,
    ids: Tensor,
    rows: Tensor,
    ahead: int,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One step on ids `[B, S]`; its loss."""
    read = original.read(ids)
    guesses = unroll(head, original, read, ahead)
    loss = guessing_loss(guesses, read.states, rows)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(head.parameters(), LARGEST)
    optimizer.step()
    if not math.isfinite(value := loss.item()):
        raise TwellError(
            "the training is broken, its loss is no number: give a lower --learning-rate"
        )
    return value
