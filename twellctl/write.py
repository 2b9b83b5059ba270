"""twellctl write: text that a model writes itself, to fine-tune its ReLU form on.

What a sparse form of a model never reads in training it forgets. A chat model answers in a way that
no text of other authors has. But it knows how users begin: after the opening of a user's turn it
draws a question (Xu et al., Magpie, arXiv:2406.08464), and then its answer. And any model writes of
all that it has read if texts begin with a token drawn from all (Liu et al., LLM-QAT,
arXiv:2305.17888).
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling
from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import check_file
from twellctl.files.workspace import workspace_beside
from twellctl.models.checkpoint import open_checkpoint
from twellctl.text.tokens import chat_text, check_ids
from twellctl.text.written import WRITTEN, is_written_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from twellctl.decoding.scheduler import Scheduler
    from twellctl.decoding.sequence import Sequence

QUESTION_TOKENS = 128  # at most
_MARK = "\N{LEFT WHITE SQUARE BRACKET}question\N{RIGHT WHITE SQUARE BRACKET}"
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to
_PATIENCE = 100  # texts in a row without a word


@dataclass(frozen=True)
class Written:
    """What is in `out`: lines, and the tokens that fine-tuning reads of them, nearly."""

    out: Path
    texts: int
    tokens: int
    seconds: float


def write(
    model: str | Path,
    out: str | Path,
    *,
    tokens: int = 20_000_000,
    documents: float | None = None,
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
    """Let `model`, SiLU or ReLU, write some `tokens` into the jsonl file `out`.

    A line is a chat, `messages`: a question of `QUESTION_TOKENS` at most and an answer of
    `max_tokens` at most. Or it is a document, `text` of `max_tokens` at most behind its first one;
    `documents` is the share of texts that are begun so, None: half, and all where there is no chat
    template. What reaches its limit is cut there. `by` says that this command wrote it.
    `batch_size` texts at most are written at once, fewer where a step takes no more rows. Lines go
    to `out` as they come, and those that are there can be used, however the run ends. `overwrite`
    replaces what this command wrote, once there is a first line. Raises `TwellError`.
    """
    out = Path(out)
    _check(tokens, documents, max_tokens, temperature, batch_size, seed)
    _check_out(out, overwrite)
    checkpoint = open_checkpoint(model, revision=revision)
    checkpoint.require_tokenizer()
    from twellctl.decoding.opening import open_scheduler, told_of_decoder
    from twellctl.models.loading import load_model, load_tokenizer

    if checkpoint.is_only_converted:
        raise TwellError(
            f"{checkpoint.name} was converted and not fine-tuned, so what it writes is noise: give "
            "the SiLU model that it was made from"
        )
    with workspace_beside(out.resolve()):  # two that write at once would lose each other's lines
        tokenizer = load_tokenizer(checkpoint)
        if documents is None:
            documents = 1.0 if tokenizer.chat_template is None else 0.5
        how = (
            tokenizer,
            checkpoint.config.get("vocab_size"),
            Sampling(max_tokens, temperature),
            seed,
        )
        kinds = [_Documents(*how)] if documents else []
        kinds += [_Chats(*how)] if documents < 1 else []
        doing(f"loading {checkpoint.name}")
        loaded = load_model(checkpoint)
        scheduler = open_scheduler(loaded, tokenizer.eos_token_id, max_running=batch_size)
        for kind in kinds:
            scheduler.eos_tokens |= kind.special  # nothing behind them is read
            kind.fit_into(scheduler.context)
        doing(f"writing by {told_of_decoder(loaded)}")
        began, num_texts, num_tokens = time.monotonic(), 0, 0
        rows = _rows(scheduler, _by_turns(kinds, documents), batch_size)
        first = next(rows)  # before anything in OUT is lost
        try:
            with out.open("w", encoding="utf-8") as file:
                for row, length in chain([first], rows):
                    file.write(json.dumps(row | WRITTEN, ensure_ascii=False) + "\n")
                    file.flush()
                    num_texts, num_tokens = num_texts + 1, num_tokens + length
                    progress(min(num_tokens, tokens), tokens)
                    if num_tokens >= tokens:
                        break
        except OSError as error:
            raise TwellError(
                f"{out} could not be written: {error.strerror or error}; it holds {num_texts} texts"
            ) from error
        except KeyboardInterrupt:
            note(f"{out} holds {num_texts} texts, {num_tokens} tokens")
            raise
        return Written(out, num_texts, num_tokens, time.monotonic() - began)


def _check(
    tokens: int,
    documents: float | None,
    max_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
) -> None:
    for name, value in (("tokens", tokens), ("max-tokens", max_tokens), ("batch-size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} must be 1 or more, got {value}")
    if documents is not None and not 0 <= documents <= 1:
        raise UsageError(f"documents must be 0 to 1, a share, got {documents:g}")
    if not 0 < temperature <= 2:
        raise UsageError(f"temperature must be above 0 and at most 2, got {temperature:g}")
    if not 0 <= seed < 2**31:
        raise UsageError(f"seed must be 0 to {2**31 - 1}, got {seed}")


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix != ".jsonl":
        raise UsageError(f"{out} is no .jsonl file: finetune knows a text by its suffix")
    check_file(out, "the jsonl file", "text that write has written", is_written_file)
    if out.exists() and not overwrite:
        raise TwellError(f"{out} exists: choose another name, or replace it with --overwrite")


def _by_turns(kinds: list["_Kind"], share: float) -> Iterator["_Kind"]:
    """Which of `kinds` the next text is of, without end: `share` of them are of the first."""
    for number in count():
        is_first = int((number + 1) * share) > int(number * share)
        yield kinds[0] if is_first else kinds[-1]


def _rows(
    scheduler: "Scheduler", kinds: Iterator["_Kind"], batch_size: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """(a line, its number of tokens), without end; `batch_size` texts are under way, or what fit.

    All wait while a prompt is read, so prompts wait until there are some for one forward.
    """
    at_once = min(batch_size, scheduler.max_running)
    together = max(1, min(scheduler.prompts_together, at_once // 8))  # rows that may stand idle
    under_way = 0
    ready: list[Sequence] = []
    while True:
        while under_way < at_once:
            ready.append(next(kinds).begun())
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
            kind = sequence.client.kind
            if (answer := kind.answered(sequence, scheduler.eos_tokens)) is not None:
                ready.append(answer)
                continue
            under_way -= 1
            row = kind.row(sequence, scheduler.eos_tokens)
            if row is not None:
                kind.num_empty = 0
                yield row, len(sequence.tokens)
                continue
            kind.num_empty += 1
            if kind.num_empty > _PATIENCE:
                raise TwellError(
                    f"the model ended {kind.num_empty} {kind.name} in a row before their first "
                    f"word: {kind.doubt}"
                )


@dataclass(frozen=True)
class _Begun:
    """What a sequence is: of which kind, the how manieth, and behind which question."""

    kind: "_Kind"
    number: int
    question: str | None = None


class _Kind:
    """Texts of one kind: how they begin, and what line they become."""

    name: str
    doubt: str  # where they end before their first word
    num_empty = 0  # of those in a row

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocabulary: int | None,
        sampling: Sampling,
        seed: int,
    ):
        self.tokenizer, self.sampling = tokenizer, sampling
        self._vocabulary, self._seed = vocabulary, seed
        self._num_begun = self._context = 0
        added = tokenizer.added_tokens_decoder.items()
        self.special = {number for number, token in added if token.special}  # no text

    def fit_into(self, context: int) -> None:
        """Texts shall have `context` tokens at most; `TwellError` if longer ones are asked for."""
        raise NotImplementedError

    def begun(self) -> "Sequence":
        """The next text, of which nothing is written."""
        raise NotImplementedError

    def answered(self, sequence: "Sequence", ends: frozenset[int]) -> "Sequence | None":
        """What follows on a `sequence` that has ended; None: its text is whole."""
        return None

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        """The line of a text whose last `sequence` has ended; None if it says nothing."""
        raise NotImplementedError

    def _fit(self, taken: int, context: int) -> None:
        """Beside `taken` tokens there must be room for those that are to be written."""
        self._context = context
        if (room := context - taken) < 1:
            raise TwellError(f"the model's context of {context} tokens is too short to write in")
        if self.sampling.max_tokens > room:
            raise UsageError(
                f"max-tokens must be at most {room}, the rest of the model's context of {context}, "
                f"got {self.sampling.max_tokens}"
            )

    def _text(self, tokens: list[int], ends: frozenset[int]) -> str:
        """Of what was drawn, without the token that ended it."""
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _encoded(self, text: str, **how: Any) -> list[int]:
        tokens = self.tokenizer.encode(text, verbose=False, **{"add_special_tokens": False} | how)
        check_ids(max(tokens, default=0), self._vocabulary)
        return tokens

    def _sequence(self, prompt: list[int], most: int, seed: int, what: _Begun) -> "Sequence":
        from twellctl.decoding.sequence import Sequence

        how = Sampling(most, self.sampling.temperature, seed=(self._seed << 32) + seed)
        return Sequence(prompt, how, what)


class _Chats(_Kind):
    """A question, drawn behind the opening of a user's turn, and its answer."""

    name = "chats"
    doubt = "is it one that its chat template was made for?"

    def __init__(self, *how: Any, **named: Any):
        """`TwellError` where there is no chat template, or one that does not take a question."""
        super().__init__(*how, **named)
        if self.tokenizer.chat_template is None:
            raise TwellError(
                "the model has no chat template, so it writes no chats: leave out --documents"
            )
        before, mark, behind = self._asked(_MARK).partition(_MARK)
        self._opening = self._encoded(before)
        if not mark or not self._opening:
            raise TwellError(
                "the chat template has nothing in front of a user's question, so the model cannot "
                "draw one: write chats another way, and documents with --documents 1"
            )
        self._closing = next(iter(behind.split()), "")  # where a question ends, by its text

    def fit_into(self, context: int) -> None:
        self._fit(QUESTION_TOKENS + len(self._encoded(self._asked(_MARK))), context)

    def begun(self) -> "Sequence":
        self._num_begun += 1
        what = _Begun(self, self._num_begun)
        return self._sequence(self._opening, QUESTION_TOKENS, what.number, what)

    def answered(self, sequence: "Sequence", ends: frozenset[int]) -> "Sequence | None":
        what = sequence.client
        if what.question is not None or not (question := self._question(sequence, ends)):
            return None
        prompt = self._encoded(self._asked(question))
        room = self._context - len(prompt)  # broken characters take more tokens than were drawn
        if room < 1:
            return None
        most = min(self.sampling.max_tokens, room)
        what = _Begun(self, what.number, question)
        return self._sequence(prompt, most, -what.number % 2**32, what)

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        question = sequence.client.question
        answer = self._text(sequence.tokens[sequence.num_prompt :], ends).strip()
        if question is None or not answer:
            return None
        turns = ("user", question), ("assistant", answer)
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    def _question(self, sequence: "Sequence", ends: frozenset[int]) -> str:
        text = self._text(sequence.tokens[sequence.num_prompt :], ends)
        return (text.partition(self._closing)[0] if self._closing else text).strip()

    def _asked(self, question: str) -> str:
        """The text of a chat up to where the answer begins."""
        messages = [{"role": "user", "content": question}]
        try:
            return chat_text(self.tokenizer, messages, opens_answer=True)
        except ValueError as error:
            raise TwellError(str(error)) from error


