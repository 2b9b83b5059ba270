"""twellctl write: text that a model writes itself, to fine-tune its ReLU form on.

A chat model answers in a way that no text of other authors has, and what a sparse form of it never
reads in training it forgets. But the model knows how users begin: after the opening of a user's
turn it draws a question (Xu et al., Magpie, arXiv:2406.08464), and then its answer. That text of a
model's own serves to fit another form of it is known of quantisation (Liu et al., LLM-QAT,
arXiv:2305.17888).
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.decoding.engine import EngineError, Sampling
from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import check_file
from twellctl.models.checkpoint import open_checkpoint
from twellctl.text.tokens import encode_chat, end_of_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from twellctl.decoding.scheduler import Scheduler
    from twellctl.decoding.sequence import Sequence

QUESTION_TOKENS = 128  # at most
_MARK = "\N{LEFT WHITE SQUARE BRACKET}question\N{RIGHT WHITE SQUARE BRACKET}"
_PATIENCE = 100  # texts in a row without a word


@dataclass(frozen=True)
class Written:
    """What is in `out`: texts, and the tokens that fine-tuning reads of them, nearly."""

    out: Path
    texts: int
    tokens: int
    seconds: float


def write(
    model: str | Path,
    out: str | Path,
    *,
    tokens: int = 20_000_000,
    max_tokens: int = 512,
    temperature: float = 0.8,
    batch_size: int = 256,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Let `model`, SiLU or ReLU, write some `tokens` into the jsonl file `out`.

    With a chat template a line holds `messages`, a question and its answer; without one `text`,
    from the beginning of a text on. A text has `max_tokens` at most, beside its question, and
    `batch_size` of them are written at once. Lines go to `out` as they come: what is there when a
    run is interrupted can be used. Raises `TwellError`.
    """
    out = Path(out)
    _check(tokens, max_tokens, temperature, batch_size, seed)
    check_file(out, "the jsonl file", "file to replace (--overwrite)", lambda path: overwrite)
    if out.suffix != ".jsonl":
        raise UsageError(f"{out} is no .jsonl file: finetune knows a text by its suffix")
    checkpoint = open_checkpoint(model)
    checkpoint.require_tokenizer()
    from twellctl.decoding.opening import open_scheduler
    from twellctl.models.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    loaded = load_model(checkpoint)
    scheduler = open_scheduler(loaded, tokenizer.eos_token_id, max_running=batch_size)
    kind = _Texts if tokenizer.chat_template is None else _Chats
    texts = kind(tokenizer, Sampling(max_tokens, temperature), seed, scheduler.context)
    began, num_texts, num_tokens = time.monotonic(), 0, 0
    with out.open("w", encoding="utf-8") as file:
        for row, length in _rows(scheduler, texts, batch_size):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            num_texts, num_tokens = num_texts + 1, num_tokens + length
            progress(min(num_tokens, tokens), tokens)
            if num_tokens >= tokens:
                break
    return Written(out, num_texts, num_tokens, time.monotonic() - began)


