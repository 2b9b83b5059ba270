"""What a sparse model's answers are worth, in words. No torch.

Loss and KL say little by themselves. So runs were judged by tasks that were executed, and a curve
through them tells what share of what the reference solves a model keeps, by its KL on answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# (KL on answers, nats a token; share kept of the tasks that the SiLU model solves; the run), all of
# Qwen2.5-Coder-Instruct, greedy. A share's standard error is some 0.03. The cuts are made from it.
TASKS = 591  # executed for each run: HumanEval and MBPP sanitized
RUNS = (
    (0.019, 0.89, "0.5B, fitted, 20M tokens"),
    (0.0185, 0.936, "0.5B, fitted with steps, 22 %"),
    (0.0192, 0.93, "0.5B, fitted, 8M tokens at a tenth of the rate"),
    (0.0205, 0.876, "0.5B, fitted, 8M tokens at a quarter, sure ones first"),
    (0.0213, 0.899, "0.5B, fitted, 8M tokens at a quarter"),
    (0.0231, 0.941, "1.5B, fitted, 12M tokens"),
    (0.0245, 0.939, "1.5B, fitted with steps, 14.5 %"),
    (0.0252, 0.954, "1.5B, fitted with steps, 14.4 %"),
    (0.0249, 0.919, "0.5B, fitted on 3M tokens, 22 %"),
    (0.0265, 0.883, "0.5B, fitted with steps, 14 %"),
    (0.0289, 0.875, "0.5B, fitted with steps, 15 %"),
    (0.0289, 0.882, "0.5B, fitted with slower steps, 15 %"),
    (0.0293, 0.936, "1.5B, fitted with steps, 15 %"),
    (0.0295, 0.926, "0.5B, fitted on 1M tokens, 22 %"),
    (0.0352, 0.829, "0.5B, fitted, 8M tokens at 0.7 of the rate"),
    (0.037, 0.908, "1.5B, fitted with steps, 12 %"),
    (0.0382, 0.794, "0.5B, fitted with steps, 10 %"),
    (0.0453, 0.913, "1.5B, fitted on 0.9M tokens, 18 %"),
    (0.0558, 0.764, "0.5B, fitted, 15 %"),
    (0.0888, 0.742, "1.5B, fitted with steps, 4.7 %"),
    (0.095, 0.73, "1.5B, fitted with steps, 5 %"),
    (0.033, 0.80, "0.5B, fitted, 20M tokens, priced"),
    (0.038, 0.85, "0.5B, fitted on 650,000 tokens"),
    (0.047, 0.76, "0.5B, fitted, 17M tokens, half of them source"),
    (0.053, 0.87, "1.5B, fitted, full rank"),
    (0.063, 0.87, "1.5B, fitted, half rank"),
    (0.075, 0.65, "0.5B, SiLU that hardens, 17M tokens"),
    (0.085, 0.81, "0.5B, fitted on 100,000 tokens"),
    (0.102, 0.79, "1.5B, fitted, half rank, gates shifted"),
    (0.153, 0.63, "0.5B, fitted, quarter rank"),
    (0.288, 0.52, "0.5B, fitted, gates shifted to 10 %"),
    (0.637, 0.28, "0.5B, fitted, gates shifted to 5 %"),
)
# (share kept from which on, in words)
STEPS = (
    (0.95, "hardly to be told apart from the reference"),
    (0.88, "close to the reference: few answers are lost"),
    (0.78, "like the reference, but some exact answers are lost"),
    (0.60, "many exact answers are lost"),
    (0.0, "exact answers are likely lost"),
)
FEWEST = 100  # tasks that the reference solves, from which on they speak for themselves


@dataclass(frozen=True)
class Verdict:
    """`step` counts from 0, the best, to 4; `kept` is the share of what the reference solves."""

    step: int
    kept: float
    words: str
    because: str

    @property
    def is_bad(self) -> bool:
        return self.step >= 3

    def __str__(self) -> str:
        return f"{self.words} ({self.because})"


def curve(runs: Sequence[tuple[float, float, str]] = RUNS) -> tuple[float, float]:
    """(a, b) of kept = exp(-exp(a) KL^b), by least squares over log KL and log -log kept."""
    x = [math.log(kl) for kl, *_ in runs]
    y = [math.log(-math.log(kept)) for _, kept, *_ in runs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    pairs = [(at - mean_x, value - mean_y) for at, value in zip(x, y, strict=True)]
    b = sum(at * value for at, value in pairs) / sum(at * at for at, _ in pairs)
    return mean_y - b * mean_x, b


def kept_at(kl: float, runs: Sequence[tuple[float, float, str]] = RUNS) -> float:
    """The share of what the reference solves that models of this KL on answers keep."""
    if kl <= 0:
        return 1.0
    a, b = curve(runs)
    return math.exp(-math.exp(a + b * math.log(kl)))


def step_of(kept: float) -> int:
    return next(number for number, (least, _) in enumerate(STEPS) if kept >= least)


def by_answers(kl: float, answers: int) -> Verdict:
    """Of a model whose KL on so many `answers` of the reference is `kl`."""
    kept = kept_at(kl)
    least = min(share for _, share, _ in RUNS)
    share = f"about {kept:.0%}" if kept >= least else f"less than {least:.0%}"
    because = (
        f"KL {kl:.4f} on {answers} answers; at that, code models kept {share} of what their SiLU "
        f"model solves, by {len(RUNS)} runs of which {TASKS} tasks each were executed"
    )
    return _verdict(kept, because)


def judged(
    tasks: Sequence[tuple[Sequence[float], Sequence[float]]], answers: tuple[float, int] | None
) -> Verdict | None:
    """By `tasks`, right or wrong of the model and of the reference, if there are enough of them;
    else by `answers`, (KL, how many); else None."""
    solved = round(sum(sum(theirs) for _, theirs in tasks))
    if solved >= FEWEST:
        return by_tasks(round(sum(sum(ours) for ours, _ in tasks)), solved)
    return None if answers is None else by_answers(*answers)


def verdict_of(evaluation: dict[str, Any], answers: dict[str, Any] | None) -> Verdict | None:
    """Of the JSON of `eval`, whose tasks go first, and of an `AnswerScore`."""
    tasks = [
        (task["right"], task["reference_right"])
        for task in evaluation.get("tasks") or []
        if task.get("reference_right")
    ]
    return judged(tasks, answers and (float(answers["kl"]["mean"]), int(answers["answers"])))


def by_tasks(solved: int, of_reference: int) -> Verdict:
    """Of a model whose tasks were asked: it solves so many, the reference so many."""
    kept = min(1.0, solved / of_reference)
    return _verdict(
        kept, f"{solved} tasks solved, {of_reference} by the reference: {kept:.0%} kept"
    )


def _verdict(kept: float, because: str) -> Verdict:
    step = step_of(kept)
    return Verdict(step, kept, STEPS[step][1], because)
