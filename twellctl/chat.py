"""twellctl chat: a conversation with a model, by the engine that generate and serve-local run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from twellctl.errors import TwellError
from twellctl.generate import Drawing, Figures, Loaded, Message
from twellctl.settings import setting


@dataclass(frozen=True)
class Answering(Drawing):
    """As of `generate`, for answers that may be longer."""

    max_tokens: int | None = setting(1024, "Tokens of an answer at most.", at_least=1)


class Chat:
    """What was said to `model` and what it answered, from a system message on, if there is one.

    `how`: settings of `Loaded.generate`, of all answers. `figures` are those of the last answer.
    Raises `TwellError` for a model without a chat template.
    """

    figures: Figures | None = None

    def __init__(self, model: Loaded, system: str = "", **how: Any):
        if model.tokenizer.chat_template is None:
            raise TwellError(
                f"{model.checkpoint.name} has no chat template: give one with --chat-template, or "
                "use twellctl generate"
            )
        self._model, self._how = model, how
        self.begin(system)

    def begin(self, system: str = "") -> None:
        """Forget what was said."""
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer, piece by piece, until it ends or is `stopped`; then it has been said.

        Without an answer `text` has not been said, either. Raises `TwellError`.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        made = self._model.generate(asked, **self._how)
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
