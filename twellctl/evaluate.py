"""twellctl eval: loss and density on text, agreement with a reference, tasks."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from twellctl.errors import TwellError, UsageError, counted
from twellctl.evaluation import limited
from twellctl.evaluation.agreement import (
    MAX_TOKENS,
    prompts_in,
    question_in,
    score_answers,
    spread,
)
from twellctl.evaluation.answers import Answer, answers
from twellctl.evaluation.pairs import Pair, pair_of
from twellctl.evaluation.questions import (
    AnyQuestion,
    Task,
    has_choices,
    is_in_own_words,
    read_tasks,
)
from twellctl.evaluation.results import AnswerScore, Evaluation, Marks, TaskResult, TextResult
from twellctl.evaluation.settings import Doing, Evaluating, Paths, Progress
from twellctl.evaluation.sound_tasks import leave_out_unsound
from twellctl.evaluation.subject import Opened, Subject, Wrote
from twellctl.evaluation.windows import facts, score_text, window_length
from twellctl.firing.grouping import GroupedWindows, grouped_windows
from twellctl.models.bytes_read import bytes_read
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import default_device, fingerprint
from twellctl.models.originals import find_original, opened_source
from twellctl.settings import chosen
from twellctl.text.files import kind_and_path
from twellctl.text.reading import read_prompts, read_texts
from twellctl.text.tokens import Messages

COMPARED_TEXTS = 64  # that the tokenizers of model and reference both encode
COMPARED_ANSWERS = 64  # at most, without --limit
SHOWN_PAIRS = 12  # of them, in the result


def evaluate(
    model: str | Path,
    data: Paths = (),
    *,
    tasks: Paths = (),
    chat_template_kwargs: dict[str, Any] | None = None,
    device: torch.device | None = None,
    doing: Doing = lambda text: None,
    progress: Progress = lambda done, total: None,
    note: Doing = lambda text: None,
    **settings: Any,
) -> Evaluation:
    """Measure `model`, ReLU or SiLU, on windows of the text in `data`, on answers and on `tasks`.

    `settings` are the fields of `Evaluating`; those for text work as in `profile`. `reference` is a
    model with the same tokenizer to compare with, such as the one it was made from. For tasks that
    the model answers in its own words, it defaults to what the model was made from, if its folder
    holds that or its config.json names it. `tasks` are files of questions
    (`twellctl.evaluation.questions`) or folders of them; the first `limit` questions of each are
    asked. Code written for tests is run only with `run_code`.

    Both models answer `limit` of the prompts in `prompts` (by default `COMPARED_ANSWERS`), else the
    tasks, else the beginnings of the windows. Computes in bf16 on CUDA and in float32 on the CPU.
    `doing` receives what comes next, `progress(done, total)` windows, choices, answers or programs,
    and `note` messages for the user. Raises `TwellError`.
    """
    how = _checked(chosen(Evaluating, settings | {"data": data, "tasks": tasks}))
    prompts = _prompts(how)
    tasks_read = read_tasks(how.tasks, how.limit)
    _check_code([task for task in tasks_read if task.kind == "tests"], how.run_code, note)
    sound = leave_out_unsound(tasks_read, doing, note, progress)
    of_choices = [task for task in sound if has_choices(task)]
    in_own_words = [task for task in sound if is_in_own_words(task)]
    needs_answers = bool(in_own_words or prompts)
    opened = _open_models(model, how.reference, chat_template_kwargs, needs_answers, note)
    text = _windows(opened, how) if how.data else None
    _check_tokenizers(opened, how)
    subjects = _load(opened, device or default_device(), doing)
    scored = None if text is None else _score_text(subjects, text, doing, progress)
    wrote = [one.write(in_own_words, how.max_tokens, doing, progress) for one in subjects]
    _note_unanswered(wrote[0], note)
    agreement, pairs = _agreement(subjects, prompts, wrote, text, doing, progress)
    chosen_by_each = [subject.choose(of_choices, doing, progress) for subject in subjects]
    written_by_each = [one.marks(in_own_words, doing, progress) for one in wrote]
    own = subjects[0]
    return Evaluation(
        model=str(model),
        fingerprint=fingerprint(own.checkpoint),
        reference=subjects[1].checkpoint.name if len(subjects) > 1 else None,
        data=tuple(how.data),
        **facts(own.model),
        limit=how.limit,
        text=scored,
        answers=agreement,
        tasks=(*_task_results(chosen_by_each), *_task_results(written_by_each)),
        bytes_read=bytes_read(own.checkpoint, None if scored is None else scored.density),
        reference_bytes_read=bytes_read(subjects[1].checkpoint) if len(subjects) > 1 else None,
        pairs=pairs,
        acceptance=agreement.same_top if agreement and _is_draft(subjects) else None,
    )


def _checked(how: Evaluating) -> Evaluating:
    """`how` itself; `UsageError` for settings that do not go together."""
    if not (how.data or how.tasks or how.prompts):
        raise UsageError("nothing to evaluate on: give --data, --tasks or --prompts")
    if how.limit is not None and not (how.tasks or how.prompts):
        raise UsageError("limit is for tasks and prompts, and none are given")
    return how


def _prompts(how: Evaluating) -> list[Messages]:
    """Those of the file `how.prompts` that both models answer."""
    if how.prompts is None:
        return []
    return spread(read_prompts(how.prompts), how.limit or COMPARED_ANSWERS)


def _open_models(
    model: str | Path,
    reference: str | Path | None,
    template_kwargs: dict[str, Any] | None,
    needs_answers: bool,
    note: Doing,
) -> list[Opened]:
    """The model and its reference, which for answers defaults to the model's source."""
    own = Opened.of(model, template_kwargs)
    if reference is not None:
        return [own, Opened.of(reference, template_kwargs)]
    source = _source(own.checkpoint, template_kwargs, note) if needs_answers else None
    return [own] if source is None else [own, source]


