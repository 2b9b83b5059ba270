"""What a sparse model's answers are worth, in words. No torch.

Loss and KL say little by themselves. So runs were judged by executed tasks. A curve through them
predicts, from a model's KL on answers, the share that it keeps of what the reference solves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twellctl.errors import counted

# kept = exp(-exp(A) KL^B): a curve through runs of Qwen2.5-Coder-Instruct, greedy, whose tasks were
# executed (tests/judged_runs.py). A share's standard error is some 0.03.
A, B = 0.5267, 0.73808
RUNS, TASKS = 47, 591  # of each run: HumanEval and MBPP sanitized
LEAST_KEPT = 0.28  # of any of them: what is said to be less has no figure
# (share kept from which on, in words)
STEPS = (
    (0.95, "hardly to be told apart from the reference"),
    (0.88, "close to the reference: few answers are lost"),
    (0.78, "like the reference, but some exact answers are lost"),
    (0.60, "many exact answers are lost"),
    (0.0, "exact answers are likely lost"),
)
FEWEST = 100  # tasks that the reference solves, from which on they speak for themselves
# Of answers: with fewer their KL is chance. And the runs, in which over 90 % of the tokens were the
# same where KL was small, say nothing of models that agree in guessing.
FEWEST_ANSWERS, FEWEST_TOKENS, LEAST_SAME = 8, 500, 0.70


@dataclass(frozen=True)
class Verdict:
    """`step` counts from 0, the best, to 4; `kept` is the share of what the reference solves.

    Both are None where there is none, and `because` says why.
    """

    step: int | None
    kept: float | None
    words: str
    because: str

    @property
    def is_bad(self) -> bool:
        return self.step is not None and self.step >= 3

    def __str__(self) -> str:
        return f"{self.words} ({self.because})"


def kept_at(kl: float) -> float:
    """The share of what the reference solves that models of this KL on answers keep."""
    return math.exp(-math.exp(A + B * math.log(kl))) if kl > 0 else 1.0


def step_of(kept: float) -> int:
    return next(number for number, (least, _) in enumerate(STEPS) if kept >= least)


def by_answers(kl: float, answers: int, tokens: int, same_top: float) -> Verdict:
    """The verdict on a model whose KL on a number of `answers` of the reference is `kl`.

    `same_top` is the share of their `tokens` at which both models rank the same token first.
    """
    kept = kept_at(kl)
    if answers < FEWEST_ANSWERS or tokens < FEWEST_TOKENS:
        seen = f"{counted(answers, 'answer')} of {counted(tokens, 'token')}"
        return _none(f"{seen}, it takes {FEWEST_ANSWERS} of {FEWEST_TOKENS} together")
    if same_top < LEAST_SAME and not _verdict(kept, "").is_bad:
        return _none(f"KL {kl:.4f}, but {same_top:.2%} same tokens: the reference itself guesses")
    share = f"about {kept:.0%}" if kept >= LEAST_KEPT else f"less than {LEAST_KEPT:.0%}"
    because = (
        f"KL {kl:.4f} on {answers} answers; at that, code models kept {share} of what their SiLU "
        f"model solves, by {RUNS} runs of {TASKS} executed tasks each"
    )
    return _verdict(kept, because)


def judged(
    tasks: Sequence[tuple[Sequence[float], Sequence[float]]],
    answers: tuple[float, int, int, float] | None,
) -> Verdict | None:
    """By `tasks`, the marks of the model and of the reference, if the reference solves enough.

    Else by `answers`, the arguments of `by_answers`; else None.
    """
    solved = round(sum(sum(theirs) for _, theirs in tasks))
    if solved >= FEWEST:
        own = round(sum(sum(ours) for ours, _ in tasks))
        kept = min(1.0, own / solved)
        return _verdict(kept, f"{own} tasks solved, {solved} by the reference: {kept:.0%} kept")
    return None if answers is None else by_answers(*answers)


def verdict_of(evaluation: dict[str, Any], answers: dict[str, Any] | None) -> Verdict | None:
    """The verdict of `judged` on the JSON of `eval`, and on that of an `AnswerScore`."""
    tasks = [
        (task["right"], task["reference_right"])
        for task in evaluation.get("tasks") or []
        if task.get("reference_right")
    ]
    if not answers:
        return judged(tasks, None)
    kl, counts = float(answers["kl"]["mean"]), (int(answers["answers"]), int(answers["tokens"]))
    return judged(tasks, (kl, *counts, float(answers["same_top"])))


def _none(because: str) -> Verdict:
    return Verdict(None, None, "no verdict", because)


def _verdict(kept: float, because: str) -> Verdict:
    step = step_of(kept)
    return Verdict(step, kept, STEPS[step][1], because)
