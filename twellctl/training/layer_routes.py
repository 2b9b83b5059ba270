"""Which FFNs of a model in training run over TwELL: measured in its steps, as density moves.

All begin densely. Once less than `BELOW` of a layer fires, some of its passes, forward and
backward, are timed where they are, by events on the GPU's stream: first as the layer goes, then the
other way. Where TwELL wins it holds until density has risen by `STEP`, or by as much as it was
faster; where it loses it may try again at `1 / STEP` of the density, or, if that is too little to
win by, at the square of it.

So what counts is what a step feels, the host's time included where the GPU waits for it. Nothing
waits for the GPU, no pass is computed twice, nothing is compiled but the kernels, which is done
beside the first steps. All that a contest costs is by how much TwELL is slower in a few passes; the
next one may begin when that is no more than `SHARE` of the run.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_log import reasons_said
from twellctl.bundle.twell_reasons import takes_hopper_kernels, why_no_kernels, why_not_loaded
from twellctl.bundle.twell_route import requested
from twellctl.bundle.twell_train import FfnMeter
from twellctl.bundle.twell_training import GRAD_KERNELS

BELOW = 0.03  # density
STEP = 1.3  # of densities
FASTER = 0.97  # the share of dense's time below which TwELL is taken
SLOWER = 1.02  # the share of it up to which TwELL is kept
LOST = 1.25  # the share of it above which one pass is enough
WARM_UPS, TURNS = 1, 3  # passes of either way: that do not count, and that do
SHARE = 0.005  # of the run's time
DENSE, TWELL = "dense", "twell"


class Passes:
    """Times some passes of an FFN, forward and backward."""

    def __init__(self):
        self._begun: torch.cuda.Event | None = None  # of the last forward pass
        self._events: list[tuple[torch.cuda.Event, ...]] = []

    def watch(self, x: Tensor) -> Callable[[Tensor], None]:
        """Before a forward pass on `x`; what it returns is told y."""
        forward, backward = (_event(), _event()), (_event(), _event())
        begun = self._begun = forward[0]
        begun.record()

        def end(y: Tensor) -> None:
            forward[1].record()
            if x.requires_grad and y.requires_grad:
                y.register_hook(lambda grad: backward[0].record())
                x.register_hook(back)

        def back(grad: Tensor) -> None:  # x has its whole gradient, and the weights have theirs
            backward[1].record()
            # where a checkpoint has computed the whole layer again, only this FFN's part counts
            again = self._begun is not begun
            start = self._begun if again else backward[0]
            self._events.append((*forward, start, backward[1]))

        return end

    def milliseconds(self) -> list[float]:
        """Of each pass that has been forward and backward."""
        if self._events:
            self._events[-1][3].synchronize()  # after a step there is nothing to wait for
        return [a.elapsed_time(b) + c.elapsed_time(d) for a, b, c, d in self._events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class _Layer:
    """One FFN, and when it is to be judged: below `again`, or over TwELL above `up_to`."""

    def __init__(self, number: int, meter: FfnMeter):
        self.number, self.meter = number, meter
        self.again, self.up_to = BELOW, 0.0
        self.contest: dict[str, Passes] = {}  # by way, in the order in which they are timed
        self.density = 0.0  # at its begin

    @property
    def over_twell(self) -> bool:
        return self.meter.route == TWELL

    def is_due(self, density: float) -> bool:
        """Whether the last contest tells nothing of `density`."""
        if density >= BELOW:
            return False
        return density > self.up_to if self.over_twell else density < self.again

    def begin(self, density: float) -> None:
        """A contest: the way that it goes comes first."""
        self.density = density
        self._time(TWELL if self.over_twell else DENSE)

    def _time(self, way: str) -> None:
        self.contest[way] = Passes()
        self.meter.route, self.meter.watch = way, self.contest[way].watch

    def end(self, way: str) -> None:
        """No contest, and this way from now on."""
        self.contest = {}
        self.meter.route, self.meter.watch = way, None

    def go_on(self) -> dict[str, list[float]] | None:
        """After a step of a contest: the times of both ways, as soon as they decide it."""
        times = {way: passes.milliseconds() for way, passes in self.contest.items()}
        if len(times) == 2 and _is_lost(times):
            return times
        if any(len(of_way) < WARM_UPS + TURNS for of_way in times.values()):
            return None
        if len(times) == 1:
            self._time(DENSE if TWELL in times else TWELL)
            return None
        return times


def _median(times: list[float]) -> float:
    return statistics.median(times[WARM_UPS:])


def _is_lost(times: dict[str, list[float]]) -> bool:
    """Whether TwELL is so slow that it need not be timed to the end."""
    return all(len(t) > WARM_UPS for t in times.values()) and (
        _median(times[TWELL]) > LOST * _median(times[DENSE])
    )


class LayerRoutes:
    """Tells FFNs, which have an `FfnMeter`, their route; `note` is told of each that changes."""

    def __init__(self, ffns: list[nn.Module], note: Callable[[str], None]):
        self.ffns = ffns
        self.layers = [_Layer(number, ffn.twell_meter) for number, ffn in enumerate(ffns)]
        self.note = note
        self.is_closed: bool | None = None  # not known before the first step
        self._loading: threading.Thread | None = None
        self._began = self._lost = 0.0  # seconds
        self._ears, self._heard = contextlib.ExitStack(), []  # open in steps that try the kernels

    def update(self, densities: list[float]) -> None:
        """After a step that has ended on the GPU: what fired in each layer."""
        if self.is_closed is None:
            self._open()
        if self.is_closed or (self._loading is not None and self._loading.is_alive()):
            return
        self._ears.close()
        if self._heard:
            self._close(f"FFNs are trained densely: {self._heard[0].partition(': ')[2]}")
            return
        may_begin = self._lost <= SHARE * (time.monotonic() - self._began)
        for layer, density in zip(self.layers, densities, strict=True):
            if density >= BELOW and layer.over_twell:
                layer.end(DENSE)
                layer.again = BELOW / STEP
                self.note(f"layer {layer.number} is dense again, at {density:.2%} density")
            elif layer.contest:
                self._go_on(layer)
            elif may_begin and layer.is_due(density):
                layer.begin(density)
        if any(TWELL in layer.contest for layer in self.layers):
            self._heard = self._ears.enter_context(reasons_said())

    def _open(self) -> None:
        self.is_closed, self._began = False, time.monotonic()
        device = next(self.ffns[0].parameters()).device
        if said := _why_closed(device):
            self._close(said)
        elif device.type == "cuda":
            given = self.ffns[0].twell_sources, device.index
            self._loading = threading.Thread(target=_load, args=given, daemon=True)
            self._loading.start()

    def _close(self, why: str) -> None:
        """No contest any more."""
        self.is_closed = True
        self.note(why)
        for layer in self.layers:
            if layer.contest:
                layer.end(DENSE)

    def _go_on(self, layer: _Layer) -> None:
        began_with = next(iter(layer.contest))
        times = layer.go_on()
        if times is None:
            return
        dense, twell = _median(times[DENSE]), _median(times[TWELL])
        ratio, density = dense / twell, layer.density
        layer.end(TWELL if FASTER * ratio > 1 else DENSE)
        self._lost += max(0.0, twell - dense) * len(times[TWELL]) / 1000
        layer.up_to = density * min(STEP, SLOWER * ratio)
        # time goes in proportion to density, if at all; that of heavy rows by more than that
        layer.again = density / STEP if FASTER * ratio > 1 / STEP else density / STEP**2
        if layer.meter.route != began_with:
            over = "over TwELL" if layer.over_twell else "dense again"
            self.note(
                f"layer {layer.number} is {over}, at {density:.2%} density: {twell:.2f} ms "
                f"against {dense:.2f} dense, forward and backward"
            )


def _load(sources: str, index: int) -> None:
    """Compile and load the kernels; what goes wrong, the first pass over them will say."""
    why_no_kernels(sources, index)
    why_not_loaded(sources, index, GRAD_KERNELS)


def _why_closed(device: torch.device) -> str | None:
    """None if contests make sense on `device`, else what is to be said."""
    if (route := requested("auto")) != "auto":
        return f"TWELL_ROUTE={route} decides how FFNs are trained"
    if device.type != "cuda" or not takes_hopper_kernels(device.index):
        return "FFNs are trained densely: no Hopper GPU (compute capability 9.0) for the kernels"
    return None
