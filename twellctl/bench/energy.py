"""Energy of a call, by the counter of the whole GPU that NVML reads (since Volta, in millijoules).

The counter moves some ten times a second. So a thread watches for the moments at which it does
while the device is kept busy, and the power between the first and the last of them counts.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import torch

from twellctl.bench.timing import Timer
from twellctl.errors import TwellError

WARM_SECONDS = 0.3
PASSES = 2  # over all candidates, the second one backwards
_POLL_SECONDS = 0.002
_NEED = "leave out --energy"

Counter = Callable[[], int]  # millijoules


def energy_by_turns(
    timers: dict[str, Timer], counter: Counter, seconds: float, progress: Callable[[int, int], None]
) -> dict[str, float]:
    """Joules a call of each timer, measured while it runs for at least `seconds` in all."""
    joules = dict.fromkeys(timers, 0.0)
    names = list(timers)
    for turn in range(PASSES):
        for done, name in enumerate(names if turn % 2 == 0 else reversed(names), 1):
            joules[name] += joules_per_call(timers[name], counter, seconds / PASSES) / PASSES
            progress(turn * len(names) + done, PASSES * len(names))
    return joules


def joules_per_call(timer: Timer, counter: Counter, seconds: float) -> float:
    """Mean power while the timer's call is repeated for `seconds`, times the seconds of one."""
    timer.run(WARM_SECONDS)
    with _watched(counter) as ticks:
        took, calls = timer.run(seconds)
    if len(ticks) < 3:
        raise TwellError(
            f"the GPU's energy counter moved {len(ticks)} times in {took:.1f} s, too few to "
            f"measure by: give a larger --energy-seconds, or {_NEED}"
        )
    (first, low), (last, high) = ticks[0], ticks[-1]
    return (high - low) / 1000 / (last - first) * took / calls


def open_counter(device: torch.device) -> Counter:
    """The energy counter of a CUDA device; `TwellError` if there is none."""
    if device.type != "cuda":
        raise TwellError(f"--energy reads a GPU's own counter, there is none on the CPU: {_NEED}")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        counter = _by_pynvml(uuid)
    except ImportError:
        counter = _by_library(uuid)
    counter()
    return counter


@contextlib.contextmanager
def _watched(counter: Counter) -> Iterator[list[tuple[float, int]]]:
    """(time, millijoules) each time that the counter moved while the block ran."""
    ticks: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        last = counter()
        while not stop.wait(_POLL_SECONDS):
            if (now := counter()) != last:
                ticks.append((time.perf_counter(), now))
                last = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ticks
    finally:
        stop.set()
        thread.join()


def _by_pynvml(uuid: str) -> Counter:
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        raise TwellError(f"NVML has no energy counter of this GPU ({error}): {_NEED}") from error
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def _by_library(uuid: str) -> Counter:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise TwellError(f"NVML (libnvidia-ml.so.1) is not here: {_NEED}") from error
    nvml.nvmlErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: object) -> None:
        if status := getattr(nvml, name)(*arguments):
            reason = nvml.nvmlErrorString(status).decode()
            raise TwellError(f"NVML has no energy counter of this GPU ({reason}): {_NEED}")

    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))

    def counter() -> int:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(energy))
        return energy.value

    return counter