def _check_tokenizers(opened: Sequence[Opened], how: Evaluating) -> None:
    """`TwellError` if a reference encodes text to other tokens than the model does."""
    own, *others = opened
    paths = [path for _, path in map(kind_and_path, how.data)]
    for reference in others:
        texts = islice(read_texts(paths, how.text_column, own.tokenizer), COMPARED_TEXTS)
        own.refuse_other_tokenizer(reference, texts)


def _load(opened: Sequence[Opened], device: torch.device, doing: Doing) -> list[Subject]:
    loaded = []
    for one in opened:
        doing(f"loading {one.checkpoint.name}")
        loaded.append(one.load(device))
    return loaded


def _score_text(
    subjects: Sequence[Subject], text: GroupedWindows, doing: Doing, progress: Progress
) -> TextResult:
    doing(f"reading {len(text.ids)} windows of {text.ids.shape[1]} tokens")
    reference = subjects[1].model if len(subjects) > 1 else None
    return score_text(subjects[0].checkpoint, subjects[0].model, reference, text, progress)


def _note_unanswered(wrote: Wrote, note: Doing) -> None:
    """Note questions whose prompt fills the context; they count as wrong, as do those without."""
    pairs = zip(wrote.prompts, wrote.answers, strict=True)
    if num_long := sum(bool(prompt) and not answer.tokens for prompt, answer in pairs):
        note(f"{counted(num_long, 'question')} without an answer: the model's context is too short")


def _task_results(marks_of_each: Sequence[Sequence[Marks]]) -> list[TaskResult]:
    """By task, from the marks of the model and, if there is one, of its reference."""
    return [TaskResult.of(*marks) for marks in zip(*marks_of_each, strict=True)]


