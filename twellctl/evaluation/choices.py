"""Multiple-choice questions answered by likelihood, as lm-evaluation-harness does it.

Each choice is read after its question, and the answer is the one whose tokens are likeliest: by
the sum of their log-probabilities, or by that sum divided by the characters of the choice.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twellctl.errors import TwellError
from twellctl.evaluation.questions import Question, Task
from twellctl.evaluation.results import Marks
from twellctl.evaluation.settings import Progress
from twellctl.evaluation.windows import batches
from twellctl.models.head_loss import HeadLoss
from twellctl.text.tokens import check_ids, encode_written, end_of_text, opening_of


@dataclass(frozen=True)
class Continuation:
    """Tokens; the last `scored` are the choice's. `cut`: the first ones were left out."""

    tokens: list[int]
    scored: int
    cut: bool


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    task: Task[Question],
    progress: Progress = lambda done, total: None,
) -> Marks:
    """The questions of `task` that the model answers rightly; `progress` receives choices.

    What is longer than `context` tokens loses its beginning, and its question is counted.
    """
    asked = [
        continuation(tokenizer, question, choice, context)
        for question in task.questions
        for choice in question.choices
    ]
    check_ids(max(max(one.tokens) for one in asked), model.config.vocab_size)
    likelihoods = log_likelihoods(model, asked, progress)
    if any(map(math.isnan, likelihoods)):
        raise TwellError(f"{task.name}: the model computes NaN: go back to one that was sound")
    found = iter(likelihoods)
    cut = iter([one.cut for one in asked])
    acc, acc_norm, num_cut = [], [], 0
    for question in task.questions:
        sums = [next(found) for _ in question.choices]
        means = [s / len(choice) for s, choice in zip(sums, question.choices, strict=True)]
        acc.append(_is_right(sums, question))
        acc_norm.append(_is_right(means, question))
        num_cut += any([next(cut) for _ in question.choices])
    options = tuple(len(question.choices) for question in task.questions)
    return Marks(task.name, tuple(acc), tuple(acc_norm), num_cut, options=options)


def log_likelihoods(
    model: PreTrainedModel,
    continuations: list[Continuation],
    progress: Progress = lambda done, total: None,
) -> list[float]:
    """For each, the sum of the log-probabilities of its scored tokens."""
    head, sums, done = HeadLoss(model), [0.0] * len(continuations), 0
    try:
        for batch in batches([len(one.tokens) for one in continuations]):
            found = _sums(head, [continuations[number] for number in batch], model.device)
            for number, value in zip(batch, found, strict=True):
                sums[number] = value
            done += len(batch)
            progress(done, len(continuations))
    finally:
        head.remove()
    return sums


def _is_right(likelihoods: list[float], question: Question) -> float:
    return float(likelihoods.index(max(likelihoods)) == question.gold)


def continuation(
    tokenizer: PreTrainedTokenizerBase, question: Question, choice: str, context: int | None
) -> Continuation:
    """Question and choice, with a space between them if there is none, which is scored as well.

    Without a `context`, nothing is cut.
    """
    stem = question.query.rstrip()
    gap = question.query[len(stem) :] or ("" if choice[0].isspace() else " ")
    opening = opening_of(tokenizer)  # what it puts after a text would hide the choice
    before = opening + encode_written(tokenizer, stem)
    if not before:  # nothing is in front of the choice, as at the beginning of a text
        before = opening = [end_of_text(tokenizer)]
    whole = opening + encode_written(tokenizer, (stem + gap if stem else "") + choice)
    # where the choice's first characters make one token with the question's last, it has that
    scored = max(1, len(whole) - len(before))
    if context is not None and len(whole) > context:
        return Continuation(whole[-context:], min(scored, context - 1), cut=True)
    return Continuation(whole, scored, cut=False)


@torch.no_grad()
def _sums(head: HeadLoss, batch: list[Continuation], device: torch.device) -> list[float]:
    longest = max(len(one.tokens) for one in batch)
    # padding after a text is not seen by its tokens: any id will do there, and no mask is needed
    ids = torch.tensor([one.tokens + [0] * (longest - len(one.tokens)) for one in batch])
    rows = [
        (number, place)
        for number, one in enumerate(batch)
        for place in range(len(one.tokens) - one.scored, len(one.tokens))
    ]
    numbers, places = torch.tensor(rows).T
    targets = ids[numbers, places, None].to(device)
    states = head.states(ids.to(device))[(numbers * (longest - 1) + places - 1).to(device)]
    found: list[Tensor] = []
    for some in head.logit_rows(len(rows)):
        log_p = head.logits(states[some]).float().log_softmax(-1)
        found.append(log_p.gather(1, targets[some]).flatten())
    sums = torch.zeros(len(batch), dtype=torch.float64)
    return sums.index_add_(0, numbers, torch.cat(found).double().cpu()).tolist()
