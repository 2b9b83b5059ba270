"""The layers of a model are fitted one after the other, on what those before them give.

The target of a layer is the hidden state of the model as it was, so that each layer also mends what
those before it have broken. (Of a layer that does more than add its FFN's output, a norm behind it
for example, the target is what its own FFN gives on the same input.)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from twellctl.errors import TwellError
from twellctl.fitting.ffn import GatedFfn
from twellctl.fitting.kept import KeptLayers
from twellctl.fitting.layer import HowToFit, fit_layer
from twellctl.fitting.layerwise import Layer, Layerwise
from twellctl.fitting.least_squares import NotSolved, sum_over_processes
from twellctl.fitting.source import num_kept
from twellctl.fitting.steps import LayerText
from twellctl.fitting.thresholds import WINDOWS, Thresholds, token_weights
from twellctl.here.processes import from_all, is_one_of_several

TOKENS_AT_ONCE = {"cuda": 16384, "cpu": 2048}  # of a forward of one layer
LOGIT_TOKENS = 2048

Told = Callable[[int, int, float, float], None]  # (layers done, of, states differ by, seconds left)


@dataclass(frozen=True)
class LayerFit:
    """How a layer came out; errors are shares of the squared output wanted, on held-out text.

    `fires`: share of its own neurons; `error_swapped`: of ReLU in the place of its activation and
    no more; `map_share`: what the map gives, of the squared output; `states_differ`: how far the
    hidden states behind it are from the model's own, relative, a mean over tokens.
    """

    fires: float
    error_swapped: float
    error: float
    map_share: float
    states_differ: float


@dataclass(frozen=True)
class HeldOut:
    """On held-out text: nats a token, and the share of tokens for which both choose the same."""

    cross_entropy: float
    source_cross_entropy: float
    kl: float
    same_token: float


@dataclass(frozen=True)
class Text:
    """Windows of ids, to fit on `[W, L]` and to measure on `[H, L]`, those of this process."""

    fitted: Tensor
    held_out: Tensor


class Fitting:
    """One run of it. States of both models, `[W + H, L, K]`, stay on the device.

    They are float32 where the weights are; else bf16, as in a model of such weights.
    """

    def __init__(
        self, layerwise: Layerwise, text: Text, how: HowToFit, kept: KeptLayers, seed: int
    ):
        self.layerwise, self.text, self.how, self.kept = layerwise, text, how, kept
        self.seed = seed
        self.ids = torch.cat([text.fitted, text.held_out])
        self._at_once = max(1, TOKENS_AT_ONCE[layerwise.device.type] // layerwise.seq_len)
        self.dtype = torch.bfloat16 if layerwise.device.type == "cuda" else torch.float32
        self._held = torch.float32 if how.dtype == torch.float32 else torch.bfloat16

    @torch.no_grad()
    def run(self, density: float, told: Told) -> list[LayerFit]:
        """Fit all layers, or those that were not kept, and keep them."""
        thresholds, began = Thresholds(density), time.monotonic()
        some = min(WINDOWS, -(-len(self.text.fitted) // 4))
        first = from_all(self.text.fitted[:some].clone())[0]  # all look at the same text
        thresholds.look(self.layerwise, first)
        parts = (self.layerwise.first_states(self.ids[part]) for part in self._batches())
        self.teacher = torch.cat([part.to(self._held) for part in parts])
        self.student = self.teacher.clone()
        found: list[LayerFit] = []
        self.num_kept = num_kept(self.kept.folder)
        for index in range(len(self.layerwise.layers)):
            if index == self.num_kept:  # layers of before take no time
                began = time.monotonic()
            threshold = thresholds.next([layer.fires for layer in found])
            found.append(self._layer(index, threshold))
            done, total = index + 1, len(self.layerwise.layers)
            left = (time.monotonic() - began) / max(1, done - self.num_kept) * (total - done)
            told(done, total, found[-1].states_differ, left)
        return found

    def _layer(self, index: int, threshold: float) -> LayerFit:
        layer, before = self.layerwise.layer(index), None
        if layer.factor is None:
            before = self.student.clone()
        z = torch.empty(*self.teacher.shape, dtype=self.dtype, device=self.teacher.device)
        for part in self._batches():
            self.teacher[part] = layer(self.teacher[part].float())
            self.student[part], z[part] = layer.apart(self.student[part].float(), self.dtype)
        text = self._layer_text(layer, z)
        made, fired = self._fitted(index, layer, text, threshold)
        for part in self._batches():
            output = made(z[part].flatten(0, 1)).view_as(z[part])
            if before is None:
                self.student[part] = self.student[part].float() + layer.factor * output.float()
            else:
                self.student[part] = layer.with_output(before[part].float(), output)
        return self._measured(layer, z, made, fired)

    def _fitted(
        self, index: int, layer: Layer, text: LayerText, threshold: float
    ) -> tuple[GatedFfn, float]:
        if (there := self.kept.get(index, self.layerwise.device)) is not None:
            return there
        how = self.how
        if how.steps is not None:
            rank = dist.get_rank() if is_one_of_several() else 0  # each draws tokens of its own
            seed = (self.seed * 1000 + index) * 1000 + rank
            how = replace(how, steps=replace(how.steps, seed=seed))
        try:
            made, fired = fit_layer(layer.weights, text, threshold, how)
        except NotSolved as error:
            raise TwellError(f"layer {index} cannot be fitted: {error}") from error
        self.kept.put(index, made, fired)
        return made, fired

    def _layer_text(self, layer: Layer, z: Tensor) -> LayerText:
        """Of the windows that are fitted on."""
        count = len(self.text.fitted)
        teacher, student = (s[:count].flatten(0, 1) for s in (self.teacher, self.student))
        inputs = z[:count].flatten(0, 1)
        weights = torch.cat([token_weights(part.float()) for part in teacher.split(8192)])
        if (factor := layer.factor) is None:
            own = torch.cat([layer.gated(part) for part in inputs.split(8192)])
            return LayerText(inputs, weights, lambda t: own[t])
        return LayerText(
            inputs, weights, lambda t: (teacher[t].float() - student[t].float()) / factor
        )

    def _measured(self, layer: Layer, z: Tensor, made: GatedFfn, fired: float) -> LayerFit:
        """On the held-out windows of all processes."""
        held = slice(len(self.text.fitted), None)
        inputs = z[held].flatten(0, 1)
        teacher, student = (s[held].flatten(0, 1).float() for s in (self.teacher, self.student))
        weights = token_weights(teacher)
        given = made(inputs).float()
        away = student - teacher
        direct = layer.factor is not None
        wanted = given - away / layer.factor if direct else layer.gated(inputs)
        swapped = layer.weights(inputs).float()
        mapped = given - made.first(len(layer.weights.gate))(inputs).float()
        size = teacher.norm(dim=-1).clamp(min=1e-9)
        sums = torch.stack(
            [
                *(_squares(t, weights) for t in (wanted, wanted - swapped, wanted - given)),
                *(_squares(t, weights) for t in (given, mapped)),
                (away.norm(dim=-1) / size).double().sum(),
                torch.tensor(len(inputs), dtype=torch.float64, device=size.device),
            ]
        )
        sum_over_processes(sums)
        whole, swap_error, error, output, by_map, differ, count = sums.tolist()
        whole, output = max(whole, 1e-30), max(output, 1e-30)
        return LayerFit(fired, swap_error / whole, error / whole, by_map / output, differ / count)

    @torch.no_grad()
    def held_out(self) -> HeldOut:
        """How near the fitted model is to the one it was, at its end."""
        first, each = len(self.text.fitted), max(1, LOGIT_TOKENS // self.layerwise.seq_len)
        sums = torch.zeros(5, dtype=torch.float64, device=self.layerwise.device)
        for start in range(first, len(self.ids), each):
            part = slice(start, start + each)
            ids = self.ids[part].to(self.layerwise.device)
            theirs, ours = (
                self.layerwise.logits(ids, states[part].float())[:, :-1].log_softmax(-1)
                for states in (self.teacher, self.student)
            )
            following = ids[:, 1:, None]
            losses = [-p.gather(-1, following).sum() for p in (ours, theirs)]
            kl = (theirs.exp() * (theirs - ours)).sum()
            same = (theirs.argmax(-1) == ours.argmax(-1)).sum()
            count = torch.tensor(following.numel(), device=ids.device)
            sums += torch.stack([*losses, kl, same.float(), count.float()]).double()
        sum_over_processes(sums)
        *means, count = sums.tolist()
        return HeldOut(*(value / max(count, 1) for value in means))

    def _batches(self):
        return [slice(i, i + self._at_once) for i in range(0, len(self.ids), self._at_once)]


def _squares(values: Tensor, weights: Tensor) -> Tensor:
    return (values.square().sum(-1) * weights).double().sum()