def _check_code(tasks: Sequence[Task[AnyQuestion]], run_code: bool, note: Doing) -> None:
    """Refuse to run code that is not allowed or cannot be limited; note what is not limited."""
    if not tasks:
        return
    count = sum(len(task.questions) for task in tasks)
    if not run_code:
        raise UsageError(
            f"{', '.join(task.name for task in tasks)}: {count} programs that the model writes "
            f"would be run with their tests, in processes of {limited.SECONDS:g} s and "
            f"{limited.MEMORY >> 30} GiB without a network: allow it with --run-code"
        )
    found = limited.guards()
    if found.why_not is not None:
        raise TwellError(f"{found.why_not}: what a model writes is not run without limits")
    if not found.files:
        note("beware: this kernel has no Landlock, so programs can read what you can read")


def _source(
    checkpoint: Checkpoint, template_kwargs: dict[str, Any] | None, note: Doing
) -> Opened | None:
    """The model that `checkpoint` was made from, if it is known and can be opened."""
    if checkpoint.is_gated_source:
        return None
    try:
        source = opened_source(checkpoint)
        if source is not None:
            return Opened.of(source, template_kwargs)
        note("no --reference, and config.json names no source: what was lost is not known")
        return None
    except TwellError as error:
        note(f"without its source, so what was lost is not known: {error}")
        return None


def _agreement(
    subjects: Sequence[Subject],
    prompts: Sequence[Messages],
    wrote: Sequence[Wrote],
    text: GroupedWindows | None,
    doing: Doing,
    progress: Progress,
) -> tuple[AnswerScore | None, tuple[Pair, ...]]:
    """On the answers to `prompts`, else on those to tasks, else on what follows in the text.

    `SHOWN_PAIRS` of the answers come with the score. None without a reference.
    """
    if len(subjects) < 2:
        return None, ()
    doing("comparing answers")
    own, other = subjects
    if prompts:
        asked = own.all_encoded(prompts)
    elif wrote[0].prompts:
        return _compared(own, other, *_some_of(*wrote))
    else:
        asked = prompts_in(own.tokenizer, text.ids) if text is not None else []
    if not asked:
        return None, ()
    theirs, ours = (
        answers(one.model, own.tokenizer, asked, MAX_TOKENS, progress) for one in (other, own)
    )
    return _compared(own, other, asked, theirs, ours)


def _some_of(ours: Wrote, theirs: Wrote) -> tuple[list[list[int]], list[Answer], list[Answer]]:
    """(prompts, the reference's answers, the model's) of `COMPARED_ANSWERS` questions of tasks,
    which both have answered already."""
    answered = [i for i, answer in enumerate(theirs.answers) if answer.tokens]
    places = spread(answered, COMPARED_ANSWERS)
    return (
        [ours.prompts[i] for i in places],
        [theirs.answers[i] for i in places],
        [ours.answers[i] for i in places],
    )


def _compared(
    own: Subject,
    other: Subject,
    prompts: Sequence[list[int]],
    theirs: Sequence[Answer],
    ours: Sequence[Answer],
) -> tuple[AnswerScore, tuple[Pair, ...]]:
    score = score_answers(own.model, other.model, prompts, theirs, ours)
    rows = zip(prompts, theirs, ours, strict=True)
    shown = spread([row for row in rows if row[1].tokens], SHOWN_PAIRS)
    return score, tuple(pair_of(question_in(own.tokenizer, row[0]), *row[1:]) for row in shown)


def _is_draft(subjects: Sequence[Subject]) -> bool:
    """Whether the model is a fit of its reference, and so can draft for it, by their files."""
    fit, original = (one.checkpoint for one in subjects)
    try:
        find_original(fit, original=original.name)
    except TwellError:
        return False
    return True


def _windows(opened: Sequence[Opened], how: Evaluating) -> GroupedWindows:
    """Windows of the text that all models can read."""
    # at least 2: one token has no next one
    lengths = [window_length(one.checkpoint, how.seq_len, least=2) for one in opened]
    own = opened[0]
    sizes = how.windows, min(lengths), own.checkpoint.config.get("vocab_size")
    return grouped_windows(how.data, how.text_column, own.tokenizer, *sizes)
