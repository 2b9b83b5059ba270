"""twellctl write: text that a model writes itself, to fit and to train its ReLU form on.

What a sparse form of a model never reads in training it forgets. A chat model answers in a way that
no text of other authors has, and it knows more than any text at hand. So it answers prompts, or
writes chats and documents of its own (drawn.py), many at a time.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.drawn import Answers, Chats, Documents, Kind, Messages
from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import check_file, open_anew
from twellctl.files.workspace import workspace_beside
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.defaults import context_of
from twellctl.report.notebook import Shown
from twellctl.text.reading import read_prompts
from twellctl.text.written import WrittenFile, is_written_file

if TYPE_CHECKING:
    from twellctl.decoding.bulk import Bulk
    from twellctl.decoding.sequence import Sequence

TOKENS = 20_000_000  # if not told, without prompts
_PATIENCE = 100  # texts in a row without a word
_SHOWN_EVERY = 1.0  # seconds


@dataclass(frozen=True)
class Written(Shown):
    """What is in `out`: lines, and the tokens that fine-tuning reads of them, nearly.

    `cut` texts reached the limit. `drawn`: how many tokens the model wrote in so many `seconds`,
    without the prompts.
    """

    out: Path
    texts: int
    cut: int
    tokens: int
    drawn: int
    seconds: float


@dataclass(frozen=True)
class Going:
    """How far a run is: a `share` of what is wanted, and the tokens drawn in so many `seconds`."""

    share: float
    drawn: int
    seconds: float


def write(
    model: str | Path,
    out: str | Path,
    *,
    prompts: str | Path | None = None,
    tokens: int | None = None,
    documents: float | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    batch_size: int = 1024,
    seed: int = 0,
    revision: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    overwrite: bool = False,
    doing: Callable[[str], None] = lambda text: None,
    progress: Callable[[Going], None] = lambda going: None,
    note: Callable[[str], None] = lambda text: None,
) -> Written:
    """Let `model`, SiLU or ReLU, write some `tokens` into the jsonl file `out`.

    With `prompts`, a jsonl file of `prompt` or `messages` (`read_prompts`), a line is `messages`: a
    prompt and the model's answer, in an order that `seed` draws. All are answered once (`tokens`
    None), or until there are `tokens`, several times by other draws. `temperature` 0 is greedy, and
    answers once.

    Without, it is a chat, `messages`: a question of `drawn.QUESTION_TOKENS` at most and its answer.
    Or it is a document, `text`. `documents` is the share of texts that are begun as such, None:
    half, and all where there is no chat template. `tokens` None is `TOKENS`. The chat template
    knows `chat_template_kwargs`, too.

    An answer or a document has `max_tokens` at most, and is cut there; None is `drawn.MAX_TOKENS`,
    or what the model's context leaves. `by` says that this command wrote a line. `batch_size` texts
    at most are written at once, fewer where there is no memory for more. What is begun is written
    to its end. Lines go to `out` as they come, and those that are there can be used, however the
    run ends. `overwrite` replaces what this command wrote, once there is a first line. Raises
    `TwellError`.
    """
    out = Path(out)
    _check(tokens, documents, max_tokens, temperature, batch_size, seed)
    _check_prompts(prompts, documents, temperature)
    _check_out(out, overwrite)
    was_there = out.exists()
    checkpoint = open_checkpoint(model, revision=revision)
    checkpoint.require_tokenizer()
    if checkpoint.is_only_converted:
        raise TwellError(
            f"{checkpoint.name} was converted and not fine-tuned, so what it writes is noise: give "
            "the SiLU model that it was made from"
        )
    asked = None if prompts is None else read_prompts(prompts)
    with workspace_beside(out.resolve()):  # two that write at once would lose each other's lines
        how = max_tokens, temperature, seed
        template = chat_template_kwargs
        kinds, share = _kinds(checkpoint, template, asked, tokens is not None, documents, how)
        doing(f"loading {checkpoint.name}")
        with contextlib.closing(_opened(checkpoint, kinds, batch_size)) as bulk:
            if isinstance(kinds[0], Answers) and kinds[0].num_long:
                note(f"{kinds[0].num_long} prompts are left out: they fill the model's context")
            doing("writing" if bulk.why_slow is None else f"writing slowly ({bulk.why_slow})")
            wanted = TOKENS if tokens is None and asked is None else tokens
            texts = _Texts(bulk, _by_turns(kinds, share), wanted, kinds[0].num_texts)
            done = _write_lines(out, was_there, texts, progress, note)
    if asked is not None and temperature == 0 and done.tokens < (tokens or 0):
        note("each prompt was answered once: greedily a second answer would be the same")
    return done


def _kinds(
    checkpoint: Checkpoint,
    template: dict[str, Any] | None,
    asked: list[Messages] | None,
    again: bool,
    documents: float | None,
    how: tuple[int | None, float, int],
) -> tuple[list[Kind], float]:
    """What is written, and which share of the texts are of the first kind."""
    from twellctl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, given=template)
    how = tokenizer, checkpoint.config.get("vocab_size"), *how
    if asked is not None:
        return [Answers(asked, again and how[-2] > 0, *how)], 1.0
    if documents is None:
        documents = 1.0 if tokenizer.chat_template is None else 0.5
    kinds = [Documents(*how)] if documents else []
    return kinds + ([Chats(*how)] if documents < 1 else []), documents


def _opened(checkpoint: Checkpoint, kinds: list[Kind], batch_size: int) -> "Bulk":
    from twellctl.decoding.bulk import Bulk
    from twellctl.decoding.opening import eos_tokens
    from twellctl.models.loading import load_model

    model = load_model(checkpoint)
    for kind in kinds:
        kind.fit_into(context_of(model.config.get_text_config().to_dict()))
    # nothing behind special tokens is read
    special = frozenset().union(*(kind.special for kind in kinds))
    ends = eos_tokens(model, [kinds[0].tokenizer.eos_token_id]) | special
    longest = max(kind.longest for kind in kinds)
    rows = min(batch_size, kinds[0].num_texts or batch_size)
    return Bulk(model, ends, rows=rows, longest=longest)


class _Texts:
    """Lines as they are whole. So many are begun as `tokens` need, None: all there are.

    `num_texts`: how many there are, None: without end.
    """

    def __init__(
        self, bulk: "Bulk", kinds: Iterator[Kind], tokens: int | None, num_texts: int | None
    ):
        self.ended = 0  # texts, also those that say nothing
        self.cut = self.tokens = 0  # of those in lines
        self._bulk, self._kinds, self._wanted, self._num_texts = bulk, kinds, tokens, num_texts
        self._under_way = 0
        self._ready: list[Sequence] = []  # questions that wait for their answers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises `TwellError`."""
        ends = self._bulk.ends
        for sequence in self._bulk.run(self._following):
            kind = sequence.client.kind
            if (answer := kind.answered(sequence, ends)) is not None:
                self._ready.append(answer)
                continue
            self._under_way -= 1
            self.ended += 1
            row = kind.row(sequence, ends)
            if row is not None:
                kind.num_empty = 0
                self.tokens += len(sequence.tokens)
                self.cut += sequence.tokens[-1] not in ends
                yield row
                continue
            kind.num_empty += 1
            if kind.num_empty > _PATIENCE:
                raise TwellError(
                    f"the model ended {kind.num_empty} {kind.name} in a row before their first "
                    f"word: {kind.doubt}"
                )

    def going(self, seconds: float) -> Going:
        """How far they are."""
        share = self.ended / self._num_texts if self._num_texts else 0.0
        if self._wanted is not None:
            tokens = self.tokens + self._bulk.num_tokens
            share = min(max(share, tokens / self._wanted), 1.0)
        return Going(share, self._bulk.num_drawn, seconds)

    def _following(self) -> "Sequence | None":
        if self._ready:
            return self._ready.pop()
        if self._wanted is not None:
            # by how long texts are: at first short ones end, but all that run count as well
            mean = longest = self._bulk.context
            if self.ended:
                mean = min((self.tokens + self._bulk.num_tokens) / self.ended, longest)
            if self.tokens + self._under_way * mean >= self._wanted:
                return None
        sequence = next(self._kinds).begun()
        self._under_way += sequence is not None
        return sequence


