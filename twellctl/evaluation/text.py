"""Cross-entropy on windows of text, and how far two models agree there."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.errors import TwellError
from twellctl.evaluation.results import KindScore, TextResult, TextScore
from twellctl.evaluation.windows import count_windows
from twellctl.firing.grouping import GroupedWindows
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.head_loss import HeadLoss


def score_text(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    text: GroupedWindows,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextResult:
    """Loss and density of `model`, the one of `checkpoint`, and its agreement with `reference`.

    Each token of a window but the first is predicted from those in front of it. `TwellError` if
    gates or the loss are not finite.
    """
    scores = _Scores(model, reference, text)
    try:
        counts = count_windows(checkpoint, model, text, scores.read, progress)
    finally:
        scores.close()
    tokens, sums = scores.totals()
    whole = TextScore.of(int(tokens.sum()), sums.sum(0).tolist())
    if not sums.isfinite().all():
        raise TwellError(
            f"{checkpoint.name}: the loss is not finite: the model or its reference is broken"
        )
    density_by_layer = tuple(count.summary().density for count in counts)
    return TextResult(
        windows=len(text.ids),
        seq_len=text.ids.shape[1],
        text_tokens=text.text_tokens,
        score=whole,
        by_kind=tuple(
            KindScore.of(count, row, kind=kind)
            for kind, count, row in zip(text.kinds, tokens.tolist(), sums.tolist(), strict=True)
        ),
        density=sum(density_by_layer) / len(density_by_layer),
        density_by_layer=density_by_layer,
        density_by_kind=text.by_kind(counts),
    )


class _Scores:
    """Sums by kind of text: cross-entropy and, of a reference, its own, KL and equal first."""

    def __init__(
        self, model: PreTrainedModel, reference: PreTrainedModel | None, text: GroupedWindows
    ):
        self.heads = [HeadLoss(made) for made in (model, reference) if made is not None]
        self.groups_of_a_kind = text.num_groups // len(text.kinds)
        size = (len(text.kinds), 1 if reference is None else 4)
        self.sums = torch.zeros(size, dtype=torch.float64, device=model.device)
        self.tokens = torch.zeros(len(text.kinds), dtype=torch.int64, device=model.device)

    def close(self) -> None:
        for head in self.heads:
            head.remove()

    def totals(self) -> tuple[Tensor, Tensor]:
        """(tokens `[kinds]`, sums `[kinds, 1 or 4]`) up to now, on the CPU."""
        return self.tokens.cpu(), self.sums.cpu()

    def read(self, ids: Tensor, groups: Tensor) -> None:
        """Add the windows `ids` `[B, S]`; a prediction is of the kind of the token it is for."""
        states = [head.states(ids) for head in self.heads]
        targets = ids[:, 1:].flatten()
        kinds = groups[:, 1:].flatten() // self.groups_of_a_kind
        for some in self.heads[0].logit_rows(len(targets)):
            log_p = [
                head.logits(state[some]).float().log_softmax(-1)
                for head, state in zip(self.heads, states, strict=True)
            ]
            self.sums.index_add_(0, kinds[some], _columns(log_p, targets[some, None]).double())
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
