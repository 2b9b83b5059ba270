"""twellctl bench model: the body of a whole model over TwELL against the stock class.

Both sides share their weights, in bf16, and differ in their FFNs only. What is timed is a prefill:
token ids in, last hidden states out, no LM head and no cache.

Attention is PyTorch's SDPA with `is_causal` on every side. The stock code would make a whole mask
when it is compiled, which slows the compiled dense side most, so the mask is left out for all.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from twellctl.bench import contest
from twellctl.bench.device import bench_device, device_facts
from twellctl.bench.results import DENSE, TWELL, Bench, Point
from twellctl.bench.settings import ModelSettings
from twellctl.bench.subject import open_subject
from twellctl.bench.twell_side import twell_twin, ways_taken, why_no_kernels
from twellctl.bundle.twell_config import TILE
from twellctl.firing.counts import count_layers
from twellctl.firing.profiled import LayerProfile
from twellctl.models.loading import without_mask

REFERENCE_TOKENS = 512
COUNTED_TOKENS = 32768  # about so many, in whole sequences


def bench_model(
    settings: ModelSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Bench:
    """Measure each token count; `note` receives what comes. Raises `TwellError`."""
    settings.check()
    course = contest.Course(bench_device(settings.device), settings.rounds, note, progress)
    with torch.no_grad():
        subject = open_subject(settings, settings.density, course.device, note)
        ids = {tokens: subject.windows(*settings.shape(tokens)) for tokens in settings.tokens}
        body = subject.models.bf16.base_model
        without_mask(body, settings.seq_len)
        note("counting what fires")
        # whole sequences: the first tokens of each attend to so few that they become alike
        length = ids[max(ids)].shape[1] if subject.checkpoint else settings.seq_len
        counted = subject.windows(max(1, COUNTED_TOKENS // length), length)
        twell: dict[str, Any] = subject.checkpoint.twell if subject.checkpoint else {"tile": TILE}
        measured = count_layers(body, counted, twell["tile"])
        if subject.checkpoint is None:
            twell["slots"] = [layer.slots for layer in measured]
            twell["densities"] = [layer.density for layer in measured]
        without_kernels = why_no_kernels(
            lambda: last_hidden(twell_twin(body, twell, "twell"), counted[:1, :8]), course.device
        )
        about = about_layers(measured, twell["slots"]) | {"without_kernels": without_kernels}
        points = []
        for tokens in settings.tokens:
            shape = dict(zip(("batch", "seq_len"), settings.shape(tokens), strict=True))
            points.append(_point(body, twell, shape | about, ids[tokens], course))
    return Bench(
        facts=device_facts(course.device) | {"model": subject.described},
        settings=asdict(settings),
        what=subject.called,
        points=tuple(points),
    )


def last_hidden(body: nn.Module, ids: Tensor) -> Tensor:
    """`[B, S]` to `[B, S, K]`."""
    return body(input_ids=ids, use_cache=False).last_hidden_state


def about_layers(measured: list[LayerProfile], slots: list[int]) -> dict[str, Any]:
    """Of the JSON: what fires in the layers."""
    keys = ("density", "nnz_mean", "nnz_p99", "nnz_max", "dead")
    rows = [
        {key: getattr(layer, key) for key in keys} | {"slots": most}
        for layer, most in zip(measured, slots, strict=True)
    ]
    return {
        "density": sum(layer.density for layer in measured) / len(measured),
        "density_first_layer": measured[0].density,
        "density_last_layer": measured[-1].density,
        "layers": rows,
    }


def _point(
    body: nn.Module,
    twell: Mapping[str, Any],
    about: dict[str, Any],
    ids: Tensor,
    course: contest.Course,
) -> Point:
    tokens, modes = ids.numel(), contest.dense_modes(course.device)
    course.note(f"{tokens} tokens: reference in float32")
    wide = copy.deepcopy(body).float()
    expected = last_hidden(wide, ids[:1, :REFERENCE_TOKENS])[0]  # `[T, K]`, of the first tokens
    del wide

    def contender(name: str, kind: str, body: nn.Module, mode: str) -> contest.Contender:
        run = contest.compiled(lambda batch: last_hidden(body, batch), mode)
        return contest.Contender(f"{name} {mode}", kind, lambda number: run(ids))

    with contest.fresh_compiler():
        contenders = [contender("dense", DENSE, body, mode) for mode in modes]
        twin = twell_twin(body, twell, "auto")
        name = "twell" if course.device.type == "cuda" else "twell plain"
        contenders += [contender(name, TWELL, twin, mode) for mode in modes]
        outcome = contest.hold(
            course,
            contenders,
            lambda y: contest.relative_errors(y[0, : len(expected)], expected),
            what=f"{tokens} tokens",
            tokens=tokens,
        )
    about |= {"auto_took": ways_taken(twin, tokens)}
    return Point(tokens, about, "float32", outcome)