class _Documents(_Kind):
    """Text behind a first token, drawn from all that are whole characters, which counts to none."""

    name = "documents"
    doubt = "it writes none"

    def __init__(self, *how: Any, **named: Any):
        super().__init__(*how, **named)
        tokenizer = self.tokenizer
        self._before = self._encoded("", add_special_tokens=True)  # as the model's texts begin
        if len(self._before) > 1 and self._before[-1] == tokenizer.eos_token_id:
            self._before.pop()  # and as they end
        known = min(len(tokenizer), self._vocabulary or len(tokenizer))
        texts = tokenizer.batch_decode([[token] for token in range(known)])
        self._first = [
            token
            for token, text in enumerate(texts)
            if text.strip() and _BROKEN not in text and token not in self.special
        ]

    def fit_into(self, context: int) -> None:
        self._fit(len(self._before) + 1, context)

    def begun(self) -> "Sequence":
        self._num_begun += 1
        first = random.Random((self._seed << 32) + self._num_begun).choice(self._first)
        prompt, what = [*self._before, first], _Begun(self, self._num_begun)
        return self._sequence(prompt, self.sampling.max_tokens, 2**31 + self._num_begun, what)

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        if not self._text(sequence.tokens[sequence.num_prompt :], ends):  # it ended at once
            return None
        text = self._text(sequence.tokens[len(self._before) :], ends)
        self._encoded(text)  # of a tokenizer that fits the model
        return {"text": text}
