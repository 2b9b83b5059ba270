"""twellctl bench model: the body of a whole model over TwELL against the stock class.

Both sides share their weights and differ in their FFNs only. Besides them runs the dense body with
all of its linear layers in FP8, where the GPU has it; and the body over TwELL is in FP8 if such a
model is benched. What is timed is a prefill: token ids in, last hidden states out, no LM head and
no cache.

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
from twellctl.bench.dense_fp8 import SCHEMES, linear_sizes, rounded_copy, why_no_dense_fp8
from twellctl.bench.device import bench_device, device_facts, free_memory
from twellctl.bench.random_model import WORKSPACE
from twellctl.bench.results import DENSE, DENSE_FP8, FP8_ROUNDING, TWELL, Bench, Point
from twellctl.bench.settings import ModelSettings
from twellctl.bench.subject import DTYPE, Subject, open_subject
from twellctl.bench.twell_side import routes_taken, twell_twin, why_no_kernels
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
        body, benched = (m.base_model for m in (subject.models.bf16, subject.models.benched))
        for each in (body, benched):
            without_mask(each, settings.seq_len)
        note("counting what fires")
        # whole sequences: the first tokens of each attend to so few that they become alike
        length = ids[max(ids)].shape[1] if subject.checkpoint else settings.seq_len
        counted = subject.windows(max(1, COUNTED_TOKENS // length), length)
        twell = subject.checkpoint.twell if subject.checkpoint else {"tile": TILE}
        measured = count_layers(benched, counted, twell["tile"])
        if subject.checkpoint is None:
            twell["slots"] = [layer.slots for layer in measured]
            twell["densities"] = [layer.density for layer in measured]
        without_kernels = why_no_kernels(
            lambda: last_hidden(twell_twin(benched, twell, "twell"), counted[:1, :8]), course.device
        )
        without_fp8 = _why_no_dense_fp8(body, course.device, settings.dense_fp8)
        rivals = [] if without_fp8 else [(s.name, rounded_copy(body, s)) for s in SCHEMES]
        about = about_layers(measured, twell["slots"]) | {"without_kernels": without_kernels}
        points = []
        for tokens in settings.tokens:
            shape = dict(zip(("batch", "seq_len"), settings.shape(tokens), strict=True))
            points.append(_point(subject, rivals, twell, shape | about, ids[tokens], course))
    facts = {"model": subject.described, "without_fp8": without_fp8}
    return Bench(
        facts=device_facts(course.device) | facts,
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


def _why_no_dense_fp8(body: nn.Module, device: torch.device, wanted: bool) -> str | None:
    """None if `body` is to be timed densely in FP8 here, in all schemes, else why not."""
    sizes = linear_sizes(body)
    weights, free = sum(N * K for N, K in sizes), free_memory(device)
    if not wanted:
        return "by --no-dense-fp8"
    if said := why_no_dense_fp8(device, DTYPE, sizes):
        return said
    # beside the reference, which is in float32
    if (needed := (len(SCHEMES) + 4) * weights + WORKSPACE) > free:
        return f"{needed / 1e9:.0f} GB are needed, and {free / 1e9:.0f} GB are free"
    return None


def _point(
    subject: Subject,
    rivals: list[tuple[str, nn.Module]],
    twell: Mapping[str, Any],
    about: dict[str, Any],
    ids: Tensor,
    course: contest.Course,
) -> Point:
    tokens, in_fp8 = ids.numel(), subject.models.fp8 is not None
    body, modes = subject.models.bf16.base_model, contest.dense_modes(course.device)
    course.note(f"{tokens} tokens: reference in float32")
    wide = copy.deepcopy(body).float()
    expected = last_hidden(wide, ids[:1, :REFERENCE_TOKENS])[0]  # `[T, K]`, of the first tokens
    del wide

    def contender(name: str, kind: str, body: nn.Module, mode: str) -> contest.Contender:
        run = contest.compiled(lambda batch: last_hidden(body, batch), mode)
        return contest.Contender(f"{name} {mode}", kind, lambda number: run(ids))

    with contest.fresh_compiler():
        contenders = [contender("dense", DENSE, body, mode) for mode in modes]
        contenders += [
            contender(f"dense FP8 {scheme}", DENSE_FP8, rounded, mode)
            for mode in modes[-1:]  # compiled, where that is one
            for scheme, rounded in rivals
        ]
        twin = twell_twin(subject.models.benched.base_model, twell, "auto")
        name = "twell FP8" if in_fp8 else "twell"
        name += "" if course.device.type == "cuda" else " plain"
        contenders += [contender(name, TWELL, twin, mode) for mode in modes]
        outcome = contest.hold(
            course,
            contenders,
            lambda y: contest.relative_errors(y[0, : len(expected)], expected),
            what=f"{tokens} tokens",
            tokens=tokens,
        )
    about |= {"auto_took": routes_taken(twin, tokens, in_fp8)}
    return Point(tokens, about, "float32", outcome, FP8_ROUNDING if in_fp8 else None)
