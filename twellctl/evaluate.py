"""twellctl eval: loss and density on text, agreement with a reference, multiple-choice tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twellctl.bundle.twell_model import lay_weights, put_over_twell, use_kernels
from twellctl.errors import UsageError
from twellctl.evaluation import choices, harness
from twellctl.evaluation.questions import Task, is_local, read_tasks
from twellctl.evaluation.results import Evaluation, Marks, TaskResult
from twellctl.evaluation.text import refuse_other_tokenizer, score_text
from twellctl.evaluation.windows import dtype_for, facts, window_length
from twellctl.firing.grouping import GroupedWindows, grouped_windows, kind_and_path
from twellctl.here.own_kernels import own_kernels
from twellctl.models.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twellctl.models.loading import default_device, load_model, load_tokenizer
from twellctl.text.reading import read_texts

COMPARED_TEXTS = 64  # that the tokenizers of model and reference both encode
Paths = str | Path | Sequence[str | Path]
Doing = Callable[[str], None]
Progress = Callable[[int, int], None]


def evaluate(
    model: str | Path,
    data: Paths = (),
    *,
    reference: str | Path | None = None,
    tasks: Paths = (),
    text_column: str = "text",
    windows: int = 128,
    seq_len: int | None = None,
    limit: int | None = None,
    device: torch.device | None = None,
    doing: Doing = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Measure `model`, ReLU or SiLU, on windows of the text in `data`, on `tasks`, or on both.

    `data`, `windows` and `seq_len` are as in `profile`. `reference` is measured beside it: a model
    with the same tokenizer, such as the one it was made from. `tasks` are files of questions
    (`twellctl.evaluation.questions`), folders of them, or names of lm-eval's tasks; the first
    `limit` questions of each are asked. Computes in bf16 on CUDA, in float32 on the CPU. `doing`
    receives what comes next, `progress(done, total)` windows or choices. Raises `TwellError`.
    """
    data, tasks = _listed(data), _listed(tasks)
    if not data and not tasks:
        raise UsageError("nothing to evaluate on: give --data, --tasks or both")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be >= 1, got {limit}")
    if limit is not None and not tasks:
        raise UsageError("limit is for tasks, and none are given: of text, windows says how much")
    subjects = [_Subject.opened(name) for name in (model, reference) if name is not None]
    local = read_tasks([task for task in tasks if is_local(task)], limit)
    text = _windows(subjects, data, text_column, windows, seq_len) if data else None
    _check_tokenizers(subjects, data, text_column)
    names = [task for task in tasks if not is_local(task)]
    foreign = harness.load_tasks(names, doing) if names else {}
    for subject in subjects:
        doing(f"loading {subject.checkpoint.name}")
        subject.load(device or default_device())
    result = None
    if text is not None:
        doing(f"reading {len(text.ids)} windows of {text.ids.shape[1]} tokens")
        other = subjects[1].model if len(subjects) > 1 else None
        result = score_text(subjects[0].checkpoint, subjects[0].model, other, text, progress)
    marks = [subject.answers(local, foreign, limit, doing, progress) for subject in subjects]
    return Evaluation(
        model=str(model),
        fingerprint=fingerprint(subjects[0].checkpoint),
        reference=None if reference is None else str(reference),
        data=tuple(data),
        **facts(subjects[0].model),
        limit=limit,
        text=result,
        tasks=tuple(TaskResult.of(*of_a_task) for of_a_task in zip(*marks, strict=True)),
    )


@dataclass
class _Subject:
    """A model that is measured; `model` once it is loaded."""

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel | None = None

    @classmethod
    def opened(cls, name: str | Path) -> "_Subject":
        checkpoint = open_checkpoint(name)
        if not checkpoint.is_silu:
            checkpoint.require_relu()
        return cls(checkpoint, load_tokenizer(checkpoint))

    @property
    def context(self) -> int | None:
        return self.checkpoint.config.get("max_position_embeddings")

    def load(self, device: torch.device) -> None:
        self.model = load_model(self.checkpoint, dtype=dtype_for(device), device=device)

    def answers(
        self,
        local: Sequence[Task],
        foreign: dict[str, Any],
        limit: int | None,
        doing: Doing,
        progress: Progress,
    ) -> list[Marks]:
        """Its marks in all tasks, those of lm-eval last."""
        if local or foreign:
            self._go_over_twell()
        marks = []
        for task in local:
            doing(f"{self.checkpoint.name} answers {task.name}")
            marks.append(choices.answer(self.model, self.tokenizer, self.context, task, progress))
        if foreign:
            marks += harness.answer(self.model, self.tokenizer, self.context, foreign, limit, doing)
        return marks

    def _go_over_twell(self) -> None:
        """On a GPU let each sparse FFN go the way that is measured to be fastest there."""
        if self.model.device.type == "cuda" and not self.checkpoint.is_silu:
            put_over_twell(self.model, self.checkpoint.twell)
            use_kernels(self.model, own_kernels())
            lay_weights(self.model)


def _listed(given: Paths) -> list[str]:
    return [str(path) for path in ([given] if isinstance(given, str | Path) else given)]


def _windows(
    subjects: Sequence[_Subject],
    data: list[str],
    text_column: str,
    windows: int,
    seq_len: int | None,
) -> GroupedWindows:
    """Windows of the text that all `subjects` can read."""
    # at least 2: one token has no next one
    lengths = [window_length(one.checkpoint, windows, seq_len, least=2) for one in subjects]
    own = subjects[0]
    vocabulary = own.checkpoint.config.get("vocab_size")
    return grouped_windows(data, text_column, own.tokenizer, windows, min(lengths), vocabulary)


def _check_tokenizers(subjects: Sequence[_Subject], data: list[str], text_column: str) -> None:
    own, *others = subjects
    for other in others:
        paths = [path for _, path in map(kind_and_path, data)]
        texts = islice(read_texts(paths, text_column, own.tokenizer), COMPARED_TEXTS)
        refuse_other_tokenizer(
            other.checkpoint, other.tokenizer, own.checkpoint, own.tokenizer, texts
        )
