"""twellctl write: text that a model writes itself, to fine-tune its ReLU form on.

What a sparse form of a model never reads in training it forgets. A chat model answers in a way that
no text of other authors has, and it knows more than any text at hand. So it writes chats and
documents (drawn.py), many at a time.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.decoding.engine import EngineError, OutOfMemory
from twellctl.drawn import Chats, Documents, Kind
from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import check_file
from twellctl.files.workspace import workspace_beside
from twellctl.models.checkpoint import open_checkpoint
from twellctl.text.written import WRITTEN, is_written_file

if TYPE_CHECKING:
    from twellctl.decoding.scheduler import Scheduler
    from twellctl.decoding.sequence import Sequence

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
    max_tokens: int | None = None,
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

    A line is a chat, `messages`: a question of `drawn.QUESTION_TOKENS` at most and an answer of
    `max_tokens` at most. Or it is a document, `text` of `max_tokens` at most behind its first one.
    What reaches its limit is cut there; `max_tokens` None is `drawn.MAX_TOKENS`, or what the
    model's context leaves. `documents` is the share of texts that are begun as such, None: half,
    and all where there is no chat template. `by` says that this command wrote a line.

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
            max_tokens,
            temperature,
            seed,
        )
        kinds = [Documents(*how)] if documents else []
        kinds += [Chats(*how)] if documents < 1 else []
        doing(f"loading {checkpoint.name}")
        loaded = load_model(checkpoint)
        # nothing behind special tokens is read
        ends = {tokenizer.eos_token_id}.union(*(kind.special for kind in kinds))
        scheduler = open_scheduler(loaded, ends, max_running=batch_size)
        for kind in kinds:
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
    max_tokens: int | None,
    temperature: float,
    batch_size: int,
    seed: int,
) -> None:
    for name, value in (("tokens", tokens), ("max-tokens", max_tokens), ("batch-size", batch_size)):
        if value is not None and value < 1:
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


def _by_turns(kinds: list[Kind], share: float) -> Iterator[Kind]:
    """Which of `kinds` the next text is of, without end: `share` of them are of the first."""
    for number in count():
        is_first = int((number + 1) * share) > int(number * share)
        yield kinds[0] if is_first else kinds[-1]


def _rows(
    scheduler: "Scheduler", kinds: Iterator[Kind], batch_size: int
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
