"""A fit from a run folder to weights: which method walks over which model, and what comes out."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor

from twellctl.bundle.twell_config import PACKED, PACKED_PARTS
from twellctl.bundle.twell_int4 import expanded
from twellctl.errors import TwellError
from twellctl.fitting.folder import windows_of
from twellctl.fitting.grid import Grid
from twellctl.fitting.kept import KeptLayers
from twellctl.fitting.layer import HowToFit
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.method import Method
from twellctl.fitting.relu import ReluMethod
from twellctl.fitting.rounding import RoundingMethod
from twellctl.fitting.settings import Fit, Progress, density_of, rank_of_map
from twellctl.fitting.source import group_size_for
from twellctl.fitting.steps import Steps
from twellctl.fitting.walk import HeldOut, Text, Walk
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import (
    default_device,
    load_model,
    quiet_transformers,
    read_tensors,
    stored_dtypes,
)


@dataclass(frozen=True)
class LayerFit:
    """How a layer came out; errors are shares of the squared output wanted, on held-out text.

    `error`: of the FFN; `states_differ`: how far the hidden states after the layer are from the
    model's own, relative, a mean over tokens. Of an FFN that was made ReLU besides: `fires`, the
    share of its own neurons; `error_swapped`, of ReLU instead of its activation and no more;
    `map_share`, what the map gives, of the squared output.
    """

    error: float
    states_differ: float
    fires: float = 1.0
    error_swapped: float | None = None
    map_share: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """What a fit came to; `tokens` it was fitted on, `wanted` the density that was asked for.

    `seconds` are those of this call, in which layers that an earlier one `kept` were not fitted.
    """

    map_neurons: int
    tokens: int
    wanted: float
    layers: list[LayerFit]
    held_out: HeldOut
    seconds: float
    kept: int = 0

    @property
    def density(self) -> float:
        """Share of the model's own neurons that fire, a mean over the layers."""
        return sum(layer.fires for layer in self.layers) / len(self.layers)


def fit_weights(
    checkpoint: Checkpoint, run: Path, fit: Fit, world: PartialState, progress: Progress
) -> Fitted:
    """Fit all layers into the run folder that `prepare_fit` made; `progress` after each."""
    began = time.monotonic()
    rank = rank_of_map(fit, checkpoint.ffn.hidden_size, checkpoint.ffn.intermediate_size)
    dtype = stored_dtypes(checkpoint)(checkpoint.ffn_weights(0)[0])
    fitted, held_out = windows_of(run, fit)
    mine = slice(world.process_index, None, world.num_processes)
    method = _method(checkpoint, fit, rank, dtype)
    with quiet_transformers():
        layerwise = _opened(checkpoint, fit.seq_len)
        text = Text(fitted[mine], held_out[mine])
        walk = Walk(layerwise, text, method, KeptLayers(run), dtype, fit.seed)
        layers = [
            LayerFit(**done.figures, states_differ=done.states_differ)
            for done in walk.run(progress)
        ]
        held = walk.held_out()
    held.refuse_broken(checkpoint.config["vocab_size"])
    seconds, kept = time.monotonic() - began, walk.num_kept
    return Fitted(rank, fitted.numel(), density_of(fit), layers, held, seconds, kept)


def _method(checkpoint: Checkpoint, fit: Fit, rank: int, dtype: torch.dtype) -> Method:
    grid = Grid(group_size_for(checkpoint, fit), dtype) if fit.bits else None
    if grid and fit.keep_activation:
        return RoundingMethod(grid)
    steps = Steps(fit.steps, fit.step_tokens, fit.step_rate, 0) if fit.steps else None
    return ReluMethod(density_of(fit), HowToFit(rank, fit.ridge, dtype, steps, grid))


def _opened(checkpoint: Checkpoint, seq_len: int) -> Layerwise:
    device = default_device()
    wide = torch.float32 if device.type == "cpu" else None
    model = load_model(checkpoint, dtype=wide, device=torch.device("cpu"))
    return Layerwise(model.requires_grad_(False), seq_len, device)


def fitted_tensors(checkpoint: Checkpoint, run: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the fitted model, one after the other."""
    kept, layer_of = KeptLayers(run), _layers_by_tensor(checkpoint)
    index, tensors = -1, {}
    for name, tensor in read_tensors(checkpoint):
        if name not in layer_of:
            yield name, tensor
            continue
        if layer_of[name] != index:
            index = layer_of[name]
            tensors = _kept_tensors(checkpoint, kept, index)
        layer = name.removesuffix(".weight")
        if layer + PACKED in tensors:
            yield from ((layer + end, tensors[layer + end]) for end in PACKED_PARTS)
        else:
            yield name, tensors.get(name, tensor).to(tensor.dtype)


def _layers_by_tensor(checkpoint: Checkpoint) -> dict[str, int]:
    """The number of the layer that each tensor of a layer is in."""
    prefixes = [checkpoint.layer_name(index) + "." for index in range(checkpoint.ffn.num_layers)]
    return {
        name: index
        for index, prefix in enumerate(prefixes)
        for name in checkpoint.tensors
        if name.startswith(prefix)
    }


def _kept_tensors(checkpoint: Checkpoint, kept: KeptLayers, index: int) -> dict[str, Tensor]:
    """What was kept of a layer, by the names that the checkpoint has for it."""
    change = kept.get(index)
    if change is None:
        raise TwellError(f"{kept.folder} holds no layer {index}: repeat the call")
    prefix = checkpoint.layer_name(index)
    tensors = {f"{prefix}.{name}": tensor for name, tensor in change.tensors.items()}
    if others := sorted(expanded(tensors).keys() - checkpoint.tensors.keys()):
        raise TwellError(
            f"{checkpoint.name} has no {others[0]}, which was fitted: save the model once by "
            "transformers, and fit that one"
        )
    return tensors
