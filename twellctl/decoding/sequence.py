"""One prompt that is being continued, as the host knows it."""

import functools
import itertools
import operator
import random
from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.chances import Standing
from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.lookup import Repeats
from twellctl.decoding.rounds import NO_TOKEN
from twellctl.decoding.sampler import Field, Variant, fields_of, variant_of
from twellctl.decoding.weighing import Penalised

_numbers = itertools.count()


class Sequence:
    """Its tokens, its pages, and who waits for it (`client`: not looked at here).

    When it runs, all tokens but the last one are cached. `launched` rounds were started and not yet
    read; each gives one token or more. A sequence that loses its pages begins again with all tokens
    it has as its prompt.
    """

    def __init__(self, prompt: Tokens[int], sampling: Sampling, client: Any = None):
        self.tokens, self.num_prompt = list(prompt), len(prompt)
        self.sampling, self.client = sampling, client
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        self.variant, self._fields = variant_of(sampling), fields_of(sampling, seed)
        self.guide = None if sampling.guide is None else sampling.guide()
        self.number = next(_numbers)  # the order of arrival
        self.pages: list[int] = []
        self.cached = 0  # of the prompt, while it is being read
        self.launched = 0
        self.standing = Standing()  # with those who draft
        self.repeats: Repeats | None = None  # for who drafts what is repeated
        self.gone = False  # ended, failed, or nobody waits any more

    @property
    def most_tokens(self) -> int:
        """How long it can become."""
        return self.num_prompt + self.sampling.max_tokens

    def needs_page(self, num_tokens: int) -> bool:
        """Whether some of the `num_tokens` that the next round reads may stand after its last page:
        if all those that are read in rounds under way are kept."""
        end = len(self.tokens) - 1 + (self.launched + 1) * num_tokens
        return min(end, self.most_tokens - 1) > len(self.pages) * PAGE

    @property
    def all_launched(self) -> bool:
        """Whether no further round is wanted, whatever those under way give."""
        return len(self.tokens) + self.launched >= self.most_tokens

    def part(self, end: int) -> tuple[list[int], int, list[int]]:
        """What is read of it next, up to `end`: tokens, where they begin, its pages."""
        return self.tokens[self.cached : end], self.cached, self.pages

    def num_drafts(self, count: int) -> int:
        """How many of `count` drafts a round reads, if it is the only one under way."""
        return max(0, min(count, self.most_tokens - len(self.tokens) - 1))

    def take(self, chosen: Tokens[int], ends: frozenset[int]) -> tuple[list[int], bool]:
        """Append those of the `chosen` tokens that belong to it: up to and with the first of
        `ends`, as many as it can have. Returns them, and whether the one after them is no number
        (`NO_TOKEN`)."""
        new: list[int] = []
        is_broken = False
        for token in chosen[: self.most_tokens - len(self.tokens)]:
            if is_broken := token == NO_TOKEN:
                break
            new.append(token)
            if self.ends_with(token, ends):
                break
        self.tokens += new
        return new, is_broken

    def ends_with(self, token: int, ends: frozenset[int]) -> bool:
        """Whether `token` is one of `ends`, and these end it."""
        return token in ends and not self.sampling.ignore_eos

    def has_ended(self, ends: frozenset[int]) -> bool:
        """Whether its last token, which it has written, is the last of all."""
        is_full = len(self.tokens) >= self.most_tokens
        return is_full or self.ends_with(self.tokens[-1], ends)

    def penalised(self, allowed: bytes | None = None) -> Penalised | None:
        """What its penalties and biases depend on, and what its guide has `allowed`; None without
        any."""
        if not self.variant.weighed:
            return None
        return Penalised(self.tokens, self.num_prompt, self.sampling.logit_bias, allowed)

    def fields(self) -> np.ndarray:
        """What a batch knows of it, int32 `[len(Field)]`; nothing may be under way."""
        fields = self._fields
        fields[Field.TOKEN], fields[Field.POSITION] = self.tokens[-1], len(self.tokens) - 1
        fields[Field.LIMIT] = self.most_tokens - 2  # where the last input that is wanted stands
        return fields


def variant_of_all(sequences: Tokens[Sequence]) -> Variant:
    """What must be computed for some of them."""
    return functools.reduce(operator.or_, (s.variant for s in sequences), Variant())


def check_fits(sequence: Sequence, context: int) -> None:
    """`EngineError` if a sequence is empty or can become longer than there is ever room for."""
    if not sequence.num_prompt or sequence.sampling.max_tokens < 1:
        raise EngineError("a generation needs at least one token before it and one to make")
    if sequence.most_tokens > context:
        prompt, budget = sequence.num_prompt, sequence.sampling.max_tokens
        raise EngineError(
            f"a prompt of {prompt} tokens and max_tokens {budget} need room for {prompt + budget} "
            f"tokens, there is room for {context}: shorten the prompt or lower max_tokens"
        )