def _check(tokens: int, max_tokens: int, temperature: float, batch_size: int, seed: int) -> None:
    for name, value in (("tokens", tokens), ("max-tokens", max_tokens), ("batch-size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} must be 1 or more, got {value}")
    if not 0 < temperature <= 2:
        raise UsageError(f"temperature must be above 0 and at most 2, got {temperature:g}")
    if not 0 <= seed < 2**31:
        raise UsageError(f"seed must be 0 to {2**31 - 1}, got {seed}")


def _rows(
    scheduler: "Scheduler", texts: "_Texts", batch_size: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """(a line, its number of tokens), without end; `batch_size` texts are under way."""
    under_way = empty = 0
    while True:
        while under_way < batch_size:
            scheduler.add(texts.begun())
            under_way += 1
        for sequence, event in scheduler.advance():
            if isinstance(event, EngineError):
                raise TwellError(str(event)) from event
            if event is not None:
                continue
            if (more := texts.continued(sequence, scheduler.eos_tokens)) is not None:
                scheduler.add(more)
                continue
            under_way -= 1
            row = texts.row(sequence, scheduler.eos_tokens)
            empty = 0 if row is not None else empty + 1
            if row is not None:
                yield row, len(sequence.tokens)
            elif empty > _PATIENCE:
                raise TwellError(f"the model ended {empty} texts in a row before their first word")


class _Texts:
    """Plain texts, each from its beginning on."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", sampling: Sampling, seed: int, context: int
    ):
        """`TwellError` if a text may be longer than the `context`."""
        self.tokenizer, self.sampling, self.context, self._seed = tokenizer, sampling, context, seed
        self._num_begun = 0
        self.opening = self._opening()
        self._check_fits()

    def _opening(self) -> list[int]:
        first = self.tokenizer.bos_token_id
        return [end_of_text(self.tokenizer) if first is None else first]

    def _check_fits(self) -> None:
        if len(self.opening) + self.sampling.max_tokens > self.context:
            raise TwellError(
                f"{self.sampling.max_tokens} tokens and what is in front of them are more than the "
                f"model's context of {self.context}: lower --max-tokens"
            )

    def begun(self) -> "Sequence":
        """The next text, of which nothing is written."""
        self._num_begun += 1
        return self._sequence(self.opening, self.sampling.max_tokens, self._num_begun, None)

    def continued(self, sequence: "Sequence", ends: frozenset[int]) -> "Sequence | None":
        """What is to be written behind an ended `sequence`; None: it is complete."""
        return None

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        """The line of a complete `sequence`; None if it says nothing."""
        text = self.text(sequence, ends)
        return {"text": text} if text.strip() else None

    def text(self, sequence: "Sequence", ends: frozenset[int]) -> str:
        """What was drawn behind the prompt."""
        drawn = sequence.tokens[sequence.num_prompt :]
        if drawn and drawn[-1] in ends:
            drawn = drawn[:-1]
        return self.tokenizer.decode(
            drawn, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _sequence(self, prompt: list[int], most: int, number: int, client: Any) -> "Sequence":
        from twellctl.decoding.sequence import Sequence

        how = Sampling(most, self.sampling.temperature, seed=(self._seed << 32) + number)
        return Sequence(prompt, how, client)


class _Chats(_Texts):
    """A question, drawn behind the opening of a user's turn, and its answer.

    `client` of a question is its number, that of an answer (the number, the question).
    """

    def _opening(self) -> list[int]:
        chat = [{"role": "user", "content": _MARK}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        before, mark, _ = text.partition(_MARK)
        if not mark or not before:
            raise TwellError("the chat template has nothing in front of a user's question")
        return self.tokenizer.encode(before, add_special_tokens=False, verbose=False)

    def _check_fits(self) -> None:
        behind = len(encode_chat(self.tokenizer, [{"role": "user", "content": ""}]))
        if behind + QUESTION_TOKENS + self.sampling.max_tokens > self.context:
            raise TwellError(
                f"a question of {QUESTION_TOKENS} tokens and {self.sampling.max_tokens} of an "
                f"answer are more than the model's context of {self.context}: lower --max-tokens"
            )

    def begun(self) -> "Sequence":
        self._num_begun += 1
        return self._sequence(self.opening, QUESTION_TOKENS, self._num_begun, self._num_begun)

    def continued(self, sequence: "Sequence", ends: frozenset[int]) -> "Sequence | None":
        number = sequence.client
        if isinstance(number, tuple) or not (question := self.text(sequence, ends).strip()):
            return None
        prompt = encode_chat(self.tokenizer, [{"role": "user", "content": question}])
        room = self.context - len(prompt)  # broken characters take more tokens than were drawn
        if room < 1:
            return None
        most = min(self.sampling.max_tokens, room)
        return self._sequence(prompt, most, -number % 2**32, (number, question))

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        answer = self.text(sequence, ends).strip()
        if not isinstance(sequence.client, tuple) or not answer:
            return None
        turns = ("user", sequence.client[1]), ("assistant", answer)
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
