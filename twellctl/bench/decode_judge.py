"""What a decoded text looks like to the model itself: read once, whole, by its stock form.

So every form of a decode bench is judged alike: how far a chosen token fell short of the likeliest
one, and which neurons fired in its steps, for one row and for all rows of a step together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_cache import reasons_said
from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_model import gated_ffns
from twellctl.firing.counts import fired_meter


@dataclass(frozen=True)
class Judged:
    """Of the last steps of some rows, by layer; `shortfall` of all their tokens.

    `densities`: the mean share of neurons that fired for a row; `unions`: for some row of a step.
    `shortfall`: how far the logit of a chosen token lay below the largest, at most, in standard
    deviations of the logits.
    """

    rows: int
    densities: tuple[float, ...]
    unions: tuple[float, ...]
    shortfall: float

    @property
    def density(self) -> float:
        return sum(self.densities) / len(self.densities)

    @property
    def union(self) -> float:
        return sum(self.unions) / len(self.unions)

    @property
    def most_alike(self) -> tuple[float, float]:
        """The union of the layer in which rows shared most neurons; that of independent rows."""
        expected = (1 - (1 - density) ** self.rows for density in self.densities)
        found = zip(self.unions, expected, strict=True)
        return min(found, key=lambda pair: pair[0] / (pair[1] or 1))


@torch.no_grad()
def judge(model: nn.Module, prompts: list[list[int]], tokens: list[list[int]], last: int) -> Judged:
    """`tokens` after `prompts`, as many for each; of what fired, the `last` steps count.

    Neurons of a map are not counted.
    """
    ffns = gated_ffns(model)
    mapped = mapped_neurons(model.config)
    shares = torch.zeros(len(ffns), dtype=torch.float64, device=model.device)
    fired_for_some: list[Tensor | None] = [None] * len(ffns)

    def count(layer: int, gate: Tensor, active: Tensor) -> None:
        fired = active[-last:, : active.shape[-1] - mapped] != 0
        shares[layer] += fired.double().mean()
        before = fired_for_some[layer]
        fired_for_some[layer] = fired if before is None else before | fired

    shortfall = torch.zeros((), device=model.device)
    # that hooks keep the kernels from running is meant
    with reasons_said(), fired_meter(model, count):
        for prompt, made in zip(prompts, tokens, strict=True):
            ids = torch.tensor([prompt + made[:-1]], device=model.device)
            done = model(input_ids=ids, use_cache=False, logits_to_keep=len(made))
            # not max(): that of a NaN must be one
            shortfall = torch.maximum(shortfall, _shortfall(done.logits[0].float(), made))
    return Judged(
        rows=len(prompts),
        densities=tuple((shares / len(prompts)).tolist()),
        unions=tuple(float(f.float().mean()) for f in fired_for_some if f is not None),
        shortfall=float(shortfall),
    )


def _shortfall(logits: Tensor, chosen: list[int]) -> Tensor:
    """Of `chosen` `[S]` by logits `[S, V]`, the largest."""
    ids = torch.tensor(chosen, device=logits.device)
    below = logits.amax(-1) - logits.gather(-1, ids[:, None])[:, 0]
    return (below / logits.std(-1)).max()
