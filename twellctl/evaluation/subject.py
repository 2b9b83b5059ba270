"""A model that is measured: opened, loaded, and asked in its own words or to choose."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twellctl.bundle.twell_model import lay_weights, put_over_twell, use_kernels
from twellctl.errors import LeftOut, TwellError, counted, usable
from twellctl.evaluation import choices, questions
from twellctl.evaluation.answers import Answer, answers
from twellctl.evaluation.questions import InOwnWords, Question, Task
from twellctl.evaluation.results import Marks
from twellctl.evaluation.settings import Doing, Progress
from twellctl.evaluation.windows import dtype_for
from twellctl.here.own_kernels import own_kernels
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import load_model, load_tokenizer
from twellctl.text.thinking import leaves_thinking_open
from twellctl.text.tokens import Messages, check_ids, encode_prompt, encode_written

logger = logging.getLogger(__name__)
_LAST_OF_PROMPT = 16  # tokens, in which the beginning of thinking is looked for
_COMPARED = 10_000  # characters of each text that both tokenizers encode


@dataclass(frozen=True)
class Wrote:
    """What the model `name` answered to the questions of some tasks, one after the other."""

    name: str
    prompts: list[list[int]]
    answers: list[Answer]

    def marks(
        self, tasks: Sequence[Task[InOwnWords]], doing: Doing, progress: Progress
    ) -> list[Marks]:
        """The marks of the answers, by task. Code that was written for tests is run."""
        found, rest = [], iter(self.answers)
        for task in tasks:
            ours = [next(rest) for _ in task.questions]
            if task.kind == "tests":
                doing(f"running what {self.name} wrote for {task.name}")
            texts = tuple(answer.text for answer in ours)
            found.append(
                Marks(
                    task.name,
                    questions.right(task.questions, texts, progress),
                    cut=sum(not answer.ended for answer in ours),
                    kind=task.kind,
                    asked=tuple(question.prompt for question in task.questions),
                    texts=texts,
                )
            )
        return found


@dataclass(frozen=True)
class Opened:
    """A model that will be measured, checked but not loaded."""

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(
        cls, name: str | Path | Checkpoint, template_kwargs: dict[str, Any] | None = None
    ) -> "Opened":
        """The ReLU or gated model `name`; `template_kwargs` go to its chat template."""
        checkpoint = open_checkpoint(name)
        if not checkpoint.is_gated_source:
            checkpoint.require_relu()
        return Opened(checkpoint, load_tokenizer(checkpoint, given=template_kwargs))

    def refuse_other_tokenizer(
        self, other: "Opened", texts: Iterable[str], called: str = "reference"
    ) -> None:
        """`TwellError` unless `other` has the same tokens, and both encode `texts` to them."""
        pair = self, other
        sizes = [one.checkpoint.config.get("vocab_size") for one in pair]
        same = sizes[0] == sizes[1] and self.tokenizer.get_vocab() == other.tokenizer.get_vocab()
        for text in texts if same else ():
            ours, theirs = (encode_written(one.tokenizer, text[:_COMPARED]) for one in pair)
            same = same and ours == theirs
        if not same:
            raise TwellError(
                f"{called} {other.checkpoint.name} has a different tokenizer from "
                f"{self.checkpoint.name}: their tokens cannot be compared; give the model it was "
                "made from"
            )

    def load(self, device: torch.device) -> "Subject":
        model = load_model(self.checkpoint, dtype=dtype_for(device), device=device)
        return Subject(self.checkpoint, self.tokenizer, model)


@dataclass(frozen=True)
class Subject(Opened):
    """A loaded model that is measured."""

    model: PreTrainedModel

    def encoded(self, prompt: str | Messages) -> list[int]:
        """The tokens of a prompt in the chat template; of texts alone where there is none."""
        if not isinstance(prompt, str) and self.tokenizer.chat_template is None:
            prompt = "\n\n".join(message["content"] for message in prompt)
        tokens = encode_prompt(self.tokenizer, prompt)
        if not tokens:
            raise LeftOut("the chat template makes no token of it: correct the template")
        check_ids(max(tokens), self.model.config.vocab_size)
        return tokens

    def all_encoded(
        self, prompts: Iterable[str | Messages], what: str = "prompts"
    ) -> list[list[int]]:
        """The tokens of each of `prompts`; none of those that the chat template does not take.

        These are counted in the log, as `what` they are. `TwellError` if it takes none.
        """
        prompts = list(prompts)

        def encoded(place: int) -> tuple[int, list[int]]:
            return place, self.encoded(prompts[place])

        found = dict(usable(range(len(prompts)), encoded, logger.warning, what))
        return [found.get(place, []) for place in range(len(prompts))]

    def write(
        self, tasks: Sequence[Task[InOwnWords]], max_tokens: int, doing: Doing, progress: Progress
    ) -> Wrote:
        """Its answers to the questions of `tasks`, in its own words."""
        name = self.checkpoint.name
        asked = [questions.messages_of(question) for task in tasks for question in task.questions]
        prompts = self.all_encoded(asked, "questions, which count as wrong,")
        if not prompts:
            return Wrote(name, [], [])
        doing(f"{name} answers {counted(len(prompts), 'question')}")
        made = answers(self.model, self.tokenizer, prompts, max_tokens, progress)
        return Wrote(name, prompts, [self._whole(*one) for one in zip(prompts, made, strict=True)])

    def _whole(self, prompt: list[int], answer: Answer) -> Answer:
        """`answer`, with the beginning of its thinking if the chat template wrote that."""
        opened = leaves_thinking_open(self.tokenizer.decode(prompt[-_LAST_OF_PROMPT:]))
        return replace(answer, text=f"<think>\n{answer.text}") if opened else answer

    def choose(
        self, tasks: Sequence[Task[Question]], doing: Doing, progress: Progress
    ) -> list[Marks]:
        """Its marks in tasks of choices."""
        if tasks:
            self._use_twell()
        marks, context = [], self.checkpoint.context
        for task in tasks:
            doing(f"{self.checkpoint.name} answers {task.name}")
            marks.append(choices.answer(self.model, self.tokenizer, context, task, progress))
        return marks

    def _use_twell(self) -> None:
        """On a GPU, compute each sparse FFN as is measured to be fastest there."""
        if self.model.device.type == "cuda" and self.checkpoint.activation == "relu":
            put_over_twell(self.model, self.checkpoint.twell)
            use_kernels(self.model, own_kernels())
            lay_weights(self.model)
