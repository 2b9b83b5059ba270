"""twellctl bench exact: what `--exact` gains, and whether its answers are the original's.

The same prompts are answered by the original alone, by its fit alone if that is what drafts, and by
the original with drafts, in the engine of serve-local. Each model is loaded once. One engine is
open at a time. Each answers all prompts twice, and the second time counts: CUDA graphs are captured
by then, and the engine knows how many drafts pay. Where it had to capture another one after all,
all prompts are answered once more.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from twellctl.bench.device import bench_device, device_facts
from twellctl.bench.exact_results import (
    EXACT,
    FIT,
    ORIGINAL,
    STABLE,
    ExactBench,
    ExactForm,
    ExactPoint,
)
from twellctl.bench.held import held_bytes
from twellctl.bench.settings import ExactSettings
from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.lookup import MOST_LOOKED_UP
from twellctl.decoding.opening import open_scheduler, why_no_gain
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.scheduler import Scheduler
from twellctl.errors import TwellError, UsageError, counted
from twellctl.evaluation.agreement import spread
from twellctl.evaluation.subject import Subject
from twellctl.heads.head import DraftHead
from twellctl.here.gpu_memory import free_unused
from twellctl.models.answerer import load_models, open_answerer
from twellctl.models.loading import load_tokenizer
from twellctl.settings import refuse_wrong
from twellctl.text.reading import read_prompts

COUNTS = (1, 3, 5, 7)  # of drafts, of the forms in which each round has as many
LOOKUP = 1  # among an engine's drafters; the fit or the head is the first
LEAST_TIMED = 8  # tokens of a group of answers
MOST_TIMED = 3  # times that all prompts are answered, until none waits for a graph


def bench_exact(
    draft: str | Path,
    prompts: str | Path,
    original: str | Path | None,
    settings: ExactSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExactBench:
    """Answer the rows of `prompts` with each engine; `note` receives what comes.

    `draft` and `original` as `model` and `original` in `open_answerer`. Raises `TwellError`.
    """
    refuse_wrong(settings)
    device = bench_device(settings.device)
    answerer = open_answerer(draft, exact=True, original=original)
    checkpoint, drafter = answerer.checkpoint, answerer.named.name
    checkpoint.require_tokenizer()
    asked, tokenizer = spread(read_prompts(prompts), settings.limit), load_tokenizer(checkpoint)
    if (most := max(settings.batches)) > len(asked):
        raise UsageError(f"batch must be at most {len(asked)}, the number of prompts, got {most}")
    note(f"loading {answerer.answering.name} and {drafter}")
    model, drafting = load_models(answerer, device)
    assert drafting is not None
    if why := why_no_gain(model, drafting):
        note(why)
    encoded = Subject(checkpoint, tokenizer, model).all_encoded(asked)
    run = _Run(settings, list(filter(None, encoded)), note)
    forms = _forms(model, drafting, settings.gates)
    for number, (name, how) in enumerate(forms.items()):
        progress(number, len(forms))
        free_unused()
        run.add(name, extra_eos=[tokenizer.eos_token_id], **how)
    models = {"draft": drafter, "original": answerer.answering.name}
    is_head = answerer.head is not None
    return ExactBench(device_facts(device), asdict(settings), models, is_head, run.points())


def _forms(
    model: PreTrainedModel, draft: PreTrainedModel | DraftHead, gates: str
) -> dict[str, dict[str, Any]]:
    """What to open, by name; first what others are compared with. A head answers nothing alone."""
    exact = {"model": model, "draft": draft, "gates": gates}
    drafts = {f"exact, {counted(count, 'draft')}": Drafts(count) for count in COUNTS}
    drafts["exact, lookup"] = Drafts(MOST_LOOKED_UP, LOOKUP)
    alone = {"model": draft, "gates": gates}  # which may expand it
    return {
        STABLE: {"model": model, "stable": True},
        ORIGINAL: {"model": model},
        EXACT: exact,
        **{name: exact | {"drafts": each} for name, each in drafts.items()},
        **({} if isinstance(draft, DraftHead) else {FIT: alone}),
    }


class _Run:
    """What was found of each form, by batch size."""

    def __init__(
        self, settings: ExactSettings, prompts: list[list[int]], note: Callable[[str], None]
    ):
        self._prompts, self._note = prompts, note
        self._sampling = Sampling(settings.new_tokens, settings.temperature, seed=settings.seed)
        self._known: list[list[int]] = []  # what the first form answered at the first batch size
        self._found: dict[int, list[ExactForm]] = {batch: [] for batch in settings.batches}

    def add(self, name: str, **how: Any) -> None:
        """Open an engine (`how`: as of `open_scheduler`), and let it answer at each batch size."""
        scheduler = open_scheduler(max_running=max(self._found), **how)
        weights = held_bytes(scheduler)
        try:
            for batch, found in self._found.items():
                self._note(f"{name}: batch {batch}")
                found.append(self._measured(name, scheduler, batch, weights))
        except EngineError as error:
            raise TwellError(f"{name}: {error}") from error

    def _measured(self, name: str, scheduler: Scheduler, batch: int, weights: int) -> ExactForm:
        list(self._answers(scheduler, batch))
        for _ in range(MOST_TIMED):
            before, captured = scheduler.tally.drafted.copy(), scheduler.num_graphs
            groups, rates = zip(*self._answers(scheduler, batch), strict=True)
            if scheduler.num_graphs == captured:
                break
        answers = [ids for group in groups for ids in group]
        self._known = self._known or answers
        differing = sum(a != b for a, b in zip(answers, self._known, strict=True))
        drafted = scheduler.tally.drafted.since(before)
        return ExactForm(name, rates, differing, drafted, weights)

    def _answers(
        self, scheduler: Scheduler, batch: int
    ) -> Iterator[tuple[list[list[int]], float | None]]:
        """Of `batch` prompts at a time their tokens, and tokens a second: None of fewer prompts."""
        for start in range(0, len(self._prompts), batch):
            group = self._prompts[start : start + batch]
            answers, rate = answered(scheduler, group, self._sampling)
            yield answers, rate if len(group) == batch else None

    def points(self) -> tuple[ExactPoint, ...]:
        """`TwellError` if nothing was timed."""
        number = len(self._prompts)
        points = [ExactPoint(batch, number, tuple(of)) for batch, of in self._found.items()]
        if short := next((point.batch for point in points if not point.num_timed), None):
            raise TwellError(
                f"no {counted(short, 'answer')} together had {LEAST_TIMED} tokens to time in every "
                "form: give other prompts, or more --new-tokens"
            )
        return tuple(points)


def answered(
    scheduler: Scheduler, prompts: list[list[int]], sampling: Sampling
) -> tuple[list[list[int]], float | None]:
    """The token ids after each of `prompts`, answered together, and tokens a second from when all
    had one; None of fewer than `LEAST_TIMED`. Raises `EngineError`."""
    answers: list[list[int]] = [[] for _ in prompts]
    num_timed, begin, end = 0, 0.0, 0.0
    for events in filter(None, scheduler.run(prompts, sampling)):
        end = time.perf_counter()
        num_timed += len(events) if begin else 0
        for sequence, token in events:
            answers[sequence.client].append(token.id)
        if not begin and all(answers):
            begin = end
    return answers, num_timed / (end - begin) if num_timed >= LEAST_TIMED else None
