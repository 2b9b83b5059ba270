"""Which neurons fire: a hook on the activation of each gated FFN of a stock model, exact counts.

Counts are kept as histograms, so their size depends on the model and not on the text.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_model import activation_of, gated_ffns
from twellctl.firing.profiled import LayerProfile

Count = Callable[[int, Tensor, Tensor], None]
Look = Callable[[int, Tensor], None]
SLOTS_STEP = 8
# share of rows that the chosen slots may send to the backup: a tile of such a row is multiplied
# anew, and more slots cost memory but next to no time
MAX_OVERFLOW = 1e-5
COUNTED_AT_ONCE = 8192  # tokens of one forward


@contextlib.contextmanager
def fired_meter(model: nn.Module, count: Count, look: Look | None = None) -> Iterator[None]:
    """Inside, each forward of layer i calls `count(i, gate, active)`.

    Both are `[M, N]`, the gate before and after the activation; what fired is `active != 0`. Under
    gradient checkpointing `count` is called again in the backward pass. `look(i, hidden)` is called
    with what W_down of layer i reads.
    """

    def count_at(i: int, module: nn.Module, inputs: tuple[Tensor], active: Tensor) -> None:
        gate = inputs[0].detach()
        count(i, gate.flatten(0, -2), active.detach().flatten(0, -2))

    def look_at(i: int, module: nn.Module, inputs: tuple[Tensor]) -> None:
        if look is not None:
            look(i, inputs[0])

    with contextlib.ExitStack() as hooks:
        for i, ffn in enumerate(gated_ffns(model)):
            counted = activation_of(ffn).register_forward_hook(partial(count_at, i))
            hooks.callback(counted.remove)
            if look is not None:
                seen = ffn.down_proj.register_forward_pre_hook(partial(look_at, i))
                hooks.callback(seen.remove)
        yield


class LayerCount:
    """What fired in one layer: by neuron, by group, histograms of nnz and of the fullest tile.

    `intermediate_size` counts the model's own neurons, which come first. Those of a map, which
    follow, fill tiles and are not counted elsewhere.
    """

    def __init__(
        self, intermediate_size: int, tile: int, device: torch.device, num_groups: int = 0
    ):
        self.intermediate_size, self.tile = intermediate_size, tile
        self.by_group = torch.zeros(num_groups, dtype=torch.int64, device=device)
        self.by_neuron = torch.zeros(intermediate_size, dtype=torch.int64, device=device)
        self.nnz = torch.zeros(intermediate_size + 1, dtype=torch.int64, device=device)
        self.fullest = torch.zeros(tile + 2, dtype=torch.int64, device=device)
        self.largest = torch.zeros(2, device=device)  # gate and hidden value, by their size

    def add(self, gate: Tensor, active: Tensor, groups: Tensor | None = None) -> None:
        """Count rows `[M, N]`: the gate before and after its activation, `groups` int64 `[M]`."""
        fired = active != 0
        own = fired[:, : self.intermediate_size]
        nnz = own.sum(-1)
        self.by_neuron += own.sum(0)
        self.nnz += nnz.bincount(minlength=len(self.nnz))
        if groups is not None:
            self.by_group.index_add_(0, groups, nnz)
        tiles = F.pad(fired, (0, -fired.shape[-1] % self.tile)).unflatten(-1, (-1, self.tile))
        fullest = tiles.sum(-1).amax(-1)
        # whatever the slots, a row that is not finite goes to the backup
        fullest = torch.where(gate.isfinite().all(-1), fullest, self.tile + 1)
        self.fullest += fullest.bincount(minlength=len(self.fullest))
        self._enlarge(0, gate)

    def look(self, hidden: Tensor) -> None:
        """See how large active gate times up becomes."""
        self._enlarge(1, hidden)

    def _enlarge(self, which: int, values: Tensor) -> None:
        self.largest[which] = torch.maximum(self.largest[which], values.abs().amax().float())

    @property
    def not_finite(self) -> int:
        """Rows that hold NaN or infinity."""
        return int(self.fullest[self.tile + 1])

    def summary(self) -> LayerProfile:
        """The figures of the layer, with the fewest slots that overflow rarely enough."""
        nnz, num_rows = self.nnz.cpu(), int(self.nnz.sum())
        mean = int((nnz * torch.arange(len(nnz))).sum()) / num_rows
        reached = nnz.cumsum(0).double()
        by_neuron = self.by_neuron.cpu()
        beyond = num_rows - self.fullest.cpu().cumsum(0)  # rows, by slots
        avoidable = (beyond - self.not_finite)[SLOTS_STEP::SLOTS_STEP]
        fit = (avoidable <= MAX_OVERFLOW * num_rows).nonzero().flatten()
        slots = self.tile if not len(fit) else min(self.tile, SLOTS_STEP * (int(fit[0]) + 1))
        percents = {p: int((reached < p / 100 * num_rows).sum()) for p in (10, 50, 90, 99)}
        return LayerProfile(
            nnz_mean=mean,
            **{f"nnz_p{p}": count for p, count in percents.items()},
            nnz_max=int(nnz.nonzero().max()),
            density=mean / self.intermediate_size,
            dead=int((by_neuron == 0).sum()),
            slots=slots,
            overflow=int(beyond[slots]) / num_rows,
            largest_gate=float(self.largest[0]),
            largest_hidden=float(self.largest[1]),
        )


def count_layers(body: nn.Module, ids: Tensor, tile: int) -> list[LayerProfile]:
    """What fires in each layer while `body` reads `ids` `[B, S]`."""
    ffns = gated_ffns(body)
    size = body.config.intermediate_size - mapped_neurons(body.config)
    counts = [LayerCount(size, tile, ids.device) for _ in ffns]

    with fired_meter(body, lambda layer, gate, active: counts[layer].add(gate, active)):
        for batch in ids.split(max(1, COUNTED_AT_ONCE // ids.shape[1])):
            body(input_ids=batch, use_cache=False)
    return [count.summary() for count in counts]
