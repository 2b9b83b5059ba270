"""One pass over windows of text, which `profile` and `eval` share: what fires is counted, and how
well each token is predicted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.results import KindScore, TextResult, TextScore
from twellctl.evaluation.settings import Progress
from twellctl.firing.counts import LayerCount, fired_meter
from twellctl.firing.grouping import GroupedWindows
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.head_loss import HeadLoss
from twellctl.version import __version__

BATCH_TOKENS = 8192
Read = Callable[[Tensor, Tensor], object]


@torch.inference_mode()
def count_windows(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    text: GroupedWindows,
    read: Read,
    progress: Progress = lambda done, total: None,
) -> list[LayerCount]:
    """What fires in each layer of `model`, the one of `checkpoint`, in all windows of `text`.

    `read(ids, groups)`, both int64 `[B, S]` on the model's device, runs the model on some windows,
    once. `progress(done, total)` receives windows. `TwellError` if a gate is not finite.
    """
    tile, size, device = checkpoint.twell["tile"], checkpoint.own_neurons, model.device
    layers = range(checkpoint.ffn.num_layers)
    counts = [LayerCount(size, tile, device, text.num_groups) for _ in layers]

    batch_size, done = max(1, BATCH_TOKENS // text.ids.shape[1]), 0
    for ids, groups in zip(text.ids.split(batch_size), text.groups.split(batch_size), strict=True):
        ids, groups = ids.to(device), groups.to(device)
        rows = groups.flatten()

        def count(layer: int, gate: Tensor, active: Tensor, rows: Tensor = rows) -> None:
            counts[layer].add(gate, active, rows)

        with fired_meter(model, count, lambda layer, hidden: counts[layer].look(hidden)):
            read(ids, groups)
        done += len(ids)
        progress(done, len(text.ids))
    _refuse_not_finite(checkpoint, counts)
    return counts


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts that are read at once, of about the same length.

    The longest go first, so that memory runs out at once or never.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, BATCH_TOKENS // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def window_length(checkpoint: Checkpoint, seq_len: int | None, least: int = 1) -> int:
    """`seq_len`, or without one 1024 or the model's context if that is shorter; `UsageError`."""
    context = checkpoint.context or 1024
    if seq_len is None:
        return min(1024, context)
    if not least <= seq_len <= context:
        raise UsageError(
            f"seq-len must be {least} to {context}, the context of {checkpoint.name}, got {seq_len}"
        )
    return seq_len


def dtype_for(device: torch.device) -> torch.dtype:
    """In what models are measured: bf16 on CUDA, float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """Where and by what `model` is measured: `dtype`, `device`, `versions`."""
    device = model.device
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {
            "twellctl": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _refuse_not_finite(checkpoint: Checkpoint, counts: list[LayerCount]) -> None:
    """Gates that are not numbers would be counted as firing or not, which says nothing."""
    for number, count in enumerate(counts):
        if rows := count.not_finite:
            raise TwellError(
                f"{checkpoint.name}: gates of layer {number} are NaN or infinite for {rows} tokens:"
                " the model is broken or its dtype too narrow; go back to one that was sound"
            )


def score_text(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    text: GroupedWindows,
    progress: Progress = lambda done, total: None,
) -> TextResult:
    """Loss and density of `model`, the one of `checkpoint`, and its agreement with `reference`.

    Each token of a window but the first is predicted from those in front of it. `TwellError` if
    gates or the loss are not finite.
    """
    sums = _Sums(model, reference, text)
    try:
        counts = count_windows(checkpoint, model, text, sums.read, progress)
    finally:
        sums.close()
    tokens, totals = sums.tokens.cpu(), sums.totals.cpu()
    if not totals.isfinite().all():
        raise TwellError(
            f"{checkpoint.name}: the loss is not finite: the model or its reference is broken"
        )
    density_by_layer = tuple(count.summary().density for count in counts)
    return TextResult(
        windows=len(text.ids),
        seq_len=text.ids.shape[1],
        text_tokens=text.text_tokens,
        score=TextScore.of(int(tokens.sum()), totals.sum(0).tolist()),
        by_kind=tuple(
            KindScore.of_kind(*row)
            for row in zip(text.kinds, tokens.tolist(), totals.tolist(), strict=True)
        ),
        density=sum(density_by_layer) / len(density_by_layer),
        density_by_layer=density_by_layer,
        density_by_kind=text.by_kind(counts),
    )


class _Sums:
    """Sums over predicted tokens by kind of text, on the model's device.

    `tokens` is int64 `[kinds]`. `totals` is float64 `[kinds, 1]`, of cross-entropy; with a
    reference it is `[kinds, 4]`: also the reference's cross-entropy, KL, and equal first tokens.
    """

    def __init__(
        self, model: PreTrainedModel, reference: PreTrainedModel | None, text: GroupedWindows
    ):
        self._heads = [HeadLoss(made) for made in (model, reference) if made is not None]
        self._groups_of_a_kind = text.num_groups // len(text.kinds)
        size = (len(text.kinds), 1 if reference is None else 4)
        self.totals = torch.zeros(size, dtype=torch.float64, device=model.device)
        self.tokens = torch.zeros(len(text.kinds), dtype=torch.int64, device=model.device)

    def close(self) -> None:
        """Give both models their heads back."""
        for head in self._heads:
            head.remove()

    def read(self, ids: Tensor, groups: Tensor) -> None:
        """Add the windows `ids` `[B, S]`. A prediction is of the kind of the token it is for."""
        states = [head.states(ids) for head in self._heads]
        targets = ids[:, 1:].flatten()
        kinds = groups[:, 1:].flatten() // self._groups_of_a_kind
        for some in self._heads[0].logit_rows(len(targets)):
            log_p = [
                head.logits(state[some]).float().log_softmax(-1)
                for head, state in zip(self._heads, states, strict=True)
            ]
            columns = _columns(log_p, targets[some, None]).double()
            self.totals.index_add_(0, kinds[some], columns)
        self.tokens += kinds.bincount(minlength=len(self.tokens))


def _columns(log_p: list[Tensor], targets: Tensor) -> Tensor:
    """`[M, 1]`, with a reference `[M, 4]`, of log-probabilities `[M, V]` and targets `[M, 1]`."""
    losses = [-own.gather(1, targets) for own in log_p]
    if len(log_p) == 1:
        return losses[0]
    p, q = log_p
    kl = (q.exp() * (q - p)).sum(-1, keepdim=True)
    same = (p.argmax(-1, keepdim=True) == q.argmax(-1, keepdim=True)).float()
    return torch.cat([*losses, kl, same], 1)
