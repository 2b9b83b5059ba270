"""twellctl bench model: the body of a whole model over TwELL against the stock class.

The model is one of the user's with real text, or a random ReLU model made here
(`random_model`). Both sides share their weights and differ in their FFNs only. Besides them runs
the dense body with all of its linear layers in FP8, where the GPU has it; and the body over TwELL
is in FP8 if such a model is benched. What is timed is a prefill: token ids in, last hidden states
out, no LM head and no cache.

Attention is PyTorch's SDPA with `is_causal` on every side. The stock code would make a whole mask
when it is compiled, which slows the compiled dense side most, so the mask is left out for all.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twellctl.bench.contest import (
    Contender,
    Course,
    hold,
    relative_errors,
)
from twellctl.bench.dense_fp8 import (
    SCHEMES,
    fp8_modes,
    linear_sizes,
    rounded_copy,
    why_no_dense_fp8,
)
from twellctl.bench.device import bench_device, device_facts, free_memory, model_facts
from twellctl.bench.modes import compiled, dense_modes, fresh_compiler
from twellctl.bench.precisions import DTYPE, Precisions, in_precisions
from twellctl.bench.random_model import WORKSPACE, Shape, make_model, open_shape
from twellctl.bench.results import DENSE, DENSE_FP8, FP8_ROUNDING, TWELL, Bench, Point
from twellctl.bench.settings import PREFILLED_LLAMA_LAYERS, ModelSettings
from twellctl.bench.twell_side import (
    TwellNumbers,
    routes_taken,
    twell_name,
    twell_twin,
    why_no_kernels,
)
from twellctl.bundle.twell_config import TILE
from twellctl.bundle.twell_model import gated_ffns
from twellctl.errors import TwellError
from twellctl.firing.counts import count_layers
from twellctl.firing.profiled import LayerProfile
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import load_model, load_tokenizer, without_mask
from twellctl.text.blocks import spread_windows, token_stream
from twellctl.text.reading import read_texts

REFERENCE_TOKENS = 512
COUNTED_TOKENS = 32768  # about so many, in whole sequences


def bench_model(
    settings: ModelSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Bench:
    """Measure each token count; `note` receives what comes. Raises `TwellError`."""
    settings.check()
    shape = None if settings.model else _shape(settings)
    course = Course(bench_device(settings.device), settings.rounds, note, progress)
    with torch.no_grad():
        subject = _open(settings, shape, course.device, note)
        for body in subject.bodies:
            without_mask(body, settings.seq_len)
        note("counting what fires")
        measured = count_fired(subject)
        numbers = subject.numbers or TwellNumbers(
            tile=TILE,
            slots=tuple(layer.slots for layer in measured),
            densities=tuple(layer.density for layer in measured),
        )
        without_kernels = why_no_kernels(
            lambda: last_hidden(
                twell_twin(subject.benched, numbers, "twell"), subject.counted[:1, :8]
            ),
            course.device,
        )
        without_fp8 = _why_no_dense_fp8(subject.body, course.device, settings.dense_fp8)
        rivals = [] if without_fp8 else [(s.name, rounded_copy(subject.body, s)) for s in SCHEMES]
        about = about_layers(measured, numbers.slots) | {"without_kernels": without_kernels}
        points = tuple(
            _point(settings, subject, rivals, numbers, about, tokens, course)
            for tokens in settings.tokens
        )
    random = "" if settings.model else f" (random, {subject.described['layers']} layers)"
    return Bench(
        command="bench model",
        facts=device_facts(course.device)
        | {"model": subject.described, "without_fp8": without_fp8},
        settings=asdict(settings),
        what=f"{subject.models.called}{random}",
        points=points,
    )


@dataclass(frozen=True)
class Subject:
    """A model, ids `[B, S]` for its body by token count, and those to count by what fires.

    `numbers` are those of its config.json, None where they are to be measured first.
    """

    models: Precisions
    ids: dict[int, Tensor]
    counted: Tensor
    numbers: TwellNumbers | None
    described: dict[str, Any]

    @property
    def body(self) -> nn.Module:
        """In bf16."""
        return self.models.bf16.base_model

    @property
    def benched(self) -> nn.Module:
        """The body that runs over TwELL: in FP8, or the same."""
        return self.models.benched.base_model

    @property
    def in_fp8(self) -> bool:
        return self.models.fp8 is not None

    @property
    def bodies(self) -> list[nn.Module]:
        return [self.body, self.benched] if self.in_fp8 else [self.body]


def last_hidden(body: nn.Module, ids: Tensor) -> Tensor:
    """`[B, S]` to `[B, S, K]`."""
    return body(input_ids=ids, use_cache=False).last_hidden_state


def about_layers(measured: list[LayerProfile], slots: tuple[int, ...]) -> dict[str, Any]:
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


def count_fired(subject: Subject) -> list[LayerProfile]:
    """By layer what a profile would hold."""
    tile = TILE if subject.numbers is None else subject.numbers.tile
    return count_layers(subject.benched, subject.counted, tile)


def _why_no_dense_fp8(body: nn.Module, device: torch.device, wanted: bool) -> str | None:
    """None if `body` is to be timed densely in FP8 here, in all schemes, else why not."""
    sizes = linear_sizes(body)
    weights, free = sum(N * K for N, K in sizes), free_memory(device)
    if said := why_no_dense_fp8(device, DTYPE, sizes, wanted=wanted):
        return said
    # beside the reference, which is in float32
    if (needed := (len(SCHEMES) + 4) * weights + WORKSPACE) > free:
        return f"{needed / 1e9:.0f} GB are needed, and {free / 1e9:.0f} GB are free"
    return None


def _point(
    settings: ModelSettings,
    subject: Subject,
    rivals: list[tuple[str, nn.Module]],
    numbers: TwellNumbers,
    about: dict[str, Any],
    tokens: int,
    course: Course,
) -> Point:
    ids = subject.ids[tokens]
    modes = dense_modes(course.device)
    course.note(f"{tokens} tokens: reference in float32")
    expected = _reference(subject.body, ids)

    def contender(name: str, kind: str, body: nn.Module, mode: str) -> Contender:
        run = compiled(lambda batch: last_hidden(body, batch), mode)
        return Contender(f"{name} {mode}", kind, lambda number: run(ids))

    with fresh_compiler():
        contenders = [contender("dense", DENSE, subject.body, mode) for mode in modes]
        contenders += [
            contender(f"dense FP8 {scheme}", DENSE_FP8, body, mode)
            for mode in fp8_modes(modes)
            for scheme, body in rivals
        ]
        twin = twell_twin(subject.benched, numbers, "auto")
        name = twell_name(course.device, subject.in_fp8)
        contenders += [contender(name, TWELL, twin, mode) for mode in modes]
        outcome = hold(
            course,
            contenders,
            lambda y: relative_errors(y[0, : len(expected)], expected),
            what=f"{tokens} tokens",
            tokens=tokens,
        )
    shape = dict(zip(("batch", "seq_len"), settings.shape(tokens), strict=True))
    K, N = (subject.described[size] for size in ("hidden_size", "intermediate_size"))
    told = list(zip(numbers.slots, numbers.densities or [None] * len(numbers.slots), strict=True))
    biases = any(ffn.down_proj.bias is not None for ffn in gated_ffns(subject.body))
    taken = routes_taken(K, N, biases, tokens, told, subject.in_fp8)
    about = shape | about | {"auto_took": taken}
    explained = FP8_ROUNDING if subject.in_fp8 else None
    return Point(tokens, about, "float32", outcome, explained)


def _reference(body: nn.Module, ids: Tensor) -> Tensor:
    """Last hidden states `[T, K]` of the first tokens, all computed in float32."""
    wide = copy.deepcopy(body).float()
    return last_hidden(wide, ids[:1, :REFERENCE_TOKENS])[0]


def _shape(settings: ModelSettings) -> Shape:
    layers = (
        PREFILLED_LLAMA_LAYERS
        if settings.config is None and settings.layers is None
        else settings.layers
    )
    shape = open_shape(settings.config, layers, context=settings.seq_len)
    settings.check_context(shape.context)
    return shape


def _open(
    settings: ModelSettings,
    shape: Shape | None,
    device: torch.device,
    note: Callable[[str], None],
) -> Subject:
    if shape is None:
        return _open_model(settings, open_checkpoint(settings.model), device, note)
    note(f"making {shape.name} of {shape.layers} layers")
    shape.require_memory(free_memory(device), quantize=settings.quantize)
    generator = torch.Generator(device).manual_seed(settings.seed)
    model = make_model(shape, settings.density, dtype=DTYPE, generator=generator)

    def random_ids(sequences: int, length: int) -> Tensor:
        size = (sequences, length)
        return torch.randint(shape.vocabulary, size, generator=generator, device=device)

    ids = {tokens: random_ids(*settings.shape(tokens)) for tokens in settings.tokens}
    # whole sequences: the first tokens of each attend to so few that they become alike
    counted = random_ids(max(1, COUNTED_TOKENS // settings.seq_len), settings.seq_len)
    described = model_facts(shape.name, model.model) | shape.described
    return Subject(in_precisions(model, settings.quantize), ids, counted, None, described)


def _open_model(
    settings: ModelSettings,
    checkpoint: Checkpoint,
    device: torch.device,
    note: Callable[[str], None],
) -> Subject:
    checkpoint.require_relu()
    settings.check_context(checkpoint.config.get("max_position_embeddings") or settings.seq_len)
    tokenizer = load_tokenizer(checkpoint)
    texts = read_texts(list(settings.data), settings.text_column, tokenizer)
    stream = list(token_stream(texts, tokenizer, checkpoint.config.get("vocab_size")))
    ids = {}
    for tokens in settings.tokens:
        count, seq_len = settings.shape(tokens)
        windows = spread_windows(stream, count, seq_len)
        if len(windows) < count:
            raise TwellError(
                f"the text holds {len(windows)} windows of {seq_len} tokens, not {count}: give "
                "more text, or fewer --tokens"
            )
        ids[tokens] = windows.to(device)
    note(f"loading {checkpoint.name}")
    model = load_model(checkpoint, dtype=DTYPE, device=device).requires_grad_(False)
    models = in_precisions(model, settings.quantize)
    twell = checkpoint.twell
    numbers = TwellNumbers(
        tile=twell["tile"],
        slots=tuple(twell["slots"]),
        densities=tuple(twell["densities"]) if twell.get("densities") else None,
    )
    most = ids[max(ids)]
    return Subject(
        models=models,
        ids=ids,
        counted=most[: max(1, COUNTED_TOKENS // most.shape[1])],
        numbers=numbers,
        described=model_facts(checkpoint.name, models.bf16.base_model),
    )
