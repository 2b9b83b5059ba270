"""What a fit takes: memory, from its shapes; and time, from a moment of products on this device."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twellctl.errors import TwellError
from twellctl.fitting.layer import stride_before_steps
from twellctl.fitting.least_squares import COMPUTED, tf32
from twellctl.fitting.rounding_plan import Rounding, RoundingRates
from twellctl.fitting.settings import (
    Fit,
    least_tokens,
    quickened,
    rank_of_map,
    windows_held_out,
)
from twellctl.fitting.source import open_source
from twellctl.fitting.walk import LOGIT_TOKENS
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import default_device, gpu_memory, stored_dtypes
from twellctl.settings import chosen

# over the time of products: on an H200 (7 layers of 1.5B, a million tokens), on two cores (0.5B and
# 29M, least squares alone on 23,552 and 40,000 tokens)
OVERHEAD = {"cuda": 2.2, "cpu": 1.35}
DOUBLE = {"cuda": 8, "cpu": 2}  # how much longer products in float64 take
LOGITS = 5  # tensors of their size that are held at the end
PROBE = {"cuda": 8192, "cpu": 2048}  # rows and columns of the products that are timed
TIMED = 3  # so often
TRIED = 1.1  # of the memory that is free, what a fit may be thought to take: the count is not exact


@dataclass(frozen=True)
class Shape:
    """What a fit depends on of a model.

    `num_weights` are those of one layer, `other_weights` those outside of the layers. `state_bytes`
    are those of a number of a hidden state.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_weights: int
    other_weights: int
    vocab_size: int
    state_bytes: int = 2


@dataclass(frozen=True)
class Rates:
    """What a device does: operations a second of products in bf16, and in TF32; and rounding, if
    a fit does that."""

    half: float
    single: float
    rounding: RoundingRates | None = None


@dataclass(frozen=True)
class Plan:
    """Time, and memory of the device and the host at most; `bits`, if layers are rounded to so
    many."""

    tokens: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    map_neurons: int
    seconds: float
    bytes: int
    host_bytes: int
    device: str
    bits: int | None = None
    no_room: str | None = None  # why it does not fit here, and what would


def plan(model: str | Path, *, revision: str | None = None, **settings: Any) -> Plan:
    """Of fitting `model` with `settings` on the device that this process would take.

    No text is read: a fit takes `tokens` of it.
    """
    fit = chosen(Fit, settings)
    checkpoint = open_source(model, revision, fit)
    return plan_of(checkpoint, quickened(fit, checkpoint.ffn))


def plan_of(checkpoint: Checkpoint, fit: Fit) -> Plan:
    """The `Plan` of fitting an open `checkpoint` on the device that this process would take."""
    shape = shape_of(checkpoint)
    device = default_device()
    found = planned(shape, fit, device, measured(device, rounds=bool(fit.bits)))
    return replace(found, no_room=no_room(shape, fit))


def require_room(checkpoint: Checkpoint, fit: Fit, processes: int = 1) -> None:
    """`TwellError` if this GPU has no room for its share of the text."""
    if why := no_room(shape_of(checkpoint), fit, processes):
        raise TwellError(why)


def shape_of(checkpoint: Checkpoint) -> Shape:
    """The `Shape` of a model with gated FFNs."""
    ffn = checkpoint.ffn
    sizes = {name: math.prod(t.shape) for name, t in checkpoint.tensors.items()}
    prefix = f"{checkpoint.layer_name(0)}."
    in_layer = sum(size for name, size in sizes.items() if name.startswith(prefix))
    others = sum(sizes.values()) - ffn.num_layers * in_layer
    vocabulary = checkpoint.config.get("vocab_size") or 0
    dimensions = ffn.num_layers, ffn.hidden_size, ffn.intermediate_size
    wide = stored_dtypes(checkpoint)(checkpoint.ffn_weights(0)[0]) == torch.float32
    return Shape(*dimensions, in_layer, others, vocabulary, 4 if wide else 2)


def no_room(shape: Shape, fit: Fit, processes: int = 1) -> str | None:
    """Why this GPU has no room for its share of the text, and for what it has, in a line."""
    device = default_device()
    if device.type != "cuda":
        return None
    needed, free = _bytes_of(shape, fit, True, processes), gpu_memory(device)[0]
    if needed <= TRIED * free:
        return None
    words = f"a fit on {fit.tokens} tokens takes {needed / 2**30:.1f} GiB of this GPU's memory, "
    words += f"{free / 2**30:.1f} GiB are free: "
    a_token = _token_bytes(shape, True)
    over = math.ceil((needed - free) * processes / a_token)
    most = (fit.tokens - over) // 10_000 * 10_000
    does = most >= least_tokens(shape.hidden_size, shape.intermediate_size)
    return words + (f"give --tokens {most}, or more GPUs" if does else "take a larger one")


