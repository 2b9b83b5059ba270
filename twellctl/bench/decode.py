"""twellctl bench decode: token by token, a whole model dense and over TwELL in the same engine.

Besides them the dense form in FP8. The model is one of the user's with prompts from real text, or a
random ReLU model made here (`random_model`); in FP8 if such a one is benched. Each form continues
the same prompts greedily, and what counts is the median of the last steps, sampling included. The
floor of a form is what must be read in a step, at the speed at which this device copies.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch

from twellctl.bench.decode_floors import copy_bandwidth, screened_gate, step_bytes
from twellctl.bench.decode_judge import judge
from twellctl.bench.decode_results import (
    DecodeBench,
    DecodeForm,
    DecodeModel,
    DecodePoint,
    Stage,
)
from twellctl.bench.decode_runs import ModelForm, OpenForm, forms_of
from twellctl.bench.decode_stages import measure_stages
from twellctl.bench.device import bench_device, device_facts
from twellctl.bench.held import held_bytes
from twellctl.bench.results import DENSE_FP8, TWELL
from twellctl.bench.settings import DecodeSettings
from twellctl.bench.subject import Subject, is_in_fp8, open_subject
from twellctl.bundle.twell_config import TILE, mapped_neurons
from twellctl.bundle.twell_model import gated_ffns
from twellctl.decoding.engine import SCREENED
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.whole_step import ONE_KERNEL
from twellctl.errors import TwellError, UsageError, first_line
from twellctl.firing.counts import count_layers
from twellctl.models.loading import fingerprint

COUNTED_TOKENS = 8192
LEAST_APART = 0.95  # of what independent rows fire together: below, rows share neurons


def bench_decode(
    settings: DecodeSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DecodeBench:
    """Measure each model at each batch size; `note` receives what comes. Raises `TwellError`."""
    settings.check()
    device = bench_device(settings.device)
    with torch.no_grad():
        note("the device's copy bandwidth")
        bandwidth = copy_bandwidth(device)
        densities = (1.0,) if settings.model else settings.densities
        models = tuple(
            # opened in the call, so that one is gone before the next is made
            _Run(settings, _opened(settings, d, device, note), bandwidth, note).measured(progress)
            for d in densities
        )
    return DecodeBench(device_facts(device), asdict(settings), bandwidth, models)


def _opened(
    settings: DecodeSettings, density: float, device: torch.device, note: Callable[[str], None]
) -> Subject:
    subject = open_subject(settings, density, device, note)
    if subject.checkpoint is not None:
        scheme = subject.checkpoint.scheme
        subject.described["fingerprint"] = fingerprint(subject.checkpoint)
        subject.described["weights"] = "bf16" if scheme is None else scheme.name
        return subject
    benched = subject.models.benched
    length = benched.config.max_position_embeddings
    counted = subject.windows(max(1, COUNTED_TOKENS // length), length)
    measured = count_layers(benched.model, counted, TILE)
    for ffn, layer in zip(gated_ffns(benched), measured, strict=True):
        ffn.twell_density = layer.density  # as a profile would tell it
    if mapped := settings.map_rank:  # as a fit tells it
        N = benched.config.intermediate_size
        densities = [(layer.density * N - mapped) / (N - mapped) for layer in measured]
        slots = [layer.slots for layer in measured]
        of_map = {"tile": TILE, "slots": slots, "densities": densities, "map_neurons": mapped}
        for model in {id(m): m for m in (benched, subject.models.bf16)}.values():
            model.config.twell = of_map
    return subject


class _Run:
    """What was found of each form of a model, and why others were left out, by batch size."""

    judges_dense = True

    def __init__(
        self,
        settings: DecodeSettings,
        subject: Subject,
        bandwidth: float,
        note: Callable[[str], None],
    ):
        self.settings, self.subject = settings, subject
        self.bandwidth, self.note = bandwidth, note
        self.prompts = subject.windows(max(settings.batches), settings.prompt_tokens).tolist()
        self.found: dict[int, list[DecodeForm]] = {batch: [] for batch in settings.batches}
        self.skipped: dict[int, dict[str, str]] = {batch: {} for batch in settings.batches}

    def measured(self, progress: Callable[[int, int], None]) -> DecodeModel:
        """Run all forms; `progress(done, total)` counts them."""
        settings, subject, models = self.settings, self.subject, self.subject.models
        forms, without_twell = forms_of(models, dense_fp8=settings.dense_fp8, gates=settings.gates)
        # a fitted model's dense forms leave out its map, and so write noise
        self.judges_dense = without_twell is not None or not mapped_neurons(models.bf16.config)
        for number, form in enumerate(forms):
            progress(number, len(forms))
            self._add(form)
        points = tuple(
            DecodePoint(batch, tuple(found), self.skipped[batch])
            for batch, found in self.found.items()
        )
        density = points[0].forms[-1].density
        random = "" if subject.checkpoint else f"random, {subject.described['layers']} layers, "
        what = f"{models.called} ({random}{density:.2%} of the neurons fire)"
        return DecodeModel(what, subject.described, points, without_twell)

    def _add(self, form: ModelForm) -> None:
        """Run a form at each batch size."""
        left = list(self.found)
        try:
            self.note(f"{form.name}: preparing")
            opened = form.open(max(self.found))
            if opened.screens:
                self.note(f"{form.name}: gates are {opened.screens}")
            if opened.plan:
                self.note(f"{form.name}: steps go by {opened.plan} (tokens at once, way)")
            while left:
                self.note(f"{form.name}: batch {left[0]}")
                self.found[left[0]].append(self._measured(form, opened, left[0]))
                left.pop(0)
        except TwellError:
            raise
        except Exception as error:  # whatever a compiler, an allocator or the engine may say
            said = first_line(error)
            if form.kind != DENSE_FP8:  # which is left out then, with its reason
                raise TwellError(f"{form.name} failed at batch {left[0]}: {said}") from error
            self.note(f"{form.name} is left out: {said}")
            for batch in left:
                self.skipped[batch][form.name] = said

    def _measured(self, form: ModelForm, opened: OpenForm, batch: int) -> DecodeForm:
        settings, described = self.settings, self.subject.described
        if batch > opened.most_rows:
            raise UsageError(
                f"batch must be 1 to {opened.most_rows} for {described['name']}, got {batch}"
            )
        prompts = self.prompts[:batch]
        opened.run(prompts, opened.warm_up_tokens or settings.new_tokens)
        done = opened.run(prompts, settings.new_tokens)
        steps = tuple(done.step_seconds[-settings.timed_steps :])
        if len(steps) < settings.timed_steps // 2:  # rows begin one after the other
            raise UsageError(
                f"new-tokens must be more for {batch} rows, of {settings.new_tokens} steps all "
                f"went together in {len(steps)}"
            )
        judged = judge(opened.model, prompts, done.tokens, settings.timed_steps)
        fired, expected = judged.most_alike
        if self.subject.checkpoint is None and fired < LEAST_APART * expected:
            raise TwellError(
                f"the {batch} rows of a step fire only {fired:.1%} of the neurons together, where "
                f"independent ones fire {expected:.1%}: so little is not measured; take another "
                "--seed, or a real model"
            )
        way, gate = opened.way(batch), 1.0
        if opened.screens and way and SCREENED in way:
            gate = screened_gate(opened.screens.candidates, judged.density, judged.union)
        unions = judged.unions if form.kind == TWELL else None
        position = settings.length - settings.timed_steps // 2
        in_int4 = opened.step_kind == "int4" and way in ONE_KERNEL
        floor = step_bytes(opened.model, unions, batch, gate, in_int4=in_int4)
        floor += batch * position * opened.cache_bytes
        return DecodeForm(
            form.name,
            form.kind,
            steps,
            judged.density,
            judged.union,
            judged.shortfall if self.judges_dense or form.kind == TWELL else None,
            floor,
            floor / self.bandwidth,
            held_bytes(opened.model, opened.decoder),
            way,
            is_in_fp8(opened.model),
            self._stages(opened, way) if batch == 1 else (),
        )

    def _stages(self, opened: OpenForm, way: str | None) -> tuple[Stage, ...]:
        """If they are asked for, and steps of one row go by one kernel."""
        if not self.settings.stages or not isinstance(decoder := opened.decoder, KernelDecoder):
            return ()
        if (step := decoder.whole_steps.get(way or "")) is None:
            return ()
        return measure_stages(decoder, step, self.settings.length - 1)
