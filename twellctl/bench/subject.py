"""What a bench measures: a ReLU model of the user's on text, or a random one on drawn tokens.

In bf16, and in FP8 too where `bench decode` measures that. All forms compute the same function
then: the bf16 model holds what the FP8 weights are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bench.device import free_memory
from twellctl.bench.random_model import make_model, open_shape, round_to_int4
from twellctl.bench.settings import AnyModel, DecodeSettings
from twellctl.bundle.twell_rounded_linear import RoundedLinear
from twellctl.errors import TwellError
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import load_model, load_tokenizer, shared_copy
from twellctl.models.quantised import expand_model, round_model
from twellctl.models.schemes import SCHEMES
from twellctl.text.blocks import spread_windows, token_stream
from twellctl.text.reading import read_texts

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Precisions:
    """One model; `fp8` None: what is benched is bf16."""

    bf16: PreTrainedModel
    fp8: PreTrainedModel | None

    @property
    def benched(self) -> PreTrainedModel:
        """The one that runs over TwELL."""
        return self.bf16 if self.fp8 is None else self.fp8

    @property
    def called(self) -> str:
        """What the benched one is called."""
        return "this model" if self.fp8 is None else "this model in FP8"


@dataclass(frozen=True)
class Subject:
    """A model, and what it reads. `checkpoint` is None of a random one.

    `windows(count, length)` are ids `[count, length]` on the model's device: at even strides
    through the text, of which there may be fewer, or drawn. `described` is what the JSON says.
    """

    models: Precisions
    windows: Callable[[int, int], Tensor]
    described: dict[str, Any]
    checkpoint: Checkpoint | None = None

    @property
    def called(self) -> str:
        """Like "this model in FP8 (random, 2 layers)"."""
        random = "" if self.checkpoint else f" (random, {self.described['layers']} layers)"
        return f"{self.models.called}{random}"


def open_subject(
    settings: AnyModel, density: float, device: torch.device, note: Callable[[str], None]
) -> Subject:
    """The model of `settings`; a random one fires at `density`. Raises `TwellError`."""
    quantize = settings.quantize if isinstance(settings, DecodeSettings) else None
    if settings.model is None:
        return _drawn(settings, density, quantize, device, note)
    checkpoint = open_checkpoint(settings.model)
    checkpoint.require_relu()
    if not isinstance(settings, DecodeSettings):
        checkpoint.require_unquantised()
    if context := checkpoint.config.get("max_position_embeddings"):
        settings.check_context(context)
    tokenizer = load_tokenizer(checkpoint)
    texts = read_texts(list(settings.data), settings.text_column, tokenizer)
    stream = list(token_stream(texts, tokenizer, checkpoint.config.get("vocab_size")))
    for (count, length), flag in settings.windows.items():  # before weights are read
        if (found := len(spread_windows(stream, count, length))) < count:
            raise TwellError(
                f"the text holds {found} windows of {length} tokens, not {count}: give more text, "
                f"or a smaller {flag}"
            )
    note(f"loading {checkpoint.name}")
    model = load_model(checkpoint, dtype=DTYPE, device=device).requires_grad_(False)

    def windows(count: int, length: int) -> Tensor:
        return spread_windows(stream, count, length).to(device)

    models = in_precisions(model, quantize)
    return Subject(models, windows, _described(checkpoint.name, models), checkpoint)


def _drawn(
    settings: AnyModel,
    density: float,
    quantize: str | None,
    device: torch.device,
    note: Callable[[str], None],
) -> Subject:
    mapped, bits = getattr(settings, "map_rank", 0), getattr(settings, "bits", None)
    shape = open_shape(
        settings.config, settings.layers, context=settings.context_drawn, mapped=mapped
    )
    settings.check_context(shape.context)
    note(f"making {shape.name} of {shape.layers} layers")
    shape.require_memory(free_memory(device), quantize=quantize)
    generator = torch.Generator(device).manual_seed(settings.seed)
    model = make_model(shape, density, dtype=DTYPE, generator=generator, mapped=mapped)
    if bits is not None:
        round_to_int4(model)

    def windows(count: int, length: int) -> Tensor:
        size = (count, length)
        return torch.randint(shape.vocabulary, size, generator=generator, device=device)

    models = in_precisions(model, quantize)
    asked = {"density_asked": density, "bits": bits, "map_rank": mapped}
    described = _described(shape.name, models) | shape.described | asked
    return Subject(models, windows, described)


def in_precisions(model: PreTrainedModel, quantize: str | None) -> Precisions:
    """Of a model in bf16 or of an FP8 export, which is in FP8 already. Weights that need no change
    are shared; with `quantize` those of `model` itself are rounded.
    """
    if not is_in_fp8(model):
        if quantize is None:
            return Precisions(model, None)
        round_model(model, SCHEMES[quantize])
    bf16 = shared_copy(model)
    expand_model(bf16, DTYPE)
    return Precisions(bf16, model)


def is_in_fp8(model: nn.Module) -> bool:
    """Whether it has FP8 layers."""
    return any(isinstance(module, RoundedLinear) for module in model.modules())


def _described(name: str, models: Precisions) -> dict[str, Any]:
    config = models.bf16.config
    return {
        "name": name,
        "type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in models.bf16.parameters()),
    }