def _bytes_of(shape: Shape, fit: Fit, on_gpu: bool, processes: int = 1) -> int:
    """What a fit takes of a GPU's memory, or on a CPU of the host's, the model not counted."""
    K, N = shape.hidden_size, shape.intermediate_size
    P, T = N + K, _num_tokens(fit)
    states = -(-T // processes) * _token_bytes(shape, on_gpu)
    solving = 0 if fit.keep_activation else P * P * (2 * 4 + 2 * 8)
    if fit.bits:
        solving = max(solving, _rounding(shape, fit).bytes())
    solving += 3 * 8 * P * K
    layer = 2 * 4 * shape.num_weights
    if not on_gpu:
        return int(states + layer + solving)
    stepping = 0
    if fit.steps and not fit.keep_activation:
        stepping = 4 * (4 * (3 * N * K + K * K) + (5 * N * K if fit.bits else 0))
    logits = LOGITS * 4 * LOGIT_TOKENS * shape.vocab_size
    others = 2 * shape.other_weights
    return int(states + others + max(layer + max(solving, stepping), logits))


def _token_bytes(shape: Shape, on_gpu: bool) -> int:
    """Of the states of both models, and what a layer's FFN reads."""
    return (2 * shape.state_bytes + (2 if on_gpu else 4)) * shape.hidden_size


def planned(shape: Shape, fit: Fit, device: torch.device, rates: Rates) -> Plan:
    """The `Plan` on a device that does so much."""
    on_gpu = device.type == "cuda"
    forward, stepped, sums, solves, seconds = 0.0, 0.0, 0.0, 0.0, 0.0
    if fit.keep_activation:
        forward = 4 * _num_tokens(fit) * shape.num_weights
    else:
        forward, stepped, sums, solves = _relu_products(shape, fit)
    if fit.bits and rates.rounding:
        rounding = _rounding(shape, fit)
        more = rounding.products()
        forward, sums, solves = forward + more[0], sums + more[1], solves + more[2]
        seconds = rounding.seconds(rates.rounding)
    sums += DOUBLE[device.type] * solves
    products = (forward + stepped) / rates.half + sums / rates.single
    taken, wide = _bytes_of(shape, fit, on_gpu), 2 if on_gpu else 4
    host = wide * (shape.num_layers * shape.num_weights + shape.other_weights)
    return Plan(
        tokens=fit.tokens,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        map_neurons=rank_of_map(fit, shape.hidden_size, shape.intermediate_size),
        seconds=shape.num_layers * (OVERHEAD[device.type] * products + seconds),
        bytes=taken,
        host_bytes=host if on_gpu else host + taken,
        device=torch.cuda.get_device_name(device) if on_gpu else "the CPU",
        bits=fit.bits,
    )


def _relu_products(shape: Shape, fit: Fit) -> tuple[float, float, float, float]:
    """Operations of a layer: of forwards, of steps, of sums, and in float64."""
    K, N, T = shape.hidden_size, shape.intermediate_size, _num_tokens(fit)
    P, passes = N + K, 2 if fit.steps else 1
    forward = 2 * T * (2 * shape.num_weights + 6 * N * K)
    stepped = 6 * fit.steps * fit.step_tokens * (3 * N * K + K * K)
    summed = T + (T / stride_before_steps(T, N, K) if fit.steps else 0)
    sums = 2 * summed * P * (COMPUTED * P + 2 * K)
    return forward, stepped, sums, 2 * passes * (P**3 / 3 + 2 * P * P * K)


def _num_tokens(fit: Fit) -> int:
    return fit.tokens + windows_held_out(fit) * fit.seq_len


def _rounding(shape: Shape, fit: Fit) -> Rounding:
    K, N = shape.hidden_size, shape.intermediate_size
    R = rank_of_map(fit, K, N)
    return Rounding(fit, K, N, R, shape.num_weights, _num_tokens(fit))


def measured(device: torch.device, rounds: bool) -> Rates:
    """Those of `device`, by a moment of work; with rounding if a fit `rounds`."""
    size, half = PROBE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = Rates(_rate(device, half, size), _rate(device, torch.float32, size))
    return replace(rates, rounding=_rounding_rates(device)) if rounds else rates


@cache
def _rounding_rates(device: torch.device) -> RoundingRates:
    return RoundingRates.measured(device, lambda run: _seconds(run, device.type == "cuda"))


@cache
def _rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations a second of a product of that size; float32 as TF32 where there is such."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    with tf32():
        return 2 * size**3 / _seconds(lambda: a @ a, device.type == "cuda")


def _seconds(run: Callable[[], Tensor], on_gpu: bool) -> float:
    """The median time of a call, after one that is not counted."""
    run()
    found = []
    for _ in range(TIMED):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)
