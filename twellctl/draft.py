"""twellctl draft: trains a draft head, a layer that guesses what a model writes next.

OUT appears when the head is whole. Nothing is kept of a training that was interrupted.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.errors import TwellError, UsageError
from twellctl.files.home import from_home
from twellctl.files.made_of import digest_of
from twellctl.files.outputs import claimed
from twellctl.heads.folder import not_ours_in_head, save_head
from twellctl.heads.settings import HeadTraining, Progress
from twellctl.heads.source import open_source, read_windows
from twellctl.models.checkpoint import Checkpoint
from twellctl.report.notebook import Shown
from twellctl.settings import chosen
from twellctl.text.reading import text_files

if TYPE_CHECKING:
    from torch import Tensor

    from twellctl.heads.kept import KeptDrafts

Doing = Callable[[str], None]


@dataclass(frozen=True)
class TrainedHead(Shown):
    """What `draft` wrote: a head of `num_parameters`, trained on so many `tokens` of text, read
    `epochs` times in so many `steps` and `seconds`; `loss` is the last one's, `kept` is of held-out
    text. `source`: the hub id of the model, which the head names; None for a local folder."""

    out: Path
    source: str | None
    num_parameters: int
    vocabulary: int
    tokens: int
    epochs: int
    steps: int
    loss: float
    seconds: float
    kept: "KeptDrafts"


def draft(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    doing: Doing = lambda text: None,
    progress: Progress = lambda done, total, loss, left: None,
    **settings: Any,
) -> TrainedHead:
    """Train a draft head for `model` (a folder or hub id), and write it to the folder `out`.

    `settings` are the fields of `HeadTraining`; `data` must be given. `progress` is called with
    (steps done, of how many, the loss, seconds left) after each step. On one GPU or the CPU; on a
    CPU the same call gives the same weights. Raises `TwellError`.
    """
    out, training = from_home(out), chosen(HeadTraining, settings)
    if not training.data:
        raise UsageError("no text to train on: give --data FILE")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("a draft head is trained by one process: start it without torchrun")
    files = text_files(training.data)
    inputs = [*map(from_home, (model, *training.data)), *files]
    with claimed(out, overwrite=overwrite, inputs=inputs, not_ours=not_ours_in_head) as claim:
        checkpoint = open_source(model, revision, training)
        doing("reading and tokenising the text")
        windows, held_out = read_windows(checkpoint, training)
        doing(f"loading {checkpoint.name}")
        with claim.staged() as stage:
            return _trained(checkpoint, out, stage, training, (windows, held_out), doing, progress)


def _trained(
    checkpoint: Checkpoint,
    out: Path,
    stage: Path,
    training: HeadTraining,
    text: tuple["Tensor", "Tensor"],
    doing: Doing,
    progress: Progress,
) -> TrainedHead:
    """Train on the first part of `text`, judge on the other, and write the head into `stage`."""
    import torch

    from twellctl.heads.kept import kept_drafts
    from twellctl.heads.original import Original
    from twellctl.heads.training import train_head, windows_at_once
    from twellctl.models.loading import default_device, load_model, quiet_transformers

    device, (windows, held_out) = default_device(), text
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        with quiet_transformers():
            original = Original(load_model(checkpoint, dtype=dtype), training.seq_len)
            doing("training the draft head")
            trained = train_head(original, windows, training, progress)
            doing("counting what is kept of its drafts")
            kept = kept_drafts(trained.head, original, held_out, windows_at_once(training))
    except torch.OutOfMemoryError as error:
        raise TwellError("out of GPU memory: give fewer --step-tokens") from error
    done = TrainedHead(
        out=out,
        source=checkpoint.hub_id,
        num_parameters=sum(part.numel() for part in trained.head.parameters()),
        vocabulary=trained.head.sizes.V,
        tokens=windows.numel(),
        epochs=training.epochs,
        steps=trained.steps,
        loss=trained.loss,
        seconds=trained.seconds,
        kept=kept,
    )
    save_head(trained.head, original.model, stage, _facts(checkpoint, training, done))
    return done


def _facts(checkpoint: Checkpoint, training: HeadTraining, done: TrainedHead) -> dict[str, Any]:
    """What is told of a head: no path of this machine."""
    named = {"source": checkpoint.hub_id, "revision": checkpoint.revision}
    settings = dataclasses.asdict(training)
    texts = [digest_of(text_files([path])) for path in settings.pop("data")]
    figures = {name: getattr(done, name) for name in ("tokens", "steps", "seconds", "loss")}
    kept = {"kept": dataclasses.asdict(done.kept)}
    known = {key: value for key, value in named.items() if value is not None}
    return known | {"settings": settings, "text": texts} | figures | kept