def _write_lines(
    out: Path,
    was_there: bool,
    texts: _Texts,
    progress: Callable[[Going], None],
    note: Callable[[str], None],
) -> Written:
    began, num_texts, shown = time.monotonic(), 0, 0.0
    rows = iter(texts)
    first = next(rows, None)  # before anything in OUT is lost
    if first is None:
        raise TwellError("the model answers none of the prompts: it ends before the first word")
    try:
        with WrittenFile(open_anew(out, was_there, is_written_file)) as file:
            for row in chain([first], rows):
                file.add(row)
                num_texts += 1
                seconds = time.monotonic() - began
                if seconds >= shown:
                    progress(texts.going(seconds))
                    shown = seconds + _SHOWN_EVERY
    except OSError as error:
        raise TwellError(
            f"{out} could not be written: {error.strerror or error}; it holds {num_texts} texts"
        ) from error
    except KeyboardInterrupt:
        note(f"{out} holds {num_texts} texts, {texts.tokens} tokens")
        raise
    seconds = time.monotonic() - began
    drawn = texts.going(seconds).drawn
    return Written(out, num_texts, texts.cut, texts.tokens, drawn, seconds)


def _check(
    tokens: int | None,
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
    if not 0 <= temperature <= 2:
        raise UsageError(f"temperature must be 0 to 2, got {temperature:g}")
    if not 0 <= seed < 2**31:
        raise UsageError(f"seed must be 0 to {2**31 - 1}, got {seed}")


def _check_prompts(prompts: str | Path | None, documents: float | None, temperature: float) -> None:
    if prompts is None and temperature == 0:
        raise UsageError("temperature 0 would write one text again and again: give --prompts")
    if prompts is not None and documents is not None:
        raise UsageError("prompts are answered, no documents written: leave out --documents")


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
