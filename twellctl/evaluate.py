"""twellctl eval: loss and density on text, agreement with a reference, tasks."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from twellctl.errors import TwellError, UsageError
from twellctl.evaluation import limited
from twellctl.evaluation.agreement import compare_answers, prompts_in, score_answers, spread
from twellctl.evaluation.questions import Task, read_tasks
from twellctl.evaluation.results import AnswerScore, Evaluation, TaskResult
from twellctl.evaluation.settings import Evaluating, Paths
from twellctl.evaluation.subject import Doing, Progress, Subject, Wrote
from twellctl.evaluation.windows import facts, score_text, window_length
from twellctl.firing.grouping import GroupedWindows, grouped_windows, kind_and_path
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import default_device, fingerprint
from twellctl.settings import chosen
from twellctl.text.reading import read_prompts, read_texts

COMPARED_TEXTS = 64  # that the tokenizers of model and reference both encode
COMPARED_ANSWERS = 64  # at most, without --limit


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
    the model answers in its own words, it defaults to the source named in config.json. `tasks` are
    files of questions (`twellctl.evaluation.questions`) or folders of them; the first `limit`
    questions of each are asked. Code written for tests is run only with `run_code`.

    Both models answer `limit` of the prompts in `prompts` (by default `COMPARED_ANSWERS`), else the
    tasks, else the beginnings of the windows. Computes in bf16 on CUDA and in float32 on the CPU.
    `doing` receives what comes next, `progress(done, total)` windows, choices, answers or programs,
    and `note` messages for the user. Raises `TwellError`.
    """
    how = chosen(Evaluating, settings | {"data": data, "tasks": tasks})
    if not (how.data or how.tasks or how.prompts):
        raise UsageError("nothing to evaluate on: give --data, --tasks or --prompts")
    if how.limit is not None and not (how.tasks or how.prompts):
        raise UsageError("limit is for tasks and prompts, and none are given")
    questions, asked = read_tasks(how.tasks, how.limit), []
    if how.prompts is not None:
        asked = spread(read_prompts(how.prompts), how.limit or COMPARED_ANSWERS)
    own_words = [task for task in questions if task.kind != "choices"]
    _check_code([task for task in own_words if task.kind == "tests"], how.run_code, note)
    given, names = chat_template_kwargs, (model, how.reference)
    subjects = [Subject.opened(name, given) for name in names if name is not None]
    if how.reference is None and (own_words or asked):
        subjects += _source(subjects[0].checkpoint, given, note)
    text = _windows(subjects, how) if how.data else None
    own, *others = subjects
    paths = [path for _, path in map(kind_and_path, how.data)]
    for reference in others:
        texts = islice(read_texts(paths, how.text_column, own.tokenizer), COMPARED_TEXTS)
        own.refuse_other_tokenizer(reference, texts)
    for subject in subjects:
        doing(f"loading {subject.checkpoint.name}")
        subject.load(device or default_device())
    result = None
    if text is not None:
        doing(f"reading {len(text.ids)} windows of {text.ids.shape[1]} tokens")
        other = subjects[1].model if len(subjects) > 1 else None
        result = score_text(subjects[0].checkpoint, subjects[0].model, other, text, progress)
    wrote = [subject.write(own_words, doing, progress) for subject in subjects]
    agreement = None
    if len(subjects) > 1:
        doing("comparing answers")
        agreement = _agreement(subjects, asked, wrote, text, progress)
    choice = [task for task in questions if task.kind == "choices"]
    marks = [subject.choose(choice, doing, progress) for subject in subjects]
    marked = [one.marks(own_words, doing, progress) for one in wrote]
    return Evaluation(
        model=str(model),
        fingerprint=fingerprint(subjects[0].checkpoint),
        reference=subjects[1].checkpoint.name if len(subjects) > 1 else None,
        data=tuple(how.data),
        **facts(subjects[0].model),
        limit=how.limit,
        text=result,
        answers=agreement,
        tasks=tuple(
            TaskResult.of(*of_a_task)
            for of_a_task in (*zip(*marks, strict=True), *zip(*marked, strict=True))
        ),
    )


def _check_code(tasks: Sequence[Task], run_code: bool, note: Doing) -> None:
    """Refuse to run what nobody allowed, or nothing can hold; say what is not held."""
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


def _source(checkpoint: Checkpoint, given: dict[str, Any] | None, note: Doing) -> list[Subject]:
    """What `checkpoint` was made from, where config.json names it and it is to be had."""
    source = None if checkpoint.is_gated_source else checkpoint.twell.get("source")
    if source is None:
        if not checkpoint.is_gated_source:
            note("no --reference, and config.json names no source: what was lost is not known")
        return []
    try:
        return [Subject.opened(source, given)]
    except TwellError as error:
        note(f"without its source, so what was lost is not known: {error}")
        return []


def _agreement(
    subjects: Sequence[Subject],
    asked: Sequence[list[dict[str, str]]],
    wrote: Sequence[Wrote],
    text: GroupedWindows | None,
    progress: Progress,
) -> AnswerScore | None:
    """On the answers to `asked`, else on those to tasks, else on what follows in the text."""
    own, other = subjects
    if not asked and wrote[0].prompts:
        places = spread(range(len(wrote[0].prompts)), COMPARED_ANSWERS)
        prompts, theirs, ours = (
            [found[i] for i in places]
            for found in (wrote[0].prompts, wrote[1].answers, wrote[0].answers)
        )
        return score_answers(own.model, other.model, prompts, theirs, ours)
    if asked:
        prompts = [own.encoded(prompt) for prompt in asked]
    else:
        prompts = prompts_in(own.tokenizer, text.ids) if text is not None else []
    if not prompts:
        return None
    return compare_answers(own.model, other.model, own.tokenizer, prompts, progress=progress)


def _windows(subjects: Sequence[Subject], how: Evaluating) -> GroupedWindows:
    """Windows of the text that all `subjects` can read."""
    # at least 2: one token has no next one
    lengths = [window_length(one.checkpoint, how.seq_len, least=2) for one in subjects]
    own = subjects[0]
    sizes = how.windows, min(lengths), own.checkpoint.config.get("vocab_size")
    return grouped_windows(how.data, how.text_column, own.tokenizer, *sizes)
