"""The texts that `twellctl write` lets a model write: how one begins, and what row it becomes.

An answer follows a prompt that somebody wrote. A chat begins behind the opening of a user's turn:
there the model draws a question (Xu et al., Magpie, arXiv:2406.08464), and then its answer. A
document begins with a token drawn from all (Liu et al., LLM-QAT, arXiv:2305.17888). No torch before
the first one begins.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from twellctl.decoding.engine import Sampling
from twellctl.errors import TwellError, UsageError
from twellctl.text.tokens import chat_text, check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from twellctl.decoding.sequence import Sequence

QUESTION_TOKENS = 128  # at most
MAX_TOKENS = 512  # of an answer or a document, if not told
Messages: TypeAlias = list[dict[str, str]]
_MARK = "\N{LEFT WHITE SQUARE BRACKET}question\N{RIGHT WHITE SQUARE BRACKET}"
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to


@dataclass(frozen=True)
class Begun:
    """What a sequence is: of which kind, the how manieth, and behind which messages."""

    kind: "Kind"
    number: int
    messages: Messages | None = None


class Kind:
    """Texts of one kind: how they begin, and what line they become."""

    name: str
    doubt: str  # where they end before their first word
    num_empty = 0  # of those in a row
    num_texts: int | None = None  # there are at the start; None: without end

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocabulary: int | None,
        max_tokens: int | None,
        temperature: float,
        seed: int,
    ):
        """`max_tokens` None: `MAX_TOKENS`, or what the context leaves."""
        self.tokenizer = tokenizer
        self._vocabulary, self._seed = vocabulary, seed
        self._max_tokens, self._temperature = max_tokens, temperature
        self._num_begun = self._context = self.longest = 0  # the longest that a text can become
        added = tokenizer.added_tokens_decoder.items()
        self.special = {number for number, token in added if token.special}  # no text

    def fit_into(self, context: int) -> None:
        """Texts shall have `context` tokens at most; `TwellError` if longer ones are asked for."""
        raise NotImplementedError

    def begun(self) -> "Sequence | None":
        """The next text, of which nothing is written; None: there are no more."""
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
        if self._max_tokens is None:
            self._max_tokens = min(MAX_TOKENS, room)
        if self._max_tokens > room:
            raise UsageError(
                f"max-tokens must be at most {room}, the rest of the model's context of {context}, "
                f"got {self._max_tokens}"
            )
        self.longest = taken + self._max_tokens

    def _text(self, tokens: list[int], ends: frozenset[int]) -> str:
        """Of what was drawn, without the token that ended it."""
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _asked(self, messages: Messages) -> str:
        """The text of a chat up to where the answer begins."""
        try:
            return chat_text(self.tokenizer, messages, opens_answer=True)
        except ValueError as error:
            raise TwellError(str(error)) from error

    def _chat(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        """The line of messages and the answer to them; None without either."""
        answer = self._text(sequence.tokens[sequence.num_prompt :], ends).strip()
        if not sequence.client.messages or not answer:
            return None
        return {"messages": [*sequence.client.messages, {"role": "assistant", "content": answer}]}

    def _encoded(self, text: str, **how: Any) -> list[int]:
        tokens = self.tokenizer.encode(text, verbose=False, **{"add_special_tokens": False} | how)
        check_ids(max(tokens, default=0), self._vocabulary)
        return tokens

    def _sequence(self, prompt: list[int], most: int, seed: int, what: Begun) -> "Sequence":
        from twellctl.decoding.sequence import Sequence

        how = Sampling(most, self._temperature, seed=(self._seed << 32) + seed)
        return Sequence(prompt, how, what)


class Answers(Kind):
    """What the model answers to prompts of others, in an order that the seed draws."""

    name = "answers"
    doubt = "is it one that its chat template was made for?"

    def __init__(self, prompts: list[Messages], again: bool, *how: Any):
        """`again`: when all are answered they are again, by other draws.

        `TwellError` where there is no chat template, or one that does not take a prompt.
        """
        super().__init__(*how)
        if self.tokenizer.chat_template is None:
            raise TwellError("the model has no chat template, so it answers no prompts")
        self._again = again
        self._left: list[tuple[Messages, list[int]]] = []  # of this pass
        self._prompts = [self._begins(*prompt) for prompt in enumerate(prompts, 1)]

    def fit_into(self, context: int) -> None:
        """Prompts that leave no room for an answer are left out: `num_long`."""
        sizes = [len(tokens) for _, tokens in self._prompts]
        self._prompts = [prompt for prompt in self._prompts if len(prompt[1]) < context]
        self.num_long = len(sizes) - len(self._prompts)
        if not self._again:
            self.num_texts = len(self._prompts)
        self._fit(min(sizes), context)
        self.longest = min(context, self._max_tokens + max(n for n in sizes if n < context))

    def begun(self) -> "Sequence | None":
        if not self._left:
            if self._num_begun and not self._again:
                return None
            draw = random.Random((self._seed << 32) + self._num_begun)
            self._left = draw.sample(self._prompts, len(self._prompts))
        messages, prompt = self._left.pop()
        self._num_begun += 1
        most = min(self._max_tokens, self._context - len(prompt))
        what = Begun(self, self._num_begun, messages)
        return self._sequence(prompt, most, what.number, what)

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        return self._chat(sequence, ends)

    def _begins(self, number: int, messages: Messages) -> tuple[Messages, list[int]]:
        try:
            return messages, self._encoded(self._asked(messages))
        except TwellError as error:
            raise TwellError(f"prompt {number}: {error}") from error


class Chats(Kind):
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
        before, mark, behind = self._asked(_question(_MARK)).partition(_MARK)
        self._opening = self._encoded(before)
        if not mark or not self._opening:
            raise TwellError(
                "the chat template has nothing in front of a user's question, so the model cannot "
                "draw one: write chats another way, and documents with --documents 1"
            )
        self._closing = next(iter(behind.split()), "")  # where a question ends, by its text

    def fit_into(self, context: int) -> None:
        self._fit(QUESTION_TOKENS + len(self._encoded(self._asked(_question(_MARK)))), context)
        # broken characters take more tokens than were drawn
        self.longest = min(context, self.longest + 2 * QUESTION_TOKENS)

    def begun(self) -> "Sequence":
        self._num_begun += 1
        what = Begun(self, self._num_begun)
        return self._sequence(self._opening, QUESTION_TOKENS, what.number, what)

    def answered(self, sequence: "Sequence", ends: frozenset[int]) -> "Sequence | None":
        what = sequence.client
        text = self._text(sequence.tokens[sequence.num_prompt :], ends)
        question = (text.partition(self._closing)[0] if self._closing else text).strip()
        if what.messages or not question:
            return None
        messages = _question(question)
        prompt = self._encoded(self._asked(messages))
        room = self.longest - len(prompt)
        if room < 1:
            return None
        most = min(self._max_tokens, room)
        what = Begun(self, what.number, messages)
        return self._sequence(prompt, most, -what.number % 2**32, what)

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        return self._chat(sequence, ends)


def _question(text: str) -> Messages:
    return [{"role": "user", "content": text}]


class Documents(Kind):
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
        prompt, what = [*self._before, first], Begun(self, self._num_begun)
        return self._sequence(prompt, self._max_tokens, 2**31 + self._num_begun, what)

    def row(self, sequence: "Sequence", ends: frozenset[int]) -> dict[str, Any] | None:
        if not self._text(sequence.tokens[sequence.num_prompt :], ends):  # it ended at once
            return None
        text = self._text(sequence.tokens[len(self._before) :], ends)
        self._encoded(text)  # of a tokenizer that fits the model
        return {"text": text}
