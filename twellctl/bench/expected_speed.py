"""How much faster a sparse model will be, said before it is trained: measured on random weights.

The random model has the shape of the user's, and neurons fire at the target's density in every
layer, independently of each other (`random_model`). `bench decode` times steps of the engine with
all layers, or with as many as are soon made: the LM head then weighs a little too much. `bench
model` times a prefill with two layers: nearly all of its time is that of its layers, which are
alike, and each more would have to be compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twellctl.bench.decode import CONTEXT, bench_decode
from twellctl.bench.decode_results import DecodeBench
from twellctl.bench.device import bench_device, free_memory
from twellctl.bench.model import bench_model
from twellctl.bench.random_model import Shape, open_shape
from twellctl.bench.results import Bench
from twellctl.bench.settings import DecodeSettings, ModelSettings
from twellctl.errors import TwellError, first_line

ROWS = (1, 16)
PROMPT_TOKENS, NEW_TOKENS = 64, 48
PREFILL_TOKENS, PREFILL_LAYERS, PREFILL_ROUNDS = 2048, 2, 3
LAYER_BYTES = 24 << 30  # of all layers, in bf16, when a model decodes: half a minute's work
NO_GPU = "that takes an NVIDIA GPU"
LAYER_SHARE = 1 / 3  # of the free memory: copies of weights and the cache lie beside them

Decode = Callable[[DecodeSettings], DecodeBench]
Prefill = Callable[[ModelSettings], Bench]


@dataclass(frozen=True)
class Speedup:
    """`over_dense` times as fast as the dense form at `work`, like "16 rows".

    That form is the engine's for rows, and the fastest of PyTorch's for a prefill.
    """

    work: str
    over_dense: float


@dataclass(frozen=True)
class ExpectedSpeed:
    """What was measured on random weights, and in words why the rest was not."""

    speedups: tuple[Speedup, ...]
    missing: tuple[str, ...]


def expected_speed(
    config: str,
    density: float,
    doing: Callable[[str], None] = lambda text: None,
    *,
    decode: Decode = bench_decode,
    prefill: Prefill = bench_model,
    device: str | None = None,
) -> ExpectedSpeed:
    """Of a model of the shape of `config`, a config.json or a folder with one, at `density`.

    What cannot be measured is among `missing`. `decode` and `prefill` measure; `device` as of a
    bench; None takes a GPU.
    """
    if device is None and not torch.cuda.is_available():
        return ExpectedSpeed((), (NO_GPU,))
    try:
        shape = open_shape(config, None, context=CONTEXT)
    except TwellError as error:
        return ExpectedSpeed((), (str(error),))
    how = config, density, shape
    parts = {
        "a random model of this shape, token by token": lambda: _decoding(*how, decode, device),
        "a prefill of two of its layers": lambda: _prefill(*how, prefill, device),
    }
    found: list[Speedup] = []
    missing: list[str] = []
    for what, measure in parts.items():
        doing(f"measuring {what}")
        try:
            found += measure()
        except (TwellError, torch.OutOfMemoryError) as error:
            missing.append(first_line(error))
    return ExpectedSpeed(tuple(found), tuple(missing))


def _decoding(
    config: str, density: float, shape: Shape, decode: Decode, device: str | None
) -> list[Speedup]:
    layers = _layers(shape, free_memory(bench_device(device)))
    settings = DecodeSettings(
        config=config,
        layers=layers,
        densities=(density,),
        batches=ROWS,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        generate=False,
        dense_fp8=False,
        device=device,
    )
    found = decode(settings)
    (model,) = found.models
    if said := model.without_twell or "; ".join(found.wrong):
        raise TwellError(said)
    of = "" if layers == shape.layers else f", {layers} of {shape.layers} layers"
    rows = {point.batch: point.over_dense(point.twell) for point in model.points}
    return [Speedup(f"{B} row{'s' if B > 1 else ''}{of}", ratio) for B, ratio in rows.items()]


def _prefill(
    config: str, density: float, shape: Shape, prefill: Prefill, device: str | None
) -> list[Speedup]:
    seq_len = min(PREFILL_TOKENS, shape.context)
    settings = ModelSettings(
        config=config,
        layers=min(PREFILL_LAYERS, shape.layers),
        density=density,
        tokens=(PREFILL_TOKENS // seq_len * seq_len,),
        seq_len=seq_len,
        rounds=PREFILL_ROUNDS,
        dense_fp8=False,
        device=device,
    )
    found = prefill(settings)
    (point,) = found.points
    if said := point.about["without_kernels"] or "; ".join(found.wrong):
        raise TwellError(said)
    return [Speedup(f"a prefill of {point.tokens} tokens", point.over_dense(point.twell))]


def _layers(shape: Shape, free: float) -> int:
    """As many of the model's layers as are soon made and fit beside their copies; at least one."""
    most = min(LAYER_BYTES, LAYER_SHARE * free)
    return max(1, min(shape.layers, int(most // (2 * shape.layer_weights))))
