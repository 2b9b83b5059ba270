"""twellctl write: chats that a model writes itself, to fine-tune its ReLU form on.

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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling
from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import check_file
from twellctl.files.workspace import workspace_beside
from twellctl.models.checkpoint import open_checkpoint
from twellctl.text.tokens import chat_text, check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from twellctl.decoding.scheduler import Scheduler
    from twellctl.decoding.sequence import Sequence

QUESTION_TOKENS = 128  # at most
_MARK = "\N{LEFT WHITE SQUARE BRACKET}question\N{RIGHT WHITE SQUARE BRACKET}"
_PATIENCE = 100  # chats in a row without a word


@dataclass(frozen=True)
class Written:
    """What is in `out`: chats, and the tokens that fine-tuning reads of them, nearly."""

    out: Path
    chats: int
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
    revision: str | None = None,
    overwrite: bool = False,
    doing: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Written:
    """Let the chat model `model`, SiLU or ReLU, write some `tokens` into the jsonl file `out`.

    A line holds `messages`: a question of `QUESTION_TOKENS` at most and an answer of `max_tokens`
    at most; what reaches its limit is cut there. `batch_size` chats are written at once. Lines go
    to `out` as they come, and those that are there can be used, however the run ends. Raises
    `TwellError`.
    """
    out = Path(out)
    _check(tokens, max_tokens, temperature, batch_size, seed)
    _check_out(out, overwrite)
    checkpoint = open_checkpoint(model, revision=revision)
    checkpoint.require_tokenizer()
    from twellctl.decoding.opening import open_scheduler
    from twellctl.models.loading import load_model, load_tokenizer

    if checkpoint.is_only_converted:
        raise TwellError(
            f"{checkpoint.name} was converted and not fine-tuned, so what it writes is noise: give "
            "the SiLU model that it was made from"
        )
    with workspace_beside(out.resolve()):  # two that write at once would lose each other's lines
        chats = _Chats(
            load_tokenizer(checkpoint),
            checkpoint.config.get("vocab_size"),
            Sampling(max_tokens, temperature),
            seed,
        )
        doing(f"loading {checkpoint.name}")
        eos = chats.tokenizer.eos_token_id
        scheduler = open_scheduler(load_model(checkpoint), eos, max_running=batch_size)
        scheduler.eos_tokens |= chats.special  # nothing behind them is read
        chats.fit_into(scheduler.context)
        doing("writing")
        began, count, num_tokens = time.monotonic(), 0, 0
        rows = _rows(scheduler, chats, batch_size)
        first = next(rows)  # before anything in OUT is lost
        try:
            with out.open("w", encoding="utf-8") as file:
                for row, length in chain([first], rows):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()
                    count, num_tokens = count + 1, num_tokens + length
                    progress(min(num_tokens, tokens), tokens)
                    if num_tokens >= tokens:
                        break
        except OSError as error:
            raise TwellError(
                f"{out} could not be written: {error.strerror or error}; it holds {count} chats"
            ) from error
        except KeyboardInterrupt:
            note(f"{out} holds {count} chats, {num_tokens} tokens")
            raise
        return Written(out, count, num_tokens, time.monotonic() - began)


def _check(tokens: int, max_tokens: int, temperature: float, batch_size: int, seed: int) -> None:
    for name, value in (("tokens", tokens), ("max-tokens", max_tokens), ("batch-size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} must be 1 or more, got {value}")
    if not 0 < temperature <= 2:
        raise UsageError(f"temperature must be above 0 and at most 2, got {temperature:g}")
    if not 0 <= seed < 2**31:
        raise UsageError(f"seed must be 0 to {2**31 - 1}, got {seed}")


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix != ".jsonl":
        raise UsageError(f"{out} is no .jsonl file: finetune knows a text by its suffix")
    check_file(out, "the jsonl file", "jsonl file", Path.is_file)
    if out.exists() and not overwrite:
        raise TwellError(f"{out} exists: choose another name, or replace it with --overwrite")


def _rows(
    scheduler: "Scheduler", chats: "_Chats", batch_size: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """(a line, its number of tokens), without end; `batch_size` chats are under way, or what fit.

    All wait while a prompt is read, so prompts wait until there are some for one forward.
    """
    at_once = min(batch_size, scheduler.max_running)
    together = max(1, min(scheduler.prompts_together, at_once // 8))  # rows that may stand idle
    under_way = empty = 0
    ready: list[Sequence] = []
    while True:
        while under_way < at_once:
            ready.append(chats.begun())
            under_way += 1
        if len(ready) >= together or not scheduler.busy:
            for sequence in sorted(ready, key=lambda sequence: sequence.num_prompt):
                scheduler.add(sequence)  # one forward takes prompts of about the same length
            ready.clear()
        for sequence, event in scheduler.advance():
            if isinstance(event, OutOfMemory):
                raise TwellError("out of memory: lower --batch-size or --max-tokens") from event
            if isinstance(event, EngineError):
                raise TwellError(str(event)) from event
            if event is not None:
                continue
            if (answer := chats.answered(sequence, scheduler.eos_tokens)) is not None:
                ready.append(answer)
                continue
            under_way -= 1
            row = chats.row(sequence, scheduler.eos_tokens)
            empty = 0 if row is not None else empty + 1
            if row is not None:
                yield row, len(sequence.tokens)
            elif empty > _PATIENCE:
                raise TwellError(
                    f"the model ended {empty} chats in a row before their first word: is it one "
                    "that its chat template was made for?"
                )


class _Chats:
    """A question, drawn behind the opening of a user's turn, and its answer.

    `client` of a question's sequence is its number, that of an answer's (the number, the question).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocabulary: int | None,
        sampling: Sampling,
        seed: int,
    ):
        """`TwellError` where there is no chat template, or one that does not take a question."""
        if tokenizer.chat_template is None:
            raise TwellError(
                "the model has no chat template, so it writes no chats: give finetune text of the "
                "kind that it shall go on"
            )
        self.tokenizer, self.sampling = tokenizer, sampling
        self._vocabulary, self._seed = vocabulary, seed
        self._num_begun = self._context = 0
        before, mark, behind = self._asked(_MARK).partition(_MARK)
        self._opening = self._encoded(before)
        if not mark or not self._opening:
            raise TwellError(
                "the chat template has nothing in front of a user's question, so the model cannot "
                "draw one: write chats another way"
            )
        self._closing = next(iter(behind.split()), "")  # where a question ends, by its text
        added = tokenizer.added_tokens_decoder.items()
        self.special = {number for number, token in added if token.special}  # no text

    def fit_into(self, context: int) -> None:
        """Chats shall have `context` tokens at most; `TwellError` if longer ones are asked for."""
        self._context = context
        room = context - QUESTION_TOKENS - len(self._encoded(self._asked(_MARK)))
        if room < 1:
            raise TwellError(f"the model's context of {context} tokens is too short for chats")
        if self.sampling.max_tokens > room:
            raise UsageError(
                f"max-tokens must be at most {room}, the rest of the model's context of {context}, "
                f"got {self.sampling.max_tokens}"
            )

    def begun(self) -> "Sequence":
        """The next chat, of which nothing is written."""
        self._num_begun += 1
        return self._sequence(self._opening, QUESTION_TOKENS, self._num_begun, self._num_begun)

    def answered(self, sequence: "Sequence", ends: frozenset[int]) -> "Sequence | None":
        """The answer to begin behind a question that has ended; None behind an answer."""
        number = sequence.client
        if isinstance(number, tuple) or not (question := self._question(sequence, ends)):
            return None
        prompt = self._encoded(self._asked(question))
        room = self._context - len(prompt)  # broken characters take more tokens than were drawn
        if room < 1:
            return None
        most = min(self.sampling.max_tokens, room)
        return self._sequence(prompt, most, -number % 2**32, (number, question))

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        """The line of a chat whose last `sequence` has ended; None if it says nothing."""
        answer = self._text(sequence, ends).strip()
        if not isinstance(sequence.client, tuple) or not answer:
            return None
        turns = ("user", sequence.client[1]), ("assistant", answer)
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    def _question(self, sequence: "Sequence", ends: frozenset[int]) -> str:
        text = self._text(sequence, ends)
        return (text.partition(self._closing)[0] if self._closing else text).strip()

    def _text(self, sequence: "Sequence", ends: frozenset[int]) -> str:
        """What was drawn, without the token that ended it."""
        drawn = sequence.tokens[sequence.num_prompt :]
        if drawn and drawn[-1] in ends:
            drawn = drawn[:-1]
        return self.tokenizer.decode(drawn, clean_up_tokenization_spaces=False)

    def _asked(self, question: str) -> str:
        """The text of a chat up to where the answer begins."""
        messages = [{"role": "user", "content": question}]
        try:
            return chat_text(self.tokenizer, messages, opens_answer=True)
        except ValueError as error:
            raise TwellError(str(error)) from error

    def _encoded(self, text: str) -> list[int]:
        tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        check_ids(max(tokens, default=0), self._vocabulary)
        return tokens

    def _sequence(self, prompt: list[int], most: int, number: int, client: Any) -> "Sequence":
        from twellctl.decoding.sequence import Sequence

        how = Sampling(most, self.sampling.temperature, seed=(self._seed << 32) + number)
        return Sequence(prompt, how, client)
