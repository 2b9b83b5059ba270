"""What an evaluation found, and its JSON: written by `twellctl eval`. No torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from twellctl.evaluation.kept import chart_of, point_of
from twellctl.evaluation.pairs import Pair
from twellctl.firing.profiled import KindDensity
from twellctl.models.verdict import Verdict, by_answers, judged
from twellctl.report.charts import Points
from twellctl.report.notebook import Shown

SCHEMA_VERSION = 1
SHOWN = 3  # lost questions of a task
VERSION_KEY = "eval_schema_version"  # by which such a file is known


@dataclass(frozen=True)
class TextScore:
    """Means over `tokens` predictions of a next token; losses and `kl` in nats a token.

    Of a `reference`: `kl` is KL(reference || model), `same_top` the share of predictions whose
    likeliest token is the same. All three are None without one; all means are for no tokens.
    """

    tokens: int
    cross_entropy: float | None
    perplexity: float | None
    reference_cross_entropy: float | None = None
    kl: float | None = None
    same_top: float | None = None

    @classmethod
    def of(cls, tokens: int, sums: Sequence[float]) -> "TextScore":
        """From sums over the tokens: cross-entropy and, of a reference, its own, KL and same."""
        if not tokens:
            return TextScore(0, None, None)
        loss, *agreement = (value / tokens for value in sums)
        perplexity = math.exp(loss) if loss < 700 else None  # beyond it is no float
        return TextScore(tokens, loss, perplexity, *agreement)


@dataclass(frozen=True, kw_only=True)
class KindScore(TextScore):
    """The same for text of one kind."""

    kind: str

    @classmethod
    def of_kind(cls, kind: str, tokens: int, sums: Sequence[float]) -> "KindScore":
        """As `TextScore.of`."""
        return KindScore(**vars(TextScore.of(tokens, sums)), kind=kind)


@dataclass(frozen=True)
class TextResult:
    """A text in windows: the score of all, by kind of text, and the density of what fired.

    Of a text of fewer tokens (`text_tokens`) than the windows hold, they overlap.
    """

    windows: int
    seq_len: int
    text_tokens: int
    score: TextScore
    by_kind: tuple[KindScore, ...]
    density: float
    density_by_layer: tuple[float, ...]
    density_by_kind: tuple[KindDensity, ...]


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error, which one value alone does not have."""

    mean: float
    stderr: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if len(values) < 2:
            return cls(statistics.fmean(values), None)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    @classmethod
    def over(cls, means: Sequence["Mean"]) -> Self:
        """The mean of independent means, all of the same weight."""
        errors = [mean.stderr for mean in means if mean.stderr is not None]
        is_known = len(errors) == len(means)
        stderr = math.hypot(*errors) / len(errors) if is_known else None
        return cls(statistics.fmean(mean.mean for mean in means), stderr)


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers, by the names of lm-eval.

    `acc`: the right choice is the likeliest one; `acc_norm`: it is by likelihood per character,
    None for a task answered in words.
    """

    acc: Mean
    acc_norm: Mean | None

    @classmethod
    def over(cls, tasks: Sequence["Accuracy"]) -> Self:
        """The mean of tasks, all of the same weight; `acc` of a task without `acc_norm`."""
        normalised = [task.acc if task.acc_norm is None else task.acc_norm for task in tasks]
        return cls(Mean.over([task.acc for task in tasks]), Mean.over(normalised))


@dataclass(frozen=True)
class Lost:
    """A question that the reference answers rightly and the model does not, and both answers."""

    question: str
    reference: str
    answer: str


@dataclass(frozen=True)
class Marks:
    """Right (1) or wrong (0), a question each, in order; `kind` as of a `Task`.

    In a task of choices, `options` counts the choices of each question, and `cut` those questions
    that were longer than the context and lost their beginning. In the model's own words, `asked`
    are the questions, `texts` its answers, and `cut` counts answers without an end.
    """

    task: str
    acc: tuple[float, ...]
    acc_norm: tuple[float, ...] | None = None
    cut: int = 0
    kind: str = "choices"
    options: tuple[int, ...] = ()
    asked: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def accuracy(self) -> Accuracy:
        acc_norm = None if self.acc_norm is None else Mean.of(self.acc_norm)
        return Accuracy(Mean.of(self.acc), acc_norm)

    def less(self, other: "Marks") -> Accuracy:
        """The difference, question by question: chance that both share is not counted twice."""
        acc = [a - b for a, b in zip(self.acc, other.acc, strict=True)]
        acc_norm = None
        if self.acc_norm is not None and other.acc_norm is not None:
            pairs = zip(self.acc_norm, other.acc_norm, strict=True)
            acc_norm = Mean.of([a - b for a, b in pairs])
        return Accuracy(Mean.of(acc), acc_norm)

    def lost(self, reference: "Marks") -> list[Lost]:
        """Answers in its own words that the `reference` has, the shortest first."""
        rows = zip(self.asked, reference.texts, self.texts, strict=True)
        marks = zip(rows, reference.acc, self.acc, strict=True)
        lost = [Lost(*row) for row, theirs, ours in marks if theirs > ours]
        return sorted(lost, key=lambda one: len(one.question) + len(one.reference))


@dataclass(frozen=True)
class AnswerScore:
    """Agreement on `tokens` of `answers`, which the reference wrote and both models read.

    `kl` is KL(reference || model) in nats a token, its error over the answers; one token in a
    hundred has more than `kl_p99`. Shares of the tokens: `same_top` have the same likeliest one; of
    the `confident` ones the reference is sure; of `flips` it is sure and the model chooses another.
    Each model also wrote its own answers: `agree` counts those that are the same to the end, and
    the others part after `part_after` tokens (median). `ended` counts answers with an end, and
    `repeat` those that end in a loop.
    """

    answers: int
    tokens: int
    kl: Mean
    kl_p99: float
    same_top: float
    confident: float
    flips: float
    agree: int
    part_after: float | None
    ended: int
    reference_ended: int
    repeat: int
    reference_repeat: int

    @property
    def verdict(self) -> Verdict:
        return by_answers(*self.judged_by)

    @property
    def judged_by(self) -> tuple[float, int, int, float]:
        return self.kl.mean, self.answers, self.tokens, self.same_top


@dataclass(frozen=True)
class TaskResult:
    """One task: `chance` is what guessing gets.

    `difference` is the model's accuracy minus the reference's. For answers in the model's own
    words, whose `kind` is not "choices": `right` by question, and how many were `won` and `lost`
    against the reference, with the shortest lost ones. `cut` is as in `Marks`.
    """

    task: str
    questions: int
    chance: float
    cut: int
    accuracy: Accuracy
    reference: Accuracy | None = None
    difference: Accuracy | None = None
    kind: str = "choices"
    right: tuple[float, ...] = ()
    reference_right: tuple[float, ...] | None = None
    lost_ones: tuple[Lost, ...] = ()

    @property
    def won(self) -> int:
        return sum(a > b for a, b in self._pairs)

    @property
    def lost(self) -> int:
        return sum(a < b for a, b in self._pairs)

    @property
    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.right, self.reference_right or self.right, strict=True))

    @classmethod
    def of(cls, marks: Marks, reference: Marks | None = None) -> Self:
        """In its own words nothing is got by guessing."""
        count, is_written = len(marks.acc), marks.kind != "choices"
        compared: dict[str, Any] = {}
        if reference is not None:
            compared = {"reference": reference.accuracy, "difference": marks.less(reference)}
        if is_written and reference is not None:
            compared["reference_right"] = reference.acc
            compared["lost_ones"] = tuple(marks.lost(reference)[:SHOWN])
        return cls(
            task=marks.task,
            questions=count,
            chance=sum(1 / num for num in marks.options) / count,
            cut=marks.cut,
            accuracy=marks.accuracy,
            kind=marks.kind,
            right=marks.acc if is_written else (),
            **compared,
        )

    @classmethod
    def over(cls, tasks: Sequence["TaskResult"]) -> Self:
        """The mean of `tasks`, under that name."""
        return cls(
            task="mean",
            questions=sum(task.questions for task in tasks),
            chance=statistics.fmean(task.chance for task in tasks),
            cut=sum(task.cut for task in tasks),
            accuracy=Accuracy.over([task.accuracy for task in tasks]),
            reference=_mean_if_all([task.reference for task in tasks]),
            difference=_mean_if_all([task.difference for task in tasks]),
        )


def _mean_if_all(found: Sequence[Accuracy | None]) -> Accuracy | None:
    """The mean of `found`; None unless every task has one."""
    known = [accuracy for accuracy in found if accuracy is not None]
    return Accuracy.over(known) if len(known) == len(found) else None


@dataclass(frozen=True)
class Evaluation(Shown):
    """A measured model, whose weights have that `fingerprint`.

    `text` is None without data, `answers` without a reference and prompts; `limit`: questions of
    each task at most. A step of one token reads `bytes_read` of linear layers in the blocks
    (models/bytes_read.py); None where it is not known how many neurons fire. `pairs`: some of the
    answers that were compared, with the reference's.

    `acceptance`: if the reference is the fit's original, the share of its tokens that the fit would
    draft right (--exact), reading its own keys and values; a draft, which reads the original's, is
    right more often. Else None.
    """

    model: str
    fingerprint: str
    reference: str | None
    data: tuple[str, ...]
    dtype: str
    device: str
    versions: dict[str, str]
    limit: int | None
    text: TextResult | None
    answers: AnswerScore | None
    tasks: tuple[TaskResult, ...]
    bytes_read: int | None = None
    reference_bytes_read: int | None = None
    pairs: tuple[Pair, ...] = ()
    acceptance: float | None = None

    @property
    def verdict(self) -> Verdict | None:
        """By the tasks in its own words, if there are enough, else by the answers."""
        written = [
            (task.right, task.reference_right)
            for task in self.tasks
            if task.reference_right is not None
        ]
        return judged(written, None if self.answers is None else self.answers.judged_by)

    @property
    def mean(self) -> TaskResult | None:
        """The mean of the tasks of choices; None unless there are several."""
        choices = [task for task in self.tasks if task.kind == "choices"]
        return TaskResult.over(choices) if len(choices) > 1 else None

    def to_chart(self) -> Points:
        """The tasks it keeps against bytes; `TwellError` if it does not say either."""
        return chart_of([point_of(self.to_json(), f"the evaluation of {self.model}")])

    def to_json(self) -> dict:
        """The content of the file: its version first, then all fields, mean and verdict last."""
        more: dict[str, Any] = {"mean": self.mean, "verdict": self.verdict}
        added = {key: None if value is None else asdict(value) for key, value in more.items()}
        return {VERSION_KEY: SCHEMA_VERSION} | asdict(self) | added
