"""What a model answers: prompts through its chat template, greedily, many at once.

The one place where evaluation generates.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twellctl.decoding import bulk
from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.opening import eos_tokens, open_scheduler
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.errors import TwellError
from twellctl.evaluation.settings import Progress
from twellctl.models.defaults import context_of

_REPEATS = 4  # times in a row, from which on an ending is a loop
_LOOP = 32  # tokens of a loop at least


@dataclass(frozen=True)
class Answer:
    """The `tokens` after a prompt, with the one that ended them if they `ended`, and their text.

    There is no token if the prompt fills the model's context.
    """

    tokens: tuple[int, ...]
    text: str
    ended: bool

    def agreeing(self, other: "Answer") -> int:
        """How many tokens, from the first on, are the same as those of the other answer."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def repeats(self) -> bool:
        """Whether it ends in a loop, and never left it."""
        if self.ended:
            return False
        for period in range(1, len(self.tokens) // _REPEATS + 1):
            size = max(_LOOP, _REPEATS * period)
            end = self.tokens[-size:]
            if len(end) == size and end[period:] == end[:-period]:
                return True
        return False


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_tokens: int,
    progress: Progress = lambda done, total: None,
) -> list[Answer]:
    """What `model` answers to each of `prompts`, in order; fewer tokens where its context ends.

    `TwellError` if no prompt leaves room for an answer, and where memory runs out.
    """
    most = _most_tokens(model, prompts, max_tokens)
    asked = [place for place, tokens in enumerate(most) if tokens > 0]
    write = bulk.answers if TorchDecoder.why_not(model) is None else _one_by_one
    found: list[list[int]] = [[] for _ in prompts]
    made = write(
        model,
        tokenizer,
        [prompts[place] for place in asked],
        max_new_tokens=[most[place] for place in asked],
    )
    for done, (number, tokens) in enumerate(made, 1):
        found[asked[number]] = tokens
        progress(done, len(asked))
    if model.device.type == "cuda":  # so that the next model has that memory
        gc.collect()
        torch.cuda.empty_cache()
    ends = eos_tokens(model, [tokenizer.eos_token_id])
    return [_answer(tokenizer, tokens, ends) for tokens in found]


def _most_tokens(
    model: PreTrainedModel, prompts: Sequence[list[int]], max_tokens: int
) -> list[int]:
    """For each prompt `max_tokens`, or what it leaves of the context."""
    context = context_of(model.config.get_text_config().to_dict()) or sys.maxsize
    shortest = min(map(len, filter(None, prompts)))
    if shortest >= context:
        raise TwellError(
            f"a prompt of {shortest} tokens leaves no room for an answer: the model's context is "
            f"{context}; leave it out"
        )
    return [max(0, min(max_tokens, context - len(one))) if one else 0 for one in prompts]


def _one_by_one(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: Sequence[int],
) -> Iterator[tuple[int, list[int]]]:
    """As `bulk.answers`, for a model whose steps cannot be batched."""
    scheduler = open_scheduler(model, [tokenizer.eos_token_id], max_running=1)
    for place, (prompt, most) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        made = scheduler.run([prompt], Sampling(most, temperature=0))
        try:
            tokens = [token.id for events in made for _, token in events]
        except EngineError as error:
            raise TwellError(str(error)) from error
        yield place, tokens


def _answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: frozenset[int]) -> Answer:
    ended = bool(tokens) and tokens[-1] in ends
    said = tokens[:-1] if ended else tokens
    text = tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer(tuple(tokens), text, ended)
