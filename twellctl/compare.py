"""twellctl compare: what two models answer to the same prompts, side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.errors import counted
from twellctl.evaluation.agreement import score_answers, spread
from twellctl.evaluation.answers import answers
from twellctl.evaluation.pairs import Pair, pair_of
from twellctl.evaluation.results import AnswerScore
from twellctl.evaluation.settings import Comparing, Doing, Progress
from twellctl.evaluation.subject import Opened
from twellctl.models.loading import default_device
from twellctl.report.charts import Curves, Line, Panel, short_name
from twellctl.report.notebook import Shown
from twellctl.settings import chosen
from twellctl.text.reading import read_prompts

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function is_palindrome(text) that ignores case and spaces.",
    "What is 17 times 23? Think step by step.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
    "Name the planets of the solar system in order, one a line.",
    "Explain in two sentences why the sky is blue.",
    "Translate into French: Where is the nearest train station?",
    "List three advantages and three disadvantages of working from home.",
)
ASKED = 8  # of a file of prompts, without --limit


@dataclass(frozen=True)
class Compared(Shown):
    """The `names` of the two models, their answers, and how far the answers agree.

    `left_out` counts prompts that fill the models' context, so that there is no answer.
    """

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    score: AnswerScore
    left_out: int = 0

    def to_chart(self) -> Curves:
        """The share of the answers that are still the same after so many tokens."""
        parted = [pair.tokens for pair in self.pairs if not pair.agrees]
        last = max((pair.tokens for pair in self.pairs), default=0)
        x = sorted({0, *parted, last})
        same = [1 - sum(at <= tokens for at in parted) / max(1, len(self.pairs)) for tokens in x]
        title = "Answers still the same after so many tokens"
        base, sparse = map(short_name, self.names)
        return Curves(
            f"{sparse} beside {base}",
            [Panel(title, "tokens of the answer", x, [Line("same", same)], steps=True)],
            counted(len(self.pairs), "answer"),
        )


def compare(
    base: str | Path,
    sparse: str | Path,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    doing: Doing = lambda text: None,
    progress: Progress = lambda done, total: None,
    **settings: Any,
) -> Compared:
    """Let both models, SiLU or ReLU, answer prompts greedily, with at most `max_tokens` each.

    `settings` are the fields of `Comparing`. `limit` evenly spaced prompts of the file `prompts`
    are asked (by default `ASKED`), or without a file `PROMPTS`. Raises `TwellError`, also for
    models with different tokenizers.
    """
    how = chosen(Comparing, settings)
    asked = list(PROMPTS) if how.prompts is None else read_prompts(how.prompts)
    asked = spread(asked, how.limit or ASKED)
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in asked]
    opened = [Opened.of(name, chat_template_kwargs) for name in (base, sparse)]
    opened[0].refuse_other_tokenizer(opened[1], texts, "the second model")
    models = []
    for model in opened:
        doing(f"loading {model.checkpoint.name}")
        models.append(model.load(default_device()))
    one, other = models
    encoded = one.all_encoded(asked)
    found = []
    for model in models:
        doing(f"{model.checkpoint.name} answers {counted(len(asked), 'prompt')}")
        found.append(answers(model.model, model.tokenizer, encoded, how.max_tokens, progress))
    doing("comparing answers")
    score = score_answers(other.model, one.model, encoded, *found)
    rows = list(zip(texts, *found, strict=True))
    pairs = tuple(pair_of(*row) for row in rows if row[1].tokens)
    num_asked = sum(map(bool, encoded))
    return Compared((str(base), str(sparse)), pairs, score, left_out=num_asked - len(pairs))
