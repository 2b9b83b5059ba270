"""twellctl bench train --model: whole training steps of a random ReLU model, dense and over TwELL.

A step is forward, cross-entropy some tokens at a time (`head_loss`), the L1 penalty,
backward, clipping and AdamW. Body and cross-entropy are compiled or not; all but the FFNs is alike
on both sides. The learning rate is 0: AdamW does all its work, and the weights stay as they are, so
that all candidates and all steps compute on the same. Attention is SDPA without a mask. The
gradients of the first layer's FFN, which hang on all layers, are compared with float32.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from twellctl.bench.body import about_layers, last_hidden
from twellctl.bench.contest import (
    Contender,
    Course,
    check_course,
    hold,
    open_course,
    relative_error,
)
from twellctl.bench.dense_ffn import compiled, dense_modes, fresh_compiler
from twellctl.bench.device import bench_device, device_facts, free_memory, model_facts
from twellctl.bench.peak_memory import step_memory
from twellctl.bench.random_model import Shape, make_model, open_shape
from twellctl.bench.results import DENSE, TWELL, Point
from twellctl.bench.synthetic import EVEN, check_union
from twellctl.bench.train_forms import trained_dense, trained_over_twell
from twellctl.bench.train_results import TrainBench
from twellctl.bench.twell_side import require_kernels, shared_copy, twell_name
from twellctl.bundle.twell_config import SLOTS, TILE
from twellctl.errors import UsageError
from twellctl.firing.counts import Union, count_layers
from twellctl.firing.profiled import LayerProfile
from twellctl.models.loading import checkpoint_activations, without_mask
from twellctl.training.head_loss import HeadLoss

COUNTED_TOKENS = 32768  # about so many, in whole sequences
CHECKPOINTING = ("off", "on")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PENALTY = 2**-9  # a token: a tenth of the other gradients of hidden, so that mistakes are seen
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class TrainStepSettings:
    """What to measure: steps of `batch` sequences of `seq_len` tokens.

    The model has the shape of `config` (None: a Llama of 1.5B), with `layers` layers if given.
    """

    batch: int = 16
    seq_len: int = 2048
    config: str | None = None
    layers: int | None = None
    density: float = 0.005
    checkpointing: tuple[str, ...] = CHECKPOINTING
    param_dtype: str = "bfloat16"
    rounds: int = 5
    seed: int = 0
    device: str | None = None

    def check(self) -> None:
        """`UsageError` for what makes no sense, before any work."""
        if self.batch < 1:
            raise UsageError(f"batch must be >= 1, got {self.batch}")
        if self.seq_len < 2:
            raise UsageError(f"seq-len must be >= 2, got {self.seq_len}")
        EVEN.check(self.density)
        given = self.checkpointing
        if not given or len(set(given)) < len(given) or not set(given) <= set(CHECKPOINTING):
            raise UsageError(f"checkpointing must be off, on or both, got {', '.join(given)}")
        if self.param_dtype not in DTYPES:
            raise UsageError(
                f"param-dtype must be one of {', '.join(DTYPES)}, got {self.param_dtype!r}"
            )
        check_course(self.rounds, 1.0)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


def bench_train_step(
    settings: TrainStepSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TrainBench:
    """Measure steps with and without checkpointing; `note` is told what comes. `TwellError`."""
    settings.check()
    shape = _shape(settings)
    device = bench_device(settings.device)
    course = open_course(device, settings.rounds, None, note, progress)
    subject = _open(settings, shape, course)
    course.note("reference in float32")
    expected = _reference(subject)
    groups = []
    for checkpointing in settings.checkpointing:
        with fresh_compiler():
            point = _point(settings, subject, expected, checkpointing == "on", course)
        groups.append((_called(shape, checkpointing == "on"), (point,)))
    return TrainBench(
        command="bench train --model",
        facts=device_facts(device) | {"model": subject.described},
        settings=asdict(settings),
        groups=tuple(groups),
    )


@dataclass(frozen=True)
class Subject:
    """A random model, the ids `[B, S]` of a step, the penalty a token, and what fires by layer."""

    model: nn.Module
    described: dict[str, Any]
    ids: Tensor
    penalty: Tensor
    measured: list[LayerProfile]
    unions: list[Union]

    @property
    def slots(self) -> tuple[int, ...]:
        return (SLOTS,) * len(self.measured)

    @property
    def densities(self) -> tuple[float, ...]:
        return tuple(layer.density for layer in self.measured)


def _shape(settings: TrainStepSettings) -> Shape:
    shape = open_shape(settings.config, settings.layers, context=settings.seq_len)
    if settings.seq_len > shape.context:
        raise UsageError(f"seq-len must be 2 to {shape.context}, the context of {shape.name}")
    return shape


def _open(settings: TrainStepSettings, shape: Shape, course: Course) -> Subject:
    course.note(f"making {shape.name} of {shape.layers} layers")
    shape.require_memory(free_memory(course.device))
    generator = torch.Generator(course.device).manual_seed(settings.seed)
    model = make_model(shape, settings.density, dtype=torch.bfloat16, generator=generator)
    without_mask(model.model, settings.seq_len)

    def random_ids(sequences: int) -> Tensor:
        size = (sequences, settings.seq_len)
        return torch.randint(shape.vocabulary, size, generator=generator, device=course.device)

    course.note("counting what fires")
    counted = random_ids(max(1, COUNTED_TOKENS // settings.seq_len))
    with torch.no_grad():
        measured, unions = count_layers(model.model, counted, TILE)
    for union in unions:
        check_union(union)
    # float32 weights hold bf16 numbers, so that what is rounded of them is nothing
    model.to(DTYPES[settings.param_dtype]).requires_grad_(True).train()
    penalty = torch.full((1,), PENALTY / settings.tokens, device=course.device)
    described = model_facts(shape.name, model) | shape.described
    return Subject(model, described, random_ids(settings.batch), penalty, measured, unions)


class Trained:
    """One model in training, its FFNs in one form, its body compiled or not."""

    def __init__(self, model: nn.Module, mode: str, *, autocast: bool):
        self.model = model
        self.cast = functools.partial(
            torch.autocast, model.device.type, torch.bfloat16, enabled=autocast
        )
        with self.cast():  # it runs the model
            self.head = HeadLoss(model, compiled=mode != "eager")
        self.body = compiled(lambda ids: last_hidden(model.model, ids), mode)

    def gradients(self, parts: list[Tensor]) -> dict[str, Tensor]:
        """Of the first FFN, clipped as all are; the mean loss over `parts` of equal size counts.

        Gradients are left in the parameters.
        """
        for ids in parts:
            with self.cast():
                loss = self.head.losses(ids, wrapped=self._run).loss
            (loss / len(parts)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        ffn = self.model.model.layers[0].mlp
        named = {"gate": ffn.gate_proj, "up": ffn.up_proj, "down": ffn.down_proj}
        return {f"grad_{name}": linear.weight.grad for name, linear in named.items()}

    def own(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """The parameters and their states in the optimizer."""
        for parameter in self.model.parameters():
            yield parameter.detach()
            states = optimizer.state.get(parameter, {})
            yield from (state for state in states.values() if torch.is_tensor(state))

    def _run(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model.lm_head(self.body(input_ids)))


@dataclass(frozen=True)
class Step:
    """A whole step on ids `[B, S]`; the optimizer is that of all candidates."""

    trained: Trained
    optimizer: torch.optim.Optimizer
    ids: Tensor

    def __call__(self, number: int = 0) -> dict[str, Tensor]:
        found = self.trained.gradients([self.ids])
        self.optimizer.step()  # passes by what has no gradient: down projections of other forms
        self.optimizer.zero_grad(set_to_none=True)
        return found


def _point(
    settings: TrainStepSettings,
    subject: Subject,
    expected: dict[str, Tensor],
    checkpointing: bool,
    course: Course,
) -> Point:
    ids, device = subject.ids, course.device
    models = {
        DENSE: trained_dense(subject.model, subject.penalty),
        TWELL: trained_over_twell(subject.model, subject.penalty, subject.densities),
    }
    kinds: dict[str, str] = {}
    steps: dict[str, Step] = {}
    autocast = settings.param_dtype == "float32" and ids.is_cuda
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        few = ids[:1, :8]
        without_kernels = require_kernels(
            ("auto",), lambda _: last_hidden(models[TWELL].model, few), device
        )
    optimizer = _optimizer(models.values(), device)
    for kind, model in models.items():
        if checkpointing:
            checkpoint_activations(model)
        for mode in dense_modes(device, max_autotune=False):
            name = f"{twell_name('auto', device) if kind == TWELL else kind} {mode}"
            trained = Trained(shared_copy(model), mode, autocast=autocast)
            steps[name], kinds[name] = Step(trained, optimizer, ids), kind

    def errors_of(found: dict[str, Tensor]) -> dict[str, float]:
        return {f"{n}_error": relative_error(found[n], wanted) for n, wanted in expected.items()}

    def also(contender: Contender) -> dict[str, float]:
        step = steps[contender.name]
        return step_memory(step, step.trained.own(optimizer)) if ids.is_cuda else {}

    outcome = hold(
        course,
        [Contender(name, kinds[name], step) for name, step in steps.items()],
        errors_of,
        what=f"{settings.tokens} tokens, checkpointing {'on' if checkpointing else 'off'}",
        tokens=settings.tokens,
        graphs=False,
        also=also,
    )
    about = about_layers(subject.measured, subject.slots, subject.unions)
    about |= {"batch": settings.batch, "seq_len": settings.seq_len, "checkpointing": checkpointing}
    about |= {"without_kernels": without_kernels}
    headline = tuple(name for name, kind in kinds.items() if kind == TWELL)
    return Point(settings.tokens, about, "float32", headline, outcome)


def _optimizer(models: Iterable[nn.Module], device: torch.device) -> torch.optim.Optimizer:
    """AdamW over all weights of the models, each once."""
    parameters = {id(p): p for model in models for p in model.parameters()}
    return torch.optim.AdamW(parameters.values(), lr=0.0, fused=device.type == "cuda")


def _reference(subject: Subject) -> dict[str, Tensor]:
    """Gradients of the first FFN, all computed in float32, sequence by sequence."""
    wide = trained_dense(copy.deepcopy(subject.model).float(), subject.penalty)
    return Trained(wide, "eager", autocast=False).gradients(list(subject.ids.split(1)))


def _called(shape: Shape, checkpointing: bool) -> str:
    more = ", activations checkpointed" if checkpointing else ""
    return f"a training step of this model (random, {shape.layers} layers{more})"
