"""Seconds a call takes, of several candidates by turns in one run.

Fewer than 8192 tokens: a CUDA graph of one call for each of the rotated inputs, replayed, so that
what the host needs for a launch does not count. From there on: plain calls between CUDA events. On
the CPU: plain calls by the wall clock. Each round takes every candidate once, every other round in
reverse, so that a drift of clocks and temperature meets all alike. Before each sample a candidate
runs untimed for twice as long: a product at full power lowers clocks, which shall slow itself and
not the next one.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from twellctl.here.captures import without_collection

GRAPHS_BELOW = 8192
SAMPLE_SECONDS = 0.03
LONG_SECONDS = 0.2  # of a call so long that it needs no other before it
WARM_UPS = 2
UNTIMED_SAMPLES = 2  # before each one that is timed
GRAPHS, PLAIN, WALL = "CUDA graph replays", "plain calls", "wall clock"

Call = Callable[[int], Any]  # runs once, with the inputs of that number


class Timer:
    """A warmed-up call; `launch` runs it `calls` times without waiting for the device.

    A CUDA `device` must be the current one.
    """

    def __init__(self, call: Call, num_inputs: int, device: torch.device, *, graphed: bool):
        self._cuda = device.type == "cuda"
        for number in range(WARM_UPS * num_inputs):
            call(number % num_inputs)
        if self._cuda:
            torch.cuda.synchronize(device)
        if self._cuda and graphed:
            self.how, self.calls = GRAPHS, num_inputs
            self.launch = _captured(call, num_inputs).replay
        else:
            self.how, self.calls = PLAIN if self._cuda else WALL, 1
            numbers = itertools.cycle(range(num_inputs))
            self.launch = lambda: call(next(numbers))
        self._repeats = 1
        self._estimate = self._measure()
        self._repeats = max(1, math.ceil(SAMPLE_SECONDS / max(self._estimate, 1e-7)))

    def seconds(self) -> float:
        """One sample: the mean time of a call over some thirtieth of a second, or one long call."""
        if self._estimate < LONG_SECONDS:
            for _ in range(UNTIMED_SAMPLES * self._repeats):
                self.launch()
        return self._measure() / self.calls

    def _measure(self) -> float:
        """Seconds of a launch, the mean of `_repeats`."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(self._repeats):
                self.launch()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000 / self._repeats
        begin = time.perf_counter()
        for _ in range(self._repeats):
            self.launch()
        return (time.perf_counter() - begin) / self._repeats


def by_turns(
    timers: dict[str, Timer], rounds: int, progress: Callable[[int, int], None]
) -> dict[str, list[float]]:
    """Seconds a call of each timer, one sample a round; `progress(done, total)` counts samples."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for round_idx in range(rounds):
        names = list(timers) if round_idx % 2 == 0 else list(reversed(timers))
        for name in names:
            samples[name].append(timers[name].seconds())
            progress(sum(map(len, samples.values())), rounds * len(timers))
    return samples


def _captured(call: Call, num_inputs: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(num_inputs):
            call(number)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with without_collection(), torch.cuda.graph(graph):
        for number in range(num_inputs):
            call(number)
    return graph
