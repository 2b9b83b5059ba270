"""The FFN of each layer of a real model, timed over TwELL and in all its dense forms.

It reads what that layer reads of real text: the model runs once, and each FFN is timed when it is
about to run. So the activations of all layers are never kept at the same time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from twellctl.bench.contest import Contender, Course, hold, relative_error
from twellctl.bench.dense_ffn import Ffn, dense_ffns, dense_modes, fresh_compiler, reference
from twellctl.bench.device import device_name, free_memory
from twellctl.bench.results import DENSE, TWELL, Point
from twellctl.bench.twell_side import as_loaded, ffn_over_twell, require_kernels
from twellctl.bundle.twell_model import gate_and_up, gated_ffns
from twellctl.errors import TwellError
from twellctl.firing.profiled import LayerProfile, LayerSpeed, Speed
from twellctl.firing.synthetic import FfnWeights

ROUNDS = 5
JUDGED_ROWS = 512
OVER_TWELL = "twell"  # and no dense way, also where that would be faster
BUFFERS = 8  # of [tokens, neurons] that a layer and its forms hold at once, in bytes of bf16


@torch.no_grad()
def time_layers(
    model: nn.Module,
    ids: Tensor,
    layers: Sequence[LayerProfile],
    progress: Callable[..., None] = lambda done, total, what: None,
) -> Speed:
    """Time each FFN of `model` on windows of `ids` `[B, S]`; `layers` is what fires in each.

    All of the windows, or so many, evenly spread, as the memory has room for. Raises `TwellError`
    where the kernels do not run, and for results that are not those of the dense form.
    """
    ids = _that_fit(model, ids)
    dense = dense_ffns(dense_modes(model.device))
    found: list[LayerSpeed] = []

    def measure(ffn: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer = layers[len(found)]
        found.append(_time(_weights(ffn), inputs[0].flatten(0, -2), layer, dense))
        progress(len(found), len(layers), "layers timed")

    hooks = [ffn.register_forward_pre_hook(measure) for ffn in gated_ffns(model)]
    try:
        with fresh_compiler():
            model.base_model(ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Speed(device_name(model.device), ids.numel(), tuple(found))


def _that_fit(model: nn.Module, ids: Tensor) -> Tensor:
    """As many of the windows as there is memory for, at even strides; at least one."""
    per_token = BUFFERS * 2 * (model.config.intermediate_size + model.config.hidden_size)
    room = free_memory(model.device) / (per_token * ids.shape[1])
    count = int(max(1, min(len(ids), room)))
    return ids[torch.arange(count) * len(ids) // count]


def _time(weights: FfnWeights, x: Tensor, layer: LayerProfile, dense: dict[str, Ffn]) -> LayerSpeed:
    loaded = as_loaded(weights)
    over_twell = ffn_over_twell(OVER_TWELL, layer.slots, layer.density)
    if why_not := require_kernels(("auto",), lambda route: over_twell(x[:8], loaded), x.device):
        raise TwellError(f"the kernels do not run here: {why_not}")
    contenders = [
        Contender(name, DENSE, lambda number, ffn=ffn: ffn(x, weights))
        for name, ffn in dense.items()
    ]
    contenders.append(Contender("twell", TWELL, lambda number: over_twell(x, loaded)))
    count = min(len(x), JUDGED_ROWS)
    rows = torch.arange(count, device=x.device) * len(x) // count
    expected = reference(x[rows], weights)
    outcome = hold(
        Course(x.device, ROUNDS, lambda text: None, lambda done, total: None),
        contenders,
        lambda y: {"error": relative_error(y[rows].double(), expected)},
        what=f"an FFN on {len(x)} tokens",
        tokens=len(x),
        num_inputs=1,
    )
    point = Point(len(x), {}, "float64", ("twell",), outcome)
    if point.wrong:
        raise TwellError(f"{point.wrong[0]}: please report it; --no-speed leaves the timing out")
    fastest = point.fastest_dense
    return LayerSpeed(fastest.name, 1000 * fastest.seconds, 1000 * point.twell.seconds)


def _weights(ffn: nn.Module) -> FfnWeights:
    """Those of a stock FFN module, gate and up in one matrix."""
    down, parts = ffn.down_proj, gate_and_up(ffn)
    biases = [part.bias for part in parts if part.bias is not None]
    gate_up = torch.cat([part.weight for part in parts])
    return FfnWeights(gate_up, down.weight, torch.cat(biases) if biases else None, down.bias)
