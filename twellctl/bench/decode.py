"""twellctl bench decode: token by token, a whole model dense and over TwELL in the same engine.

Besides them the dense form in FP8. The model is one of the user's with prompts from real text, or a
random ReLU model made here (`random_model`); in FP8 if such a one is benched. Each form continues
the same prompts greedily, and what counts is the median of the last steps, sampling included. The
floor of a form is what must be read in a step, at the speed at which this device copies.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twellctl.bench.decode_floors import copy_bandwidth, screened_gate, step_bytes
from twellctl.bench.decode_judge import Judged, judge
from twellctl.bench.decode_results import DecodeBench, DecodeForm, DecodeModel, DecodePoint
from twellctl.bench.decode_runs import ModelForm, OpenForm, forms_of
from twellctl.bench.device import bench_device, device_facts, free_memory, model_facts
from twellctl.bench.precisions import DTYPE, Precisions, in_precisions, is_in_fp8
from twellctl.bench.random_model import Shape, make_model, open_shape
from twellctl.bench.results import TWELL
from twellctl.bench.settings import DecodeSettings
from twellctl.bundle.twell_config import TILE, mapped_neurons
from twellctl.bundle.twell_model import gated_ffns
from twellctl.decoding.engine import SCREENED
from twellctl.errors import TwellError, UsageError, first_line
from twellctl.firing.counts import count_layers
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import fingerprint, load_model, load_tokenizer
from twellctl.text.blocks import spread_windows, token_stream
from twellctl.text.reading import read_texts

CONTEXT = 2048  # of the random model, at least
COUNTED_TOKENS = 8192
LEAST_APART = 0.95  # of what independent rows fire together: below, rows share neurons


def bench_decode(
    settings: DecodeSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DecodeBench:
    """Measure each model at each batch size; `note` receives what comes. Raises `TwellError`."""
    settings.check()
    shape = None if settings.model else _shape(settings)
    device = bench_device(settings.device)
    with torch.no_grad():
        note("the device's copy bandwidth")
        bandwidth = copy_bandwidth(device)
        models = tuple(
            # opened in the call, so that one is gone before the next is made
            _measured(settings, open_subject(), bandwidth, note, progress)
            for open_subject in _subjects(settings, shape, device, note)
        )
    return DecodeBench(device_facts(device), asdict(settings), bandwidth, models)


@dataclass(frozen=True)
class Subject:
    """A model, and prompts for the largest batch; `synthetic` rows must not flatter TwELL."""

    models: Precisions
    prompts: list[list[int]]
    described: dict[str, Any]
    synthetic: bool


def _shape(settings: DecodeSettings) -> Shape:
    shape = open_shape(settings.config, settings.layers, context=max(CONTEXT, settings.length))
    settings.check_context(shape.context)
    return shape


def _subjects(
    settings: DecodeSettings,
    shape: Shape | None,
    device: torch.device,
    note: Callable[[str], None],
) -> list[Callable[[], Subject]]:
    if shape is None:
        return [lambda: _open_model(settings, open_checkpoint(settings.model), device, note)]
    return [partial(_make_model, settings, shape, d, device, note) for d in settings.densities]


@dataclass(frozen=True)
class _Taken:
    """One form at one batch size, before its floor is known.

    `weight_bytes` are those that a step must read; `in_fp8`: whether they are in FP8.
    """

    form: ModelForm
    batch: int
    weight_bytes: int
    in_fp8: bool
    step_seconds: tuple[float, ...]
    judged: Judged
    chosen: str | None


def _measured(
    settings: DecodeSettings,
    subject: Subject,
    bandwidth: float,
    note: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> DecodeModel:
    models, batches = subject.models, settings.batches
    forms, without_twell = forms_of(
        models,
        max(batches),
        dense_fp8=settings.dense_fp8,
        gates=settings.gates,
    )
    taken: list[_Taken] = []
    skipped: dict[int, dict[str, str]] = {batch: {} for batch in batches}
    cache_bytes = 0
    for number, form in enumerate(forms):
        progress(number, len(forms))
        cache_bytes = max(cache_bytes, _run(form, settings, subject, taken, skipped, note))
    position = settings.prompt_tokens + settings.new_tokens - settings.timed_steps // 2
    dense_is_cut = without_twell is None and mapped_neurons(models.bf16.config) > 0

    def measured(t: _Taken) -> DecodeForm:
        floor = t.weight_bytes + t.batch * position * cache_bytes
        return DecodeForm(
            t.form.name,
            t.form.kind,
            t.step_seconds,
            t.judged.density,
            t.judged.union,
            None if dense_is_cut and t.form.kind != TWELL else t.judged.shortfall,
            floor,
            floor / bandwidth,
            t.chosen,
            t.in_fp8,
        )

    points = tuple(
        DecodePoint(
            batch,
            tuple(measured(t) for t in taken if t.batch == batch),
            skipped[batch],
        )
        for batch in batches
    )
    density = points[0].forms[-1].density
    random = f"random, {subject.described['layers']} layers, " if subject.synthetic else ""
    what = f"{models.called} ({random}{density:.2%} of the neurons fire)"
    return DecodeModel(what, subject.described, points, without_twell)


def _run(
    form: ModelForm,
    settings: DecodeSettings,
    subject: Subject,
    taken: list[_Taken],
    skipped: dict[int, dict[str, str]],
    note: Callable[[str], None],
) -> int:
    """Add what was `taken` of a form at each batch size; its bytes of cache a token."""
    left = list(settings.batches)
    try:
        note(f"{form.name}: preparing")
        opened = form.open()
        if opened.screens:
            note(f"{form.name}: gates are {opened.screens}")
        while left:
            note(f"{form.name}: batch {left[0]}")
            taken.append(_run_batch(form, opened, left[0], settings, subject))
            left.pop(0)
        return opened.cache_bytes
    except TwellError:
        raise
    except Exception as error:  # whatever a compiler, an allocator or the engine may say
        if not form.may_fail:
            raise TwellError(
                f"{form.name} failed at batch {left[0]}: {first_line(error)}"
            ) from error
        note(f"{form.name} is left out: {first_line(error)}")
        for batch in left:
            skipped[batch][form.name] = first_line(error)
        return 0


def _run_batch(
    form: ModelForm, opened: OpenForm, batch: int, settings: DecodeSettings, subject: Subject
) -> _Taken:
    if batch > opened.most_rows:
        raise UsageError(
            f"batch must be 1 to {opened.most_rows} for {subject.described['name']}, got {batch}"
        )
    prompts = subject.prompts[:batch]
    opened.run(prompts, opened.warm_up_tokens or settings.new_tokens)
    done = opened.run(prompts, settings.new_tokens)
    steps = tuple(done.step_seconds[-settings.timed_steps :])
    if len(steps) < settings.timed_steps // 2:  # rows begin one after the other
        raise UsageError(
            f"new-tokens must be more for {batch} rows, of {settings.new_tokens} steps all went "
            f"together in {len(steps)}"
        )
    judged = judge(opened.model, prompts, done.tokens, settings.timed_steps)
    fired, expected = judged.most_alike
    if subject.synthetic and fired < LEAST_APART * expected:
        raise TwellError(
            f"the {batch} rows of a step fire only {fired:.1%} of the neurons together, where "
            f"independent ones fire {expected:.1%}: so little is not measured; take another "
            "--seed, or a real model"
        )
    chosen, gate = opened.chosen(batch), 1.0
    if opened.screens and chosen and SCREENED in chosen:
        gate = screened_gate(opened.screens.candidates, judged.density, judged.union)
    unions = judged.unions if form.kind == TWELL else None
    weight_bytes = step_bytes(opened.model, unions, batch, gate)
    return _Taken(form, batch, weight_bytes, is_in_fp8(opened.model), steps, judged, chosen)


def _make_model(
    settings: DecodeSettings,
    shape: Shape,
    density: float,
    device: torch.device,
    note: Callable[[str], None],
) -> Subject:
    note(f"making {shape.name} of {shape.layers} layers")
    # either form of the engine may hold W_down in a second layout
    shape.require_memory(free_memory(device), down_copies=1, quantize=settings.quantize)
    generator = torch.Generator(device).manual_seed(settings.seed)
    model = make_model(shape, density, dtype=DTYPE, generator=generator)

    def random_ids(*size: int) -> Tensor:
        return torch.randint(shape.vocabulary, size, generator=generator, device=device)

    described = model_facts(shape.name, model) | shape.described | {"density_asked": density}
    models = in_precisions(model, settings.quantize)
    counted = random_ids(max(1, COUNTED_TOKENS // shape.context), shape.context)
    measured = count_layers(models.benched.model, counted, TILE)
    for ffn, layer in zip(gated_ffns(models.benched), measured, strict=True):
        ffn.twell_density = layer.density  # as a profile would tell it
    prompts = random_ids(max(settings.batches), settings.prompt_tokens).tolist()
    return Subject(models, prompts, described, synthetic=True)


def _open_model(
    settings: DecodeSettings,
    checkpoint: Checkpoint,
    device: torch.device,
    note: Callable[[str], None],
) -> Subject:
    checkpoint.require_relu()
    settings.check_context(checkpoint.config.get("max_position_embeddings") or settings.length)
    tokenizer = load_tokenizer(checkpoint)
    texts = read_texts(list(settings.data), settings.text_column, tokenizer)
    stream = token_stream(texts, tokenizer, checkpoint.config.get("vocab_size"))
    count = max(settings.batches)
    prompts = spread_windows(stream, count, settings.prompt_tokens)
    if len(prompts) < count:
        raise TwellError(
            f"the text holds {len(prompts)} prompts of {settings.prompt_tokens} tokens, not "
            f"{count}: give more text, or a smaller --batch"
        )
    note(f"loading {checkpoint.name}")
    model = load_model(checkpoint, dtype=DTYPE, device=device).requires_grad_(False)
    models = in_precisions(model, settings.quantize)
    described = model_facts(checkpoint.name, models.bf16)
    described["fingerprint"] = fingerprint(checkpoint)
    return Subject(models, prompts.tolist(), described, synthetic=False)
