"""Tasks of lm-evaluation-harness (the extra `eval`), answered by a model that is loaded here.

The harness brings the tasks, makes the prompts and judges the answers; this makes `Marks` of it.
Most tasks are downloaded from the Hugging Face hub when they are first used.
"""

import contextlib
import difflib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twellctl.errors import TwellError, bounded, reason, shown
from twellctl.evaluation.questions import HARNESS_SUFFIXES
from twellctl.evaluation.results import Marks
from twellctl.here.machine import pip_install

# by what the tasks of the paper are called there
PAPER = (
    "arc_easy",
    "arc_challenge",
    "hellaswag",
    "piqa",
    "openbookqa",
    "winogrande",
    "commonsense_qa",
)
_BATCH = 16  # choices that lm-eval reads at once; it keeps all their logits, in float32


def load_tasks(
    names: Sequence[str], doing: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The harness's task objects, by name, their data downloaded; "paper": the paper's seven.

    A name is one of `lm-eval ls tasks`, or a YAML file of the harness's own form. `TwellError` if
    lm-eval is not installed, and for what it does not have, cannot load or answers otherwise than
    by the likelihoods of choices.
    """
    wanted = [one for name in names for one in (PAPER if name == "paper" else (name,))]
    try:
        with _quiet():
            from lm_eval.tasks import TaskManager

            manager = TaskManager()
    except ImportError as error:
        raise TwellError(
            f"{', '.join(wanted)}: tasks by name come from lm-eval, which cannot be imported "
            f"({reason(error)}): {pip_install('eval')}, or give a file of questions"
        ) from error
    for name in wanted:
        if name not in manager.all_tasks and not _is_yaml(name):
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            raise TwellError(
                f"no task {shown(name)}: neither a file or folder here nor one of lm-eval"
                + (f", did you mean {near[0]}?" if near else "; see 'lm-eval ls tasks'")
            )
    found, failed = {}, {}
    for name in wanted:
        doing(f"lm-eval loads {name}")
        try:
            with _quiet():
                found |= manager.load([name])["tasks"]
        except Exception as error:  # whatever the hub, or a task's own code, may raise
            failed[name] = f"{type(error).__name__}: {bounded(reason(error), 300)}"
            if isinstance(error, ConnectionError):  # asked several times, for half a minute
                break
    if failed:
        raise TwellError(
            f"lm-eval cannot load {', '.join(failed)} ({next(iter(failed.values()))}): its tasks "
            "are downloaded from the Hugging Face hub; run this once where that can be reached"
        )
    for name, task in found.items():
        if task.OUTPUT_TYPE != "multiple_choice":
            raise TwellError(
                f"{name} of lm-eval is no multiple-choice task ({task.OUTPUT_TYPE}): run lm-eval "
                "itself on the exported model"
            )
    return found


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    tasks: dict[str, Any],
    limit: int | None = None,
    doing: Callable[[str], None] = lambda text: None,
) -> list[Marks]:
    """Which questions of each task the model answers rightly, the first `limit` of each."""
    with _quiet():
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_BATCH)
    marks = []
    for name, task in tasks.items():
        doing(f"lm-eval asks {name}")
        with _quiet():
            found = evaluate(judged, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
        marks.append(_marks(name, found["samples"][name], tokenizer, context))
    return marks


def _marks(
    name: str, samples: list[dict], tokenizer: PreTrainedTokenizerBase, context: int | None
) -> Marks:
    if "acc" not in samples[0]:
        raise TwellError(f"{name} of lm-eval has no accuracy: run lm-eval itself on the export")
    has_norm = "acc_norm" in samples[0]
    return Marks(
        task=name,
        options=tuple(len(sample["filtered_resps"]) for sample in samples),
        answers=tuple(map(_answer, samples)),
        acc=tuple(float(sample["acc"]) for sample in samples),
        acc_norm=tuple(float(s["acc_norm"]) for s in samples) if has_norm else None,
        cut=sum(_is_cut(sample, tokenizer, context) for sample in samples),
    )


def _answer(sample: dict) -> str:
    """The choice that is right, the first of several: lm-eval has its place, or its text."""
    target = sample["target"]
    first = target[0] if isinstance(target, list) else target
    return sample["arguments"][first][1].strip() if isinstance(first, int) else first


def _is_cut(sample: dict, tokenizer: PreTrainedTokenizerBase, context: int | None) -> bool:
    """Whether some prompt of a question is longer than the context, and was cut by lm-eval."""
    prompts = ["".join(map(str, asked)) for asked in sample["arguments"]]
    lengths = [len(tokenizer.encode(prompt, verbose=False)) for prompt in prompts]
    return context is not None and max(lengths) > context


def _is_yaml(name: str) -> bool:
    return Path(name).suffix in HARNESS_SUFFIXES and Path(name).is_file()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No notes, advice or progress bars from lm-eval and what it uses; errors are raised."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels, made = [logger.level for logger in loggers], tqdm.__init__
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    tqdm.__init__ = lambda bar, *given, **how: made(bar, *given, **how | {"disable": True})
    try:
        yield
    finally:
        tqdm.__init__ = made
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
