"""twellctl write: a model's answers to people's prompts, as text for fitting and training.

A sparse model forgets what its training text lacks, and no other author writes as a chat model
answers. So the model itself answers prompts, many at a time.
"""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twellctl.errors import LeftOut, TwellError, UsageError, counted, usable
from twellctl.files.home import from_home
from twellctl.files.made_of import digest_of
from twellctl.files.outputs import check_file, open_again
from twellctl.files.workspace import workspace_beside
from twellctl.models.answerer import open_answerer
from twellctl.models.carried import model_files
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.defaults import context_of
from twellctl.report.notebook import Shown
from twellctl.settings import chosen, flag_name, setting
from twellctl.text.reading import read_prompts
from twellctl.text.tokens import UNDECODED, Messages, check_ids, encode_written, opened_chat
from twellctl.text.written import (
    Begun,
    WrittenFile,
    begun_rows,
    finish,
    is_unfinished,
    is_written_file,
    written_row,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from twellctl.decoding.bulk import Bulk
    from twellctl.decoding.sequence import Sequence

logger = logging.getLogger(__name__)
MAX_TOKENS = 512  # of an answer, by default
_PATIENCE = 100  # texts in a row without a word
_SHOWN_EVERY = 1.0  # seconds


@dataclass(frozen=True)
class Writing:
    """How much is written, and how tokens are sampled."""

    tokens: int | None = setting(
        None, "Tokens to write. [default: each prompt is answered once]", at_least=1
    )
    max_tokens: int | None = setting(
        None,
        f"Most tokens per answer. [default: {MAX_TOKENS}, or what the context leaves]",
        at_least=1,
    )
    temperature: float = setting(
        0.8, "Sampling temperature; 0: always the likeliest token.", at_least=0, at_most=2
    )
    batch_size: int = setting(1024, "Most answers to write at once.", at_least=1)
    seed: int = setting(0, "Random seed.", at_least=0, at_most=2**31 - 1)


@dataclass(frozen=True)
class Written(Shown):
    """What is in `out`: the number of `texts`, and about how many `tokens` fine-tuning reads.

    `cut` texts reached the limit. The model wrote `drawn` tokens, without the prompts, in `seconds`
    seconds. `by`: its name. `is_relu`: it is a ReLU model.
    """

    out: Path
    texts: int
    cut: int
    tokens: int
    drawn: int
    seconds: float
    by: str = ""
    is_relu: bool = False


@dataclass(frozen=True)
class Going:
    """How far a run is: a `share` of what is wanted, and the tokens `drawn` in `seconds`."""

    share: float
    drawn: int
    seconds: float


def write(
    model: str | Path,
    out: str | Path,
    *,
    prompts: str | Path,
    revision: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    overwrite: bool = False,
    exact: bool = False,
    original: str | Path | None = None,
    doing: Callable[[str], None] = lambda text: None,
    progress: Callable[[Going], None] = lambda going: None,
    note: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Written:
    """Let `model`, SiLU or ReLU, answer `prompts` into the jsonl file `out`.

    `settings` are the fields of `Writing`. Prompts are read by `read_prompts`, and answered in a
    random order set by `seed`. Each line has `messages`, a prompt and the model's answer; `text`,
    what the model read and wrote, which `--data` reads; and `by`, which says that this command
    wrote it. With `tokens` None, each prompt is answered once. Otherwise prompts are answered again
    with new samples until there are `tokens`; `temperature` 0 is greedy, and answers once. The chat
    template gets `chat_template_kwargs`.

    Answers are cut at `max_tokens`; None means `MAX_TOKENS`, or what the model's context leaves. At
    most `batch_size` answers are written at once, or fewer if memory is short. Answers that were
    begun are completed. Lines go to `out` as they are written, and can be used however the run
    ends; the same call again continues. At the end they are put in the order of the prompts' draw.
    `overwrite` replaces a file of this command, at the first new line. With `exact` the original
    of `model` writes (`original` as in `twellctl.generate.load`): the file is the one
    that it would write by itself. Raises `TwellError`.
    """
    out, how = from_home(out), chosen(Writing, settings)
    _check_out(out, overwrite)
    was_there = out.exists()
    checkpoint = _opened(model, revision, exact, original)
    asked = read_prompts(prompts)
    made_of = _made_of(checkpoint, prompts, how, chat_template_kwargs)
    # two that write at once would lose each other's lines
    with workspace_beside(out.resolve()) as workspace:
        from twellctl.models.loading import load_tokenizer

        tokenizer = load_tokenizer(checkpoint, given=chat_template_kwargs)
        begun = begun_rows(out, made_of) if out.exists() and not overwrite else Begun()
        if begun.numbers:
            note(f"{out}: going on after {counted(len(begun.numbers), 'text')}")
        answers = _Answers(tokenizer, asked, checkpoint.config.get("vocab_size"), how)
        answers.written |= begun.numbers
        doing(f"loading {checkpoint.name}")
        with contextlib.closing(_loaded(checkpoint, answers, how.batch_size)) as bulk:
            if answers.num_long:
                note(f"{answers.num_long} prompts are left out: they fill the model's context")
            doing("writing" if bulk.why_slow is None else f"writing slowly ({bulk.why_slow})")
            texts = _Texts(bulk, answers, how.tokens, begun)
            done = _write_lines(out, was_there, texts, made_of, progress, note)
        _finish(out, workspace)
    if how.temperature == 0 and done.tokens < (how.tokens or 0):
        note("each prompt was answered once: a second greedy answer would be the same")
    return replace(done, by=checkpoint.name, is_relu=checkpoint.activation == "relu")


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix != ".jsonl":
        raise UsageError(f"{out} is not a .jsonl file: finetune recognises text by its suffix")
    check_file(out, "the jsonl file", "text that write has written", is_written_file)
    if out.exists() and not overwrite and not is_unfinished(out):
        raise TwellError(f"{out} exists: choose another name, or replace it with --overwrite")


def _made_of(
    checkpoint: Checkpoint, prompts: str | Path, how: Writing, template: dict[str, Any] | None
) -> dict[str, Any]:
    """What the answers depend on; how many are written at once is not of it."""
    settings = {flag_name(k): v for k, v in dataclasses.asdict(how).items() if k != "batch_size"}
    read = {"model": model_files(checkpoint), "prompts": [from_home(prompts)]}
    digests = {part: digest_of(paths) for part, paths in read.items()}
    return digests | settings | {"chat-template-kwargs": template}


def _opened(
    model: str | Path, revision: str | None, exact: bool, original: str | Path | None
) -> Checkpoint:
    """The model that writes; `TwellError` if it cannot write text.

    For exact answers that is the original by itself: so many rows leave a pass no room for drafts.
    """
    checkpoint = open_answerer(model, exact, original, revision).answering
    checkpoint.require_tokenizer()
    if checkpoint.is_only_converted:
        raise TwellError(
            f"{checkpoint.name} was converted and not fine-tuned, so what it writes is noise: give "
            "the SiLU model that it was made from"
        )
    return checkpoint


def _loaded(checkpoint: Checkpoint, answers: "_Answers", batch_size: int) -> "Bulk":
    """The model, loaded to write `answers`, whose prompts must fit into its context."""
    from twellctl.decoding.bulk import open_bulk
    from twellctl.decoding.opening import eos_tokens
    from twellctl.models.loading import load_model

    model = load_model(checkpoint)
    answers.fit_into(context_of(model.config.get_text_config().to_dict()))
    # an answer ends at any special token, since the text of later ones would not be kept
    ends = eos_tokens(model, [answers.tokenizer.eos_token_id]) | answers.special
    rows = min(batch_size, answers.num_texts or batch_size)
    return open_bulk(model, ends, rows=rows, longest=answers.longest)


class _Answers:
    """The texts to write: prompts in a random order, and what the model answers to them.

    `num_texts` is their number, None if there is no end. `longest` is the most tokens that one can
    have, and `num_long` counts prompts that leave no room for an answer. All are known after
    `fit_into`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompts: list[Messages],
        vocabulary: int | None,
        how: Writing,
    ):
        """Prompts that the chat template does not take are left out, and counted in the log.

        `TwellError` if it takes none, or is not there.
        """
        self.tokenizer, self._vocabulary, self._how = tokenizer, vocabulary, how
        # when all are answered they are answered again, with other samples
        self._again = how.tokens is not None and how.temperature > 0
        if tokenizer.chat_template is None:
            raise TwellError("the model has no chat template, so it cannot answer prompts")
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(number for number, token in added if token.special)  # no text
        self.num_texts: int | None = None
        self.num_long = self.longest = 0
        self.written: set[int] = set()  # the numbers of texts that are not begun again
        self._num_begun, self._max_tokens = 0, how.max_tokens or MAX_TOKENS
        self._left: list[_Prompt] = []  # of this pass
        begun = usable(enumerate(prompts, 1), self._begins, logger.warning, "prompts")
        self._prompts = list(begun)

    def fit_into(self, context: int | None) -> None:
        """Limit texts to `context` tokens; None: there is no limit.

        Prompts that leave no room for an answer are left out. `TwellError` if all are, or if
        `max_tokens` leaves no room for any prompt.
        """
        sizes = [len(prompt.tokens) for prompt in self._prompts]
        if context is not None:
            self._check_room(context, min(sizes))
            self._prompts = [prompt for prompt in self._prompts if len(prompt.tokens) < context]
        self.num_long = len(sizes) - len(self._prompts)
        if not self._again:
            self.num_texts = len(self._prompts)
        self.longest = self._max_tokens + max(len(prompt.tokens) for prompt in self._prompts)
        if context is not None:
            self.longest = min(context, self.longest)

    def _check_room(self, context: int, shortest: int) -> None:
        room = context - shortest
        if room < 1:
            raise TwellError(
                f"the model's context of {context} tokens is too short to write in: the shortest "
                f"prompt has {shortest}, give shorter ones"
            )
        if self._how.max_tokens is not None and self._how.max_tokens > room:
            raise UsageError(
                f"max-tokens must be at most {room}, the rest of the model's context of {context}, "
                f"got {self._how.max_tokens}"
            )

    def begun(self) -> "Sequence | None":
        """The next text, with its prompt only; None: there are no more."""
        from twellctl.decoding.engine import Sampling
        from twellctl.decoding.sequence import Sequence

        prompt = self._next()
        while prompt is not None and prompt.number in self.written:
            prompt = self._next()
        if prompt is None:
            return None
        most = min(self._max_tokens, self.longest - len(prompt.tokens))
        seed = (self._how.seed << 32) + prompt.number
        how = Sampling(most, self._how.temperature, seed=seed)
        return Sequence(prompt.tokens, how, prompt)

    def _next(self) -> "_Prompt | None":
        """The next prompt, with the number of its text; None: there are no more."""
        if not self._left:
            if self._num_begun and not self._again:
                return None
            draw = random.Random((self._how.seed << 32) + self._num_begun)
            self._left = draw.sample(self._prompts, len(self._prompts))
        self._num_begun += 1
        return self._left.pop()._replace(number=self._num_begun)

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        """The line of a text that has ended; None if it says nothing."""
        tokens, prompt = sequence.tokens, sequence.client
        ended = tokens[-1] in ends
        answer = self._answer(tokens[:-1] if ended else tokens, sequence.num_prompt)
        if not answer.strip():
            return None
        end = self._decoded(tokens[-1:]) if ended else ""
        messages = [*prompt.messages, {"role": "assistant", "content": answer}]
        return written_row(messages, prompt.text + answer + end, not ended, self.tokenizer)

    def _answer(self, tokens: list[int], num_prompt: int) -> str:
        """The text of what follows the prompt, as it stands after that; no half characters."""
        before, whole = self._decoded(tokens[:num_prompt]), self._decoded(tokens)
        follows = whole.startswith(before)
        answer = whole[len(before) :] if follows else self._decoded(tokens[num_prompt:])
        return answer.rstrip(UNDECODED)

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _begins(self, prompt: tuple[int, Messages]) -> "_Prompt":
        number, messages = prompt
        try:
            text = opened_chat(self.tokenizer, messages)
        except LeftOut as error:
            raise LeftOut(f"prompt {number}: {error}") from error
        tokens = encode_written(self.tokenizer, text)
        if not tokens:
            raise LeftOut(
                f"prompt {number}: the chat template makes no token of it: correct the template"
            )
        check_ids(max(tokens), self._vocabulary)
        return _Prompt(messages, text, tokens)


class _Prompt(NamedTuple):
    """Messages, and what the chat template makes of them, as text and as tokens.

    `number` is that of the text that answers it, from 1.
    """

    messages: Messages
    text: str
    tokens: list[int]
    number: int = 0


class _Texts:
    """Rows, each as soon as its text ends. Texts are begun until there are `tokens`; None: all.

    Those of an earlier call, which has `begun` them, count.
    """

    def __init__(self, bulk: "Bulk", answers: _Answers, tokens: int | None, begun: Begun):
        self.begun, self.ended = begun, len(begun.numbers)  # texts, also those that say nothing
        self.cut, self.tokens = begun.cut, begun.tokens  # of those in lines
        self._bulk, self._answers, self._wanted = bulk, answers, tokens
        self._under_way = self._num_empty = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
        """(a row, what it is known by while others are missing). Raises `TwellError`."""
        ends = self._bulk.ends
        for sequence in self._bulk.run(self._following):
            self._under_way -= 1
            self.ended += 1
            row = self._answers.row(sequence, ends)
            if row is not None:
                self._num_empty = 0
                self.tokens += len(sequence.tokens)
                self.cut += sequence.tokens[-1] not in ends
                yield row, {"number": sequence.client.number, "tokens": len(sequence.tokens)}
                continue
            self._num_empty += 1
            if self._num_empty > _PATIENCE:
                raise TwellError(
                    f"the model ended {self._num_empty} answers in a row before their first word: "
                    "is it one that its chat template was made for?"
                )

    def going(self, seconds: float) -> Going:
        """How far they are."""
        num_texts = self._answers.num_texts
        share = self.ended / num_texts if num_texts else 0.0
        if self._wanted is not None:
            tokens = self.tokens + self._bulk.num_tokens
            share = min(max(share, tokens / self._wanted), 1.0)
        return Going(share, self._bulk.num_drawn, seconds)

    def _following(self) -> "Sequence | None":
        if self._wanted is not None:
            # by how long texts are: at first short ones end, but all that run count as well
            mean: float = self._answers.longest
            if self.ended:
                mean = min((self.tokens + self._bulk.num_tokens) / self.ended, mean)
            if self.tokens + self._under_way * mean >= self._wanted:
                return None
        sequence = self._answers.begun()
        self._under_way += sequence is not None
        return sequence


def _finish(out: Path, workspace: Path) -> None:
    try:
        finish(out.resolve(), workspace / "new")
    except OSError as error:
        raise TwellError(
            f"{out} could not be put in order: {error.strerror or error}; it holds all "
            "texts, and the command without --overwrite does the rest"
        ) from error


def _write_lines(
    out: Path,
    was_there: bool,
    texts: _Texts,
    made_of: dict[str, Any],
    progress: Callable[[Going], None],
    note: Callable[[str], None],
) -> Written:
    began, shown = time.monotonic(), 0.0
    num_texts, size = len(texts.begun.numbers), texts.begun.size
    rows = iter(texts)
    first = next(rows, None)  # before anything in OUT is lost
    if first is None and not num_texts:
        raise TwellError("the model answers none of the prompts: it ends before the first word")
    try:
        descriptor = open_again(out, was_there, is_written_file, size)
        with WrittenFile(descriptor, size) as file:
            for row, known_by in chain([first] if first else [], rows):
                file.add(row, known_by | {"made_of": made_of})
                num_texts += 1
                seconds = time.monotonic() - began
                if seconds >= shown:
                    progress(texts.going(seconds))
                    shown = seconds + _SHOWN_EVERY
    except OSError as error:
        raise TwellError(
            f"{out} could not be written: {error.strerror or error}; it holds {num_texts} texts"
        ) from error
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        there = f"{counted(num_texts, 'text')}, {counted(texts.tokens, 'token')}"
        note(f"{out} holds {there}: repeat the command, without --overwrite, to continue")
        raise
    seconds = time.monotonic() - began
    drawn = texts.going(seconds).drawn
    return Written(out, num_texts, texts.cut, texts.tokens, drawn, seconds)
