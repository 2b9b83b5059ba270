"""What a fit would take, from its shapes and a moment of products on this device."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twellctl.errors import UsageError
from twellctl.fitting.fit import LOGIT_TOKENS
from twellctl.fitting.layer import stride_before_steps
from twellctl.fitting.least_squares import COMPUTED, tf32
from twellctl.fitting.settings import Fit, open_source, rank_of_map, windows_held_out
from twellctl.models.loading import default_device
from twellctl.settings import chosen

OVERHEAD = 2.2  # over the time of products, on an H200 (7 layers of 1.5B, a million tokens)
LOGITS = 5  # tensors of their size that are held at the end
PROBE = {"cuda": 8192, "cpu": 1024}  # rows and columns of the products that are timed


@dataclass(frozen=True)
class Shape:
    """Of a model: what a fit depends on. `num_weights` of one layer, `other_weights` beside."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_weights: int
    other_weights: int
    vocab_size: int


@dataclass(frozen=True)
class Plan:
    """Time, and memory of the device and the host at most."""

    tokens: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    map_neurons: int
    seconds: float
    bytes: int
    host_bytes: int
    device: str


def plan(model: str | Path, *, revision: str | None = None, **settings: Any) -> Plan:
    """Of fitting `model` with `settings` on the device that this process would take."""
    fit = chosen(Fit, settings)
    if not fit.data:
        raise UsageError("nothing is fitted without text: give --data FILE")
    checkpoint = open_source(model, revision, fit)
    ffn = checkpoint.ffn
    sizes = {name: math.prod(t.shape) for name, t in checkpoint.tensors.items()}
    prefix = checkpoint.ffn_weights(0)[0].rpartition(".")[0].rpartition(".")[0]
    in_layer = sum(size for name, size in sizes.items() if name.startswith(f"{prefix}."))
    others = sum(sizes.values()) - ffn.num_layers * in_layer
    vocabulary = checkpoint.config.get("vocab_size") or 0
    dimensions = ffn.num_layers, ffn.hidden_size, ffn.intermediate_size
    shape = Shape(*dimensions, in_layer, others, vocabulary)
    device = default_device()
    rates = _rate(device, torch.bfloat16), _rate(device, torch.float32)
    return planned(shape, fit, device, rates)


def planned(shape: Shape, fit: Fit, device: torch.device, rates: tuple[float, float]) -> Plan:
    """By the operations a second of products in bf16 and in TF32."""
    T, K, N = (
        fit.tokens + windows_held_out(fit) * fit.seq_len,
        shape.hidden_size,
        shape.intermediate_size,
    )
    P, rank = N + K, rank_of_map(fit, K, N)
    on_gpu = device.type == "cuda"
    forward = 2 * T * (2 * shape.num_weights + 6 * N * K)
    in_steps = 6 * fit.steps * fit.step_tokens * (3 * N * K + K * K)
    passes = 2 if fit.steps else 1
    summed = T + (T / stride_before_steps(T, N, K) if fit.steps else 0)
    sums = 2 * summed * P * (COMPUTED * P + 2 * K)
    solves = 2 * passes * (P**3 / 3 + 2 * P * P * K)
    seconds = (forward + in_steps) / rates[0] + (sums + 8 * solves) / rates[1]
    states = 2 * 4 * T * K + (2 if on_gpu else 4) * T * K
    solving = P * P * (2 * 4 + 2 * 8) + 3 * 8 * P * K
    stepping = 4 * 4 * (3 * N * K + K * K) if fit.steps else 0
    layer = 2 * 4 * shape.num_weights
    logits = LOGITS * 4 * LOGIT_TOKENS * shape.vocab_size
    others = 2 * shape.other_weights
    wide = 2 if on_gpu else 4
    host = wide * (shape.num_layers * shape.num_weights + shape.other_weights)
    return Plan(
        tokens=fit.tokens,
        num_layers=shape.num_layers,
        hidden_size=K,
        intermediate_size=N,
        map_neurons=rank,
        seconds=OVERHEAD * shape.num_layers * seconds,
        bytes=int(states + others + max(layer + max(solving, stepping), logits)),
        host_bytes=host if on_gpu else host + int(states + layer + solving),
        device=torch.cuda.get_device_name(device) if on_gpu else "the CPU",
    )


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product; float32 as TF32 where there is such."""
    on_gpu = device.type == "cuda"
    size = PROBE[device.type]
    a = torch.randn(size, size, device=device, dtype=dtype if on_gpu else torch.float32)
    with tf32():
        return 2 * size**3 / _seconds(lambda: a @ a, on_gpu)


def _seconds(run: Callable[[], Tensor], on_gpu: bool) -> float:
    run()
    found = []
    for _ in range(3):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)
