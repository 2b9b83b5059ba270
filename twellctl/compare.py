"""twellctl compare: what two models answer to the same prompts, side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.errors import counted
from twellctl.evaluation.agreement import score_answers, spread
from twellctl.evaluation.answers import answers
from twellctl.evaluation.results import AnswerScore
from twellctl.evaluation.settings import Comparing
from twellctl.evaluation.subject import Doing, Progress, Subject
from twellctl.models.loading import default_device
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
class Pair:
    """Both answers to `prompt`: the `common` text, and how each model continues after it.

    The first `tokens` tokens are the same; `agrees`: all are. `repeats`: which of the two, base and
    sparse, end in a loop. `ended`: which ended.
    """

    prompt: str
    common: str
    rest: tuple[str, str]
    tokens: int
    agrees: bool
    ended: tuple[bool, bool]
    repeats: tuple[bool, bool]


@dataclass(frozen=True)
class Compared(Shown):
    """The `names` of the two models, their answers, and how far the answers agree."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    score: AnswerScore


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
    models = [Subject.opened(name, chat_template_kwargs) for name in (base, sparse)]
    one, other = models
    one.refuse_other_tokenizer(other, texts, "the second model")
    found = []
    for model in models:
        doing(f"loading {model.checkpoint.name}")
        model.load(default_device())
    encoded = [one.encoded(prompt) for prompt in asked]
    for model in models:
        doing(f"{model.checkpoint.name} answers {counted(len(asked), 'prompt')}")
        found.append(answers(model.model, model.tokenizer, encoded, how.max_tokens, progress))
    doing("comparing answers")
    score = score_answers(other.model, one.model, encoded, *found)
    pairs = []
    for prompt, *both in zip(texts, *found, strict=True):
        common = _common(*(answer.text for answer in both))
        pairs.append(
            Pair(
                prompt,
                common,
                tuple(answer.text[len(common) :] for answer in both),
                both[0].agreeing(both[1]),
                both[0].tokens == both[1].tokens,
                tuple(answer.ended for answer in both),
                tuple(answer.repeats for answer in both),
            )
        )
    return Compared((str(base), str(sparse)), tuple(pairs), score)


def _common(one: str, other: str) -> str:
    """The whole words with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    size = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    while size and one != other and not one[size - 1].isspace():
        size -= 1
    return one[:size]
