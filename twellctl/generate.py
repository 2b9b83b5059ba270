"""twellctl generate and chat: a prompt or a conversation goes on, by the engine of serve-local."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.decoding.drafted import Drafted
from twellctl.decoding.engine import WHOLE, EngineError, Sampling, check_gates
from twellctl.errors import TwellError, UsageError
from twellctl.models.answerer import load_models, open_answerer
from twellctl.models.checkpoint import Checkpoint
from twellctl.report.notebook import as_tables, element
from twellctl.settings import chosen, setting
from twellctl.text.tokens import Detokenizer, Messages, check_ids, encode_prompt, opened_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from twellctl.decoding.scheduler import Scheduler


MAX_TOKENS = 256


@dataclass(frozen=True)
class Drawing:
    """How an answer is sampled, and how long it may be."""

    max_tokens: int | None = setting(
        None,
        f"Most tokens to write. [default: {MAX_TOKENS}, or what the context leaves]",
        at_least=1,
    )
    temperature: float = setting(
        0.0, "Sampling temperature; 0: always the likeliest token.", at_least=0, at_most=2
    )
    top_p: float = setting(
        1.0, "Sample from the likeliest tokens with this total probability.", at_least=0, at_most=1
    )
    top_k: int = setting(0, "Sample from this many likeliest tokens; 0: all.", at_least=0)
    seed: int | None = setting(
        None, "Random seed. [default: another each time]", at_least=-(2**63), at_most=2**63 - 1
    )


@dataclass(frozen=True)
class Figures:
    """Figures of a generation so far; None: not known (yet).

    `tokens_per_second` leaves out the first step, which sets up what the others use.
    `first_seconds` is the time from the prompt to its first token, with the model loaded. `density`
    is the mean share of neurons that fired. `cut`: the answer reached the most tokens without an
    end; `full`: these were what the context left. `is_empty`: it ended before any text.
    `drafted`: what became of the drafts of exact answers; None in others.
    """

    prompt_tokens: int
    tokens: int
    first_seconds: float | None
    tokens_per_second: float | None
    density: float | None
    cut: bool
    is_empty: bool = False
    full: bool = False
    drafted: Drafted | None = None


class NoRoomError(TwellError):
    """A prompt leaves no room for an answer."""


class Generation:
    """The text after a prompt. Iterate over it once, piece by piece; read `figures` at any time."""

    def __init__(
        self,
        scheduler: "Scheduler",
        tokenizer: "PreTrainedTokenizerBase",
        prompt: list[int],
        sampling: Sampling,
        continued: bool,
        fills: bool = False,
    ):
        """`continued`: the text goes on from that of `prompt`, and is no answer of its own.

        `fills`: `sampling` allows what the context leaves, which is less than was asked for.
        """
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._prompt, self._sampling, self._continued = prompt, sampling, continued
        self._fills = fills
        self._times: list[float] = []  # of the start, and of each token
        self._ended = False
        self._before = scheduler.reports.fired.copy(), scheduler.reports.generated_tokens
        self._drafted_before = scheduler.tally.drafted.copy()

    def __iter__(self) -> Iterator[str]:
        """Raises `TwellError`, when memory runs out for example."""
        text = Detokenizer(self._tokenizer, self._prompt if self._continued else ())
        for token in self._tokens():
            if piece := text.add(token):
                yield piece
        if self._ended and (rest := text.rest()):  # a limit may cut a character, which is left out
            yield rest

    def text(self) -> str:
        """The whole text at once."""
        return "".join(self)

    def _repr_html_(self) -> str:
        """For notebooks: the text, unless it was iterated before, and the figures."""
        text = "" if self._times else element("pre", self.text())
        return text + as_tables(self.figures)

    @property
    def figures(self) -> Figures:
        times, fired = self._times, self._scheduler.reports.fired - self._before[0]
        tokens = max(0, len(times) - 1)
        generated = self._scheduler.reports.generated_tokens - self._before[1]
        steady, cut = times[2:], not self._ended and tokens == self._sampling.max_tokens
        return Figures(
            prompt_tokens=len(self._prompt),
            tokens=tokens,
            first_seconds=times[1] - times[0] if tokens else None,
            tokens_per_second=(
                (len(steady) - 1) / (steady[-1] - steady[0]) if len(steady) > 1 else None
            ),
            density=float(fired.mean()) / generated if len(fired) and generated else None,
            cut=cut,
            is_empty=self._ended and tokens == 1,
            full=cut and self._fills,
            drafted=self._drafted(),
        )

    def _drafted(self) -> Drafted | None:
        tally = self._scheduler.tally
        return tally.drafted.since(self._drafted_before) if tally.names else None

    def _tokens(self) -> Iterator[int]:
        """As they come, without the one that ends the text."""
        self._times.append(time.perf_counter())
        try:
            for events in self._scheduler.run([self._prompt], self._sampling):
                for _, token in events:
                    self._times.append(time.perf_counter())
                    self._ended = token.id in self._scheduler.eos_tokens
                    if not self._ended:
                        yield token.id
        except EngineError as error:
            raise TwellError(str(error)) from error


def generate(
    model: str | Path,
    prompt: str,
    *,
    chat: bool | None = None,
    chat_template: str | Path | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    gates: str = WHOLE,
    stable: bool = False,
    exact: bool = False,
    original: str | Path | None = None,
    note: Callable[[str], None] = lambda text: None,
    **drawing: Any,
) -> Generation:
    """Load `model` (a folder, an export or a hub id) and return the text after `prompt`.

    `chat` sends the prompt through the chat template as a user's message; None does so if there is
    a template. `chat_template`, a file, replaces the model's. The template gets
    `chat_template_kwargs`. `drawing` are the fields of `Drawing`. Without `max_tokens`, at most
    `MAX_TOKENS` are written, as the context allows. Temperature 0, the default, always takes the
    likeliest token. `gates`, `stable`, `exact` and `original` are as in `load`. Raises
    `TwellError`.
    """
    chosen(Drawing, drawing)
    _check_text(prompt)
    how: dict[str, Any] = {"gates": gates, "stable": stable, "exact": exact}
    loaded = load(model, chat_template=chat_template, original=original, note=note, **how)
    return loaded.generate(prompt, chat=chat, chat_template_kwargs=chat_template_kwargs, **drawing)


@dataclass(frozen=True)
class Loaded:
    """A loaded model, for one prompt after another; made by `load`."""

    checkpoint: Checkpoint
    tokenizer: "PreTrainedTokenizerBase"
    scheduler: "Scheduler"

    def generate(
        self,
        prompt: str | Messages,
        *,
        chat: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **drawing: Any,
    ) -> Generation:
        """The text after `prompt`: iterate over it, or call `text()`. The rest is as in `generate`.

        `prompt` can also be a conversation whose next turn is the model's. The text is cut where
        the context ends. First read the previous text to its end, or close it.
        """
        how = chosen(Drawing, drawing)
        _check_text(prompt)
        has_template = self.tokenizer.chat_template is not None
        if (isinstance(prompt, list) or chat) and not has_template:
            raise TwellError(f"{self.checkpoint.name} has no chat template: leave out --chat")
        chat = has_template if chat is None else chat or isinstance(prompt, list)
        tokens = self._encoded(prompt, chat, chat_template_kwargs or {})
        wanted = budget = how.max_tokens or MAX_TOKENS
        if how.max_tokens is None or isinstance(prompt, list):
            budget = min(wanted, self._room(tokens))
        return Generation(
            self.scheduler,
            self.tokenizer,
            tokens,
            Sampling(budget, how.temperature, how.top_p, how.top_k, how.seed),
            continued=not chat,
            fills=budget < wanted,
        )

    def _encoded(self, prompt: str | Messages, chat: bool, template: dict[str, Any]) -> list[int]:
        try:
            tokens = encode_prompt(self.tokenizer, prompt, chat, **template)
        except TwellError as error:
            remedy = "; try --no-chat" if isinstance(prompt, str) else ""
            raise TwellError(f"{self.checkpoint.name}: {error}{remedy}") from error
        if not tokens:
            raise UsageError("the prompt holds no token: give some text")
        check_ids(max(tokens), self.checkpoint.config.get("vocab_size"))
        return tokens

    def _room(self, prompt: list[int]) -> int:
        """The tokens that `prompt` leaves for an answer."""
        context = self.scheduler.context
        if len(prompt) >= context:
            raise NoRoomError(
                f"the prompt has {len(prompt)} tokens, there is room for {context} with the "
                "answer: shorten it"
            )
        return context - len(prompt)


def load(
    model: str | Path,
    *,
    chat_template: str | Path | None = None,
    gates: str = WHOLE,
    stable: bool = False,
    exact: bool = False,
    original: str | Path | None = None,
    note: Callable[[str], None] = lambda text: None,
    for_chat: bool = False,
) -> Loaded:
    """Load `model` (a folder, an export or a hub id). Raises `TwellError`.

    `for_chat`: a model without a chat template is refused before its weights are loaded.
    `gates` "screened": a 4-bit copy of W_gate, made now, selects the rows that a step of one
    sequence reads, if one kernel can run the step and is faster.

    `stable`: no token depends on how many a pass has (decoding/stable.py); all neurons are
    computed. `exact`: the answers are those of the model that `model` was fitted to, in stable
    decoding: `original`, else the one in its folder (`export --with-original`), else what its
    config.json names. `model` drafts them; it can also be a draft head, which names its original.
    """
    check_gates(gates)
    answerer = open_answerer(model, exact, original)
    checkpoint = answerer.checkpoint
    checkpoint.require_tokenizer()
    # torch takes seconds to import: a wrong model is refused before
    from twellctl.decoding.opening import open_scheduler, why_no_gain
    from twellctl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, chat_template)
    if for_chat:
        _require_template(checkpoint, tokenizer)
    answering, draft = load_models(answerer)
    ends = [tokenizer.eos_token_id]
    how: dict[str, Any] = {"gates": gates, "stable": stable, "draft": draft}
    scheduler = open_scheduler(answering, ends, max_running=1, **how)
    checkpoint.beware_of_noise(note)
    if draft is None:
        checkpoint.say_if_dense(note)
    elif why := why_no_gain(answering, draft):
        note(why)
    return Loaded(checkpoint, tokenizer, scheduler)


def _require_template(checkpoint: Checkpoint, tokenizer: "PreTrainedTokenizerBase") -> None:
    """`TwellError` if `tokenizer` has no chat template."""
    if tokenizer.chat_template is None:
        raise TwellError(
            f"{checkpoint.name} has no chat template: give one with --chat-template, or use "
            "twellctl generate"
        )


def _check_text(prompt: str | Messages) -> None:
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid Unicode: give it as UTF-8") from error


@dataclass(frozen=True)
class Answering(Drawing):
    """As in `generate`, for answers that may be longer."""

    max_tokens: int | None = setting(1024, "Most tokens per answer.", at_least=1)


class Chat:
    """A conversation with `model`, with a system message if there is one.

    `how`: settings of `Loaded.generate` for all answers. `figures` are those of the last answer.
    Raises `TwellError` for a model without a chat template.
    """

    figures: Figures | None = None

    def __init__(self, model: Loaded, system: str = "", **how: Any):
        _require_template(model.checkpoint, model.tokenizer)
        self._model, self._how = model, how
        self.begin(system)

    def begin(self, system: str = "") -> None:
        """Forget what was said. `TwellError`, before that, if the template drops `system`."""
        if system:
            self._require_system(system)
        self.messages: Messages = [{"role": "system", "content": system}] if system else []

    def _require_system(self, system: str) -> None:
        question = [{"role": "user", "content": "?"}]
        alone = self._written(question)  # nothing: what is wrong is said when something is asked
        both = self._written([{"role": "system", "content": system}, *question])
        if alone and both in ("", alone):
            raise TwellError(
                f"{self._model.checkpoint.name}: its chat template takes no system message: write "
                "it into the first message"
            )

    def _written(self, messages: Messages) -> str:
        """What the template makes of `messages`; nothing if it refuses them."""
        given = self._how.get("chat_template_kwargs") or {}
        try:
            return opened_chat(self._model.tokenizer, messages, **given)
        except TwellError:
            return ""

    def ask(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yield the answer, piece by piece, until it ends or is `stopped`; then keep both messages.

        Without any answer, `text` is not kept, either. Raises `TwellError`.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            made = self._model.generate(asked, **self._how)
        except NoRoomError as error:
            if not any(turn["role"] == "assistant" for turn in asked):
                raise
            raise TwellError(
                f"the conversation fills the context, {self._model.scheduler.context} tokens: "
                "/new starts over"
            ) from error
        pieces: list[str] = []
        try:
            for piece in made:
                if stopped():
                    break
                pieces.append(piece)
                yield piece
        finally:
            self.figures = made.figures
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
