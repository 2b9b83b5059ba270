"""Text to tokens, and back piece by piece: never half a character, never a stop string."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from twellctl.errors import LeftOut, TwellError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]  # role and content
Messages: TypeAlias = list[Message]  # of a chat, as its template takes them
UNDECODED = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of the prompt that decide how the first new one is spelled
_BYTES = 4  # of a character, at most; each may be a token
_MOST_HELD = 64  # tokens without a whole character: they are no text, and none will come of them
_USUAL = 8  # characters of a token, more than texts have on average


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The tokens of `text` as a prompt, with what the tokenizer puts in front of a text.

    A text that begins with the token that is put before a text does not get it twice. The end token
    that some tokenizers put after a text (`add_eos_token`) is left out.
    """
    tokens, bos = tokenizer.encode(text, verbose=False), tokenizer.bos_token_id
    if tokenizer.encode("a", verbose=False)[-1:] == [tokenizer.eos_token_id]:
        tokens = tokens[:-1]
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def opening_of(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """What the tokenizer puts in front of a text: its BOS token, or nothing."""
    around = encode_text(tokenizer, "")
    return around[:1] if around[:1] == [tokenizer.bos_token_id] else []


def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """UTF-8 bytes of text that one token stands for, at most."""
    return max(len(name.encode(errors="replace")) for name in tokenizer.get_vocab())


def surely_more(tokenizer: "PreTrainedTokenizerBase", text: str, most: int, longest: int) -> bool:
    """Whether `text` is more than `most` tokens, as far as that is known without reading it all.

    `longest`: that of `longest_token`. Of a text far longer than `most` tokens usually are, the
    beginning is encoded; beginnings of up to half the text that are not twice as long say nothing.
    """
    if len(text) * 4 > longest * most and len(text.encode()) > longest * most:
        return True
    size = _USUAL * most
    while 2 * size <= len(text):
        begun = tokenizer.encode(text[:size], add_special_tokens=False, verbose=False)
        if len(begun) > 2 * most + _USUAL:
            return True
        size *= 2
    return False


def chat_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    *,
    opens_answer: bool,
    **given: Any,
) -> str:
    """A conversation as the chat template writes it; `ValueError` says why it does not.

    `opens_answer`: up to where the assistant begins the next turn. `given`: what else the template
    is to know, and `continue_final_message`, with which the last message is left open.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: send the text to /v1/completions")
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opens_answer, **given
        )
    except Exception as error:  # a template is a program
        raise ValueError(f"the chat template refuses these messages: {reason(error)}") from error


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Messages,
    chat: bool | None = None,
    **given: Any,
) -> list[int]:
    """A user's message, or messages that end with one, as the chat template opens the answer.

    `chat` False: the last message is text that is continued; None: so where there is no template.
    This knows what is `given`, too. `LeftOut` says why it does not take the messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if chat is False or (chat is None and tokenizer.chat_template is None):
        return encode_text(tokenizer, messages[-1]["content"])
    return encode_written(tokenizer, opened_chat(tokenizer, messages, **given))


def opened_chat(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **given: Any) -> str:
    """Messages as the chat template opens the answer; `LeftOut` says why it does not."""
    try:
        return chat_text(tokenizer, messages, opens_answer=True, **given)
    except ValueError as error:
        raise LeftOut(str(error)) from error


def encode_written(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The tokens of what a chat template wrote."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def end_of_text(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The token between texts, from which a text can begin; `TwellError` if there is none."""
    for token in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        if token is not None:
            return token
    raise TwellError("the tokenizer has no end-of-text token: set eos_token in its config")


def check_ids(largest: int, vocabulary: int | None) -> None:
    """`TwellError` for ids that a model of `vocabulary` tokens (None: not known) does not have."""
    if vocabulary is not None and largest >= vocabulary:
        raise TwellError(
            f"the tokenizer makes id {largest}, but the model has {vocabulary} tokens: "
            "copy the tokenizer files of its original into its folder"
        )


class Detokenizer:
    """Tokens become text one by one; what later tokens may still change is held back.

    Only a window of tokens is decoded again: those since the text last ended in a whole character,
    and the run before it, without which some tokenizers would drop a leading space.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int] = ()):
        """`prompt`: the tokens that the text continues; none for a text of its own."""
        self._tokenizer = tokenizer
        for size in range(_CONTEXT, _CONTEXT + _BYTES):
            self._window = list(prompt[-size:])
            if not self._text().startswith(UNDECODED):  # it does not begin within a character
                break
        self._num_read = len(self._window)
        self._num_sent = len(self._text().rstrip(UNDECODED))

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._window.append(token)
        text = self._text()
        certain = text.rstrip(UNDECODED)
        if len(self._window) - self._num_read > _MOST_HELD:
            certain = text
        piece = certain[self._num_sent :]
        self._num_sent = max(self._num_sent, len(certain))
        if piece and certain == text:
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._num_sent = len(self._text())
        return piece

    def rest(self) -> str:
        """What was held back, as it stands if nothing follows."""
        return self._text()[self._num_sent :]

    def _text(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Cuts a text that comes in pieces before the first stop string, wherever the pieces break."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """The text that may go out, and whether a stop string was met."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:  # the one that is complete first
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was held back because a stop string might have begun there."""
        return self._held


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
