"""Which FFNs of a model in training run over TwELL: measured layer by layer, as density moves.

All begin densely. Once less than `BELOW` of a layer fires, a contest goes before its next forward
pass: forward and backward of the layer on the input at hand, dense and over TwELL by turns, apart
from the step's own graph. Where TwELL wins it holds until density has risen by `STEP`, or by as
much as it was faster; where it loses it may try again at `1 / STEP` of the density, or, if that
is too little to win by, at the square of it. Only a contest waits for the GPU.

The kernels take the host longer than dense products do. Where the host waits for the GPU in the
end, as in most training, that costs nothing, and the GPU's time decides; else the longer of both.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_reasons import reasons_said, takes_hopper_kernels
from twellctl.bundle.twell_route import requested

BELOW = 0.03  # density
STEP = 1.3  # of densities
FASTER = 0.97  # the share of dense's time below which TwELL is taken
SLOWER = 1.02  # the share of it up to which TwELL is kept
TURNS = 3
DENSE, TWELL = "dense", "twell"
_SLEEP_CLOCKS = 10_000_000  # some 5 ms, in which the host gets ahead of the GPU


@dataclass(frozen=True)
class Times:
    """Milliseconds that one way takes the GPU, and the host to launch it."""

    gpu: float
    host: float

    def felt(self, hidden: bool) -> float:
        """What a step feels of it; `hidden`: the host has the time."""
        return self.gpu if hidden else max(self.gpu, self.host)


@dataclass
class _Layer:
    """One FFN, and where its next contest is: below `again`, or over TwELL above `up_to`."""

    number: int
    ffn: nn.Module
    again: float = math.inf
    up_to: float = 0.0

    def is_due(self, density: float) -> bool:
        """Whether the last contest tells nothing of `density`."""
        if density >= BELOW or self.ffn.twell_meter.ask is not None:
            return False
        if self.ffn.twell_meter.route == TWELL:
            return density > self.up_to
        return density < self.again


class LayerRoutes:
    """Tells FFNs, which have an `FfnMeter`, their route; `note` is told of each that changes."""

    def __init__(self, ffns: list[nn.Module], note: Callable[[str], None]):
        self.layers = [_Layer(number, ffn) for number, ffn in enumerate(ffns)]
        self.note = note
        self.is_closed: bool | None = None  # not known before the first step
        self._spare = 0.0

    def _close(self, why: str) -> None:
        """No contest any more."""
        self.is_closed = True
        self.note(why)

    def update(self, densities: list[float], spare: float) -> None:
        """After a step: what fired in each layer, and for how many ms a pass waited for the GPU."""
        self._spare = spare
        if self.is_closed is None:
            self.is_closed = False
            if said := _why_closed(next(self.layers[0].ffn.parameters()).device):
                self._close(said)
        if self.is_closed:
            return
        for layer, density in zip(self.layers, densities, strict=True):
            meter = layer.ffn.twell_meter
            if density >= BELOW and meter.route == TWELL:
                meter.route, layer.again = DENSE, BELOW / STEP
                self.note(f"layer {layer.number} is dense again, at {density:.2%} density")
            elif layer.is_due(density):
                meter.ask = functools.partial(self._hold, layer, density)

    def _hold(self, layer: _Layer, density: float, ffn: nn.Module, x: Tensor) -> None:
        """The contest that goes before a forward pass."""
        meter, layer.again = ffn.twell_meter, density / STEP
        was, meter.route = meter.route, DENSE
        if self.is_closed:
            return
        try:
            times = contest(ffn, x)
        except torch.OutOfMemoryError:
            self.note(f"layer {layer.number} is dense: no memory to try TwELL")
            return
        except NoKernels as error:
            self._close(f"FFNs are trained densely: {error}")
            return
        finally:
            meter.route = DENSE
        more = max(0.0, times[TWELL].host - times[DENSE].host)
        felt = {route: both.felt(hidden=more <= self._spare) for route, both in times.items()}
        ratio = felt[DENSE] / felt[TWELL]
        layer.up_to = density * min(STEP, SLOWER * ratio)
        # time goes in proportion to density, if at all; that of heavy rows by more than that
        layer.again = density / STEP if FASTER * ratio > 1 / STEP else density / STEP**2
        if FASTER * ratio > 1:
            self._spare -= more
            meter.route = TWELL
        if (meter.route == TWELL) != (was == TWELL):
            over = "over TwELL" if meter.route == TWELL else "dense again"
            self.note(
                f"layer {layer.number} is {over}, at {density:.2%} density: {felt[TWELL]:.2f} ms "
                f"against {felt[DENSE]:.2f} dense, forward and backward"
            )


class NoKernels(Exception):
    """The kernels do not take an FFN; the text says why."""


def contest(ffn: nn.Module, x: Tensor) -> dict[str, Times]:
    """What forward and backward of `ffn` on `x` take, by route, medians of `TURNS`.

    Parameters and the state of random numbers stay as they are. Raises `NoKernels`.
    """
    device = x.device.type
    given = x.detach().requires_grad_()
    runs = {route: functools.partial(_both_passes, ffn, given, route) for route in (TWELL, DENSE)}
    samples: dict[str, list[Times]] = {route: [] for route in runs}
    # a checkpoint's hooks are not to see these tensors, and no cast is to be kept
    apart = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cast = torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)
    with torch.enable_grad(), apart, cast:
        with reasons_said() as said:
            runs[TWELL]()
        if said:
            raise NoKernels(said[0].partition(": ")[2])
        runs[DENSE]()
        for _ in range(TURNS):
            for route, run in runs.items():
                samples[route].append(_timed(run))
    return {
        route: Times(*(statistics.median(getattr(t, name) for t in of) for name in ("gpu", "host")))
        for route, of in samples.items()
    }


def _both_passes(ffn: nn.Module, x: Tensor, route: str) -> None:
    """Forward and backward by `route`, by copies of the parameters that share their memory."""
    parameters = {
        name: parameter.detach().requires_grad_(parameter.requires_grad)
        for name, parameter in ffn.named_parameters()
    }
    ffn.twell_meter.route = route
    y = torch.func.functional_call(ffn, parameters, (x,))
    leaves = [x, *(p for p in parameters.values() if p.requires_grad)]
    torch.autograd.grad(y, leaves, x.detach().to(y.dtype))


def _timed(run: Callable[[], None]) -> Times:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CLOCKS)
    start.record()
    begin = time.perf_counter()
    run()
    host = time.perf_counter() - begin
    end.record()
    end.synchronize()
    return Times(start.elapsed_time(end), 1000 * host)


def _why_closed(device: torch.device) -> str | None:
    """None if contests make sense on `device`, else what is to be said."""
    if (route := requested("auto")) != "auto":
        return f"TWELL_ROUTE={route} decides how FFNs are trained"
    if device.type != "cuda" or not takes_hopper_kernels(device.index):
        return "FFNs are trained densely: no Hopper GPU (compute capability 9.0) for the kernels"
    return None
