"""The forms of a model that bench decode runs, one after the other.

All bf16 forms run over the same weights; of a fitted model the dense ones leave out the map, whose
neurons the model that it was fitted to has not. The dense form in FP8 has a copy of its own, which
is gone when its turn is over, unless FP8 is what is benched.

Steps are timed from token to token on the host.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bench.device import why_no_fp8
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.bench.subject import Precisions
from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_int4 import keep_packed
from twellctl.bundle.twell_model import gate_and_up, gated_ffns
from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.decoder import Decoder, buckets
from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_decoder, open_scheduler
from twellctl.decoding.paged_cache import page_bytes
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.screening import Screens
from twellctl.here.gpu_memory import free_unused
from twellctl.models.loading import shared_copy
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES

ENGINE_DENSE, ENGINE_TWELL = "dense", "twell"
ENGINE_DENSE_FP8, ENGINE_TWELL_FP8 = "dense FP8", "twell FP8"
SHORT_RUN = 8  # tokens that warm a form up, if it is slow

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class TimedRun:
    """The tokens after each prompt; the time of each step that continued all of them, in seconds.

    A step is timed from the end of the one before to its own, tokens on the host.
    """

    tokens: list[list[int]]
    step_seconds: list[float]


def timed_run(scheduler: Scheduler, prompts: Prompts, num_tokens: int) -> TimedRun:
    """Continue `prompts` by `num_tokens` each, end tokens or not; all must be able to run at once.

    Raises `EngineError`.
    """
    if len(prompts) > scheduler.max_running:
        said = f"{scheduler.max_running} prompts can be continued at once, got {len(prompts)}"
        raise EngineError(said)
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds, last = [], None
    for events in scheduler.run(prompts, Sampling(num_tokens, 0, ignore_eos=True)):
        now = time.perf_counter()
        for sequence, token in events:
            tokens[sequence.client].append(token.id)
        whole = len(events) == len(prompts) and min(map(len, tokens)) > 1
        if whole and last is not None:
            seconds.append(now - last)
        last = now if events else last
    return TimedRun(tokens, seconds)


@dataclass(frozen=True)
class OpenForm:
    """A form of `model` that is ready. `run(prompts, new tokens)`."""

    model: PreTrainedModel
    run: Callable[[Prompts, int], TimedRun]
    most_rows: int  # of a step
    warm_up_tokens: int | None  # None: as many as are timed
    cache_bytes: int  # of one token, in all layers
    plan: WayPlan | None = None  # of its steps; None of decoders without kernels
    screens: Screens | None = None
    step_kind: str = "bf16"  # of the weights that steps in one kernel read
    decoder: Decoder | None = None

    def way(self, rows: int) -> str | None:
        """That steps of so many rows go; None without a plan."""
        if self.plan is None:
            return None
        return self.plan.name(next(size for size in buckets(self.most_rows) if size >= rows))


@dataclass(frozen=True)
class ModelForm:
    """A form of the model that `model` gives, decoded by what `decoder` makes of it."""

    name: str
    kind: str
    model: Callable[[], PreTrainedModel]
    decoder: Callable[[PreTrainedModel], Decoder]

    def open(self, rows: int) -> OpenForm:
        """Ready for up to `rows` rows a step, with what forms before held given back."""
        model = self.model()
        free_unused()
        scheduler = open_scheduler(model, max_running=rows, decoder=self.decoder(model))
        return OpenForm(
            model,
            partial(timed_run, scheduler),
            scheduler.max_running,
            warm_up_tokens=None if model.device.type == "cuda" else SHORT_RUN,
            cache_bytes=page_bytes(scheduler.decoder.shapes) // PAGE,
            plan=getattr(scheduler.decoder, "plan", None),
            screens=getattr(scheduler.decoder, "screens", None),
            step_kind=getattr(scheduler.decoder, "step_kind", "bf16"),
            decoder=scheduler.decoder,
        )


def forms_of(
    models: Precisions, *, dense_fp8: bool, gates: str
) -> tuple[list[ModelForm], str | None]:
    """The forms to run in this order.

    And why neither TwELL nor the dense form in FP8 is among them, if so; the latter is with
    `dense_fp8`. The last one may lay the weights of its model otherwise, with the same values.
    """
    benched = models.benched
    if (said := KernelDecoder.why_not(benched)) is not None:
        return [ModelForm(ENGINE_DENSE, DENSE, lambda: models.bf16, open_decoder)], said
    dense = partial(KernelDecoder, sparse=False)
    forms = [ModelForm(ENGINE_DENSE, DENSE, lambda: without_map(models.bf16), dense)]
    if dense_fp8:
        forms.append(ModelForm(ENGINE_DENSE_FP8, DENSE_FP8, lambda: _in_fp8(models), dense))
    name = ENGINE_TWELL if models.fp8 is None else ENGINE_TWELL_FP8
    over_twell = partial(KernelDecoder, gates=gates)
    return [*forms, ModelForm(name, TWELL, lambda: benched, over_twell)], None


def without_map(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without a map's neurons, which shares its other weights; the model if there is none.

    It reads the bytes of the model that this one was fitted to, and says nothing like it.
    """
    if not (mapped := mapped_neurons(model.config)):
        return model
    cut = shared_copy(model)
    for ffn in gated_ffns(cut):
        projections = gate_and_up(ffn)
        for linear in projections:
            fused = len(projections) == 1
            linear.weight = _without_last(linear.weight, mapped, fused)
            _cut_kept(linear, partial(_without_last, num=mapped, fused=fused))
            if linear.bias is not None:
                linear.bias = _without_last(linear.bias, mapped, fused)
            linear.out_features = len(linear.weight)
        down = ffn.down_proj
        down.weight = nn.Parameter(down.weight.data[:, :-mapped].contiguous(), requires_grad=False)
        down.in_features -= mapped
        _cut_kept(down, partial(_first_columns, num=down.in_features, of=down.in_features + mapped))
    cut.config.intermediate_size -= mapped
    del cut.config.twell["map_neurons"]
    return cut


def _cut_kept(linear: nn.Linear, cut: Callable[[Tensor], Tensor]) -> None:
    """Cut the codes and scales of a layer that keeps them (twell_int4.py)."""
    if hasattr(linear, "packed"):
        codes, scales = (
            cut(part).data.contiguous() for part in (linear.packed, linear.packed_scale)
        )
        keep_packed(linear, codes, scales)


def _first_columns(part: Tensor, num: int, of: int) -> Tensor:
    """Of numbers that stand for `of` columns together, those of the first `num`."""
    return part[:, : part.shape[1] * num // of]


def _without_last(parameter: Tensor, num: int, fused: bool) -> nn.Parameter:
    """Without the last `num` rows, or those of each half where it is `fused`."""
    parts = [part[:-num] for part in parameter.data.chunk(2 if fused else 1)]
    return nn.Parameter(torch.cat(parts) if fused else parts[0], requires_grad=False)


def _in_fp8(models: Precisions) -> PreTrainedModel:
    """The model in FP8, rounded now unless there is one; `ValueError` where it cannot run."""
    if models.fp8 is not None:
        return models.fp8
    model = without_map(models.bf16)
    linears = [m for m in model.base_model.modules() if type(m) is nn.Linear]
    sizes = {(linear.out_features, linear.in_features) for linear in linears}
    if said := why_no_fp8(model.device, sizes):
        raise ValueError(said)
    rounded = shared_copy(model)
    round_model(rounded, SCHEMES["fp8"])
    if said := KernelDecoder.why_not(rounded):
        raise ValueError(said)
    return rounded
