"""Which neurons a screen may leave out: its limits, measured on tokens that the model draws itself.

A neuron is a candidate where x . copy > limit. What the copy's gate errs by is measured for each
neuron on half of the texts, with x in 8 bits as a copy takes it. The limit is its mean less
2.5 deviations. What is missed even so, as a share of the squared output of the layer, is measured
on the other half, and on one token or eight that are repeated, of which the most is missed. A layer
that misses more than NEXT_TO_NOTHING of any takes more deviations (MARGINS): of other kinds of
text, up to ten times as much was missed. If it misses more than MOST_MISSED even so, it reads its
gate whole.
"""

import logging
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_model import gated_ffns, weights_of_gate_and_up
from twellctl.bundle.twell_spec import FEW_ROWS
from twellctl.decoding.paged_cache import cache_argument
from twellctl.decoding.screened import COPY_BITS, Screen, copied, copied_input, screen_copy
from twellctl.models.linear_map import own_neurons
from twellctl.models.loading import gpu_memory

logger = logging.getLogger(__name__)
MARGINS = 2.5, 3.0, 4.0, 6.0  # standard deviations of a neuron's own error
MOST_MISSED = 1e-6
NEXT_TO_NOTHING = MOST_MISSED / 20
_ROWS, _LENGTH = 16, 64  # of the text that is drawn: half of the rows to measure, half to judge
_REPEATED, _REPEATS = (1, 8), 8  # numbers of tokens that are repeated, and rows of each kind


@dataclass(frozen=True)
class Screens:
    """Of each layer its screen, open where the gate is read whole.

    `missed`: shares of the squared output that the screens miss; `candidates`: of the neurons, the
    mean over layers and tokens.
    """

    layers: list[Screen]
    missed: list[float]
    candidates: float

    def __str__(self) -> str:
        num = sum(not screen.is_open for screen in self.layers)
        whole = "" if num == len(self.layers) else f" in {num} of {len(self.layers)} layers"
        return (
            f"screened{whole}: {self.candidates:.1%} of the neurons are candidates, at most "
            f"{max(self.missed):.0e} of a layer's squared output is missed"
        )


@torch.no_grad()
def open_screens(model: PreTrainedModel) -> Screens | None:
    """The screens of all gated FFNs of a ReLU model in bf16, on its device; seconds.

    Of `MARGINS` each layer takes the first by which it misses NEXT_TO_NOTHING, else the last. None
    where their copies would take more than half of the memory that is free.
    """
    size = COPY_BITS / 16 * sum(ffn.down_proj.weight.nbytes for ffn in gated_ffns(model))
    if model.device.type == "cuda" and size > gpu_memory(model.device)[0] / 2:
        logger.info("gates are read whole: copies of %.1f GB take too much memory", size / 1e9)
        return None
    layers, missed, shares = [], [], []
    num_own = max(own_neurons(ffn) for ffn in gated_ffns(model))  # the same in all layers
    for ffn, z in zip(gated_ffns(model), _inputs(model), strict=True):
        screen, lost, share = _screen_of(ffn, z, num_own)
        if not lost <= MOST_MISSED:  # NaN, too
            screen.limits[screen.limits < torch.inf] = -torch.inf
            screen = replace(screen, is_open=True)
        layers.append(screen)
        missed.append(lost)
        shares.append(share)
    made = Screens(layers, missed, sum(shares) / len(shares))
    logger.info("gates are %s", made)
    return made


def _inputs(model: PreTrainedModel) -> list[Tensor]:
    """What each FFN reads in texts that the model draws and, after them, in repeated tokens.

    `[_ROWS + _REPEATS for each of _REPEATED, _LENGTH, K]`
    """
    seen: list[list[Tensor]] = [[] for _ in gated_ffns(model)]

    def keep(kept: list[Tensor]):
        return lambda module, inputs: kept.append(inputs[0].detach())

    hooks = [
        ffn.register_forward_pre_hook(keep(kept))
        for ffn, kept in zip(gated_ffns(model), seen, strict=True)
    ]
    generator = torch.Generator(model.device).manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(size, (_ROWS, 1), generator=generator, device=model.device)
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    try:
        for _ in range(_LENGTH):
            done = model(input_ids=tokens, use_cache=True, **cache)
            shares = done.logits[:, -1].float().softmax(-1).nan_to_num(1.0)
            tokens = torch.multinomial(shares, 1, generator=generator)
        for length in _REPEATED:
            some = torch.randint(size, (_REPEATS, length), generator=generator, device=model.device)
            model(input_ids=some.repeat(1, _LENGTH // length))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat([torch.cat(kept[:_LENGTH], 1), *kept[_LENGTH:]]) for kept in seen]


def _screen_of(ffn: nn.Module, z: Tensor, num_own: int) -> tuple[Screen, float, float]:
    """The screen, what it misses of the squared output, and the share of candidates."""
    of_gate, of_up = weights_of_gate_and_up(ffn)
    gate, up = (weight.values[:num_own] for weight in (of_gate, of_up))
    biases = of_gate.bias, of_up.bias
    gate_bias, up_bias = (None if b is None else b[:num_own] for b in biases)
    rows = [_ROWS // 2, _ROWS // 2, *[_REPEATS] * len(_REPEATED)]
    measured, *judged = (part.flatten(0, 1) for part in z.split(rows))
    copy = copied(gate)
    error = copied_input(measured) @ copy.T - measured.float() @ gate.float().T
    lengths = ffn.down_proj.weight[:, :num_own].float().norm(dim=0)
    kinds = []  # of text: what the copy's gates are, whether a neuron fires, its squared output
    for x in judged:
        gates, ups = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias).float()
        size = (keep_fired(gates).float() * ups * lengths).square()
        kinds.append((copied_input(x) @ copy.T, fires(gates), size))
    for margin in MARGINS:
        limits = error.mean(0) - margin * error.std(0)
        if gate_bias is not None:
            limits -= gate_bias.float()
        lost = torch.stack([_missed(limits, *kind) for kind in kinds]).max()
        if lost <= NEXT_TO_NOTHING:
            break
    candidates = (~(kinds[0][0] <= limits)).float().mean()
    blocks = -(-num_own // FEW_ROWS)
    limits = F.pad(limits, (0, blocks * FEW_ROWS - num_own), value=-torch.inf)
    limits[of_gate.N :] = torch.inf  # of the last row block: of the map, or no neurons
    screen = Screen(screen_copy(of_gate.values[: blocks * FEW_ROWS]), limits, num_own)
    return screen, lost.item(), candidates.item()


def _missed(limits: Tensor, about: Tensor, fired: Tensor, size: Tensor) -> Tensor:
    """The share of the squared output that the limits cut off."""
    return (size * (fired & (about <= limits))).sum() / size.sum().clamp(min=1e-30)
