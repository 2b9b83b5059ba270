"""What the engine is to those above it: tokens in, tokens out. No torch, no text."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twellctl.decoding.drafted import Draft, Drafted
from twellctl.errors import UsageError

MAX_TOP_LOGPROBS = 20
SCREENED, WHOLE = GATES = ("screened", "whole")  # how the gates of a step are read


class Guide(Protocol):
    """Where one text stands in the grammar that it must follow; llguidance's matcher is one."""

    def compute_bitmask(self) -> bytes:
        """One bit a token, the first token's lowest: whether it may be next."""
        ...

    def consume_token(self, token: int) -> bool:
        """The token that was chosen; whether it may be there."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen, at most how many, and what each comes with."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None  # None: another draw each time
    top_logprobs: int | None = None  # None: no log-probabilities; 0 to 20: of how many others
    densities: bool = False  # with the share of each layer's neurons that fired
    ignore_eos: bool = False  # go on after a token that ends a text
    min_p: float = 0.0  # tokens of less than so much of the likeliest one's share are not drawn
    repetition_penalty: float = 1.0  # divides logits of tokens that were there, the prompt's too
    frequency_penalty: float = 0.0  # taken off a token's logit as often as it was written
    presence_penalty: float = 0.0  # taken off the logit of a token that was written
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to logits, by token
    guide: Callable[[], Guide] | None = None  # gives a text the one that it must follow


@dataclass(frozen=True, slots=True)
class Token:
    """One token that was chosen."""

    id: int
    # of the model's own distribution (temperature 1, nothing cut), if Sampling asked for it
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, likeliest first
    # share of the neurons that fired in each gated FFN, in the pass that led to this token
    densities: tuple[float, ...] | None = None
    # None: its round had no drafts. They change no token, nor what it comes with
    draft: Draft | None = field(default=None, compare=False)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and what is going on now."""

    running: int  # sequences being continued
    waiting: int  # sequences that wait for room
    capacity: int  # sequences that can run at once
    prompt_tokens: int
    generated_tokens: int
    cache_used: float  # share of the cache's room that is taken, 0 to 1
    densities: tuple[float, ...]  # mean share that fired, by gated FFN; empty before the first
    failed: int = 0  # generations since the last token that failed, by no fault of their clients
    drafted: Drafted = field(default_factory=Drafted)


class EngineError(Exception):
    """A generation failed; the engine goes on with the next one."""


class OutOfMemory(EngineError):
    """There was no memory for this generation."""


class GuideError(EngineError):
    """A text cannot follow its guide any further, which is no failure of the engine's."""


class QueueFull(EngineError):
    """Too many generations wait already."""


class EngineClosed(EngineError):
    """The engine stops or has stopped."""


class Engine(Protocol):
    """One model that continues token lists."""

    context: int
    vocab_size: int
    max_held: int  # sequences that can run and wait at once
    drafters: tuple[str, ...]  # the names of those that draft for it
    eos_tokens: frozenset[int]

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Token, None]:
        """The tokens after `prompt`, as they come, up to and with one of `eos_tokens`.

        With `ignore_eos` they end with the last of `max_tokens`. Closing the generator stops the
        work. Raises `EngineError`.
        """
        ...

    def stats(self) -> EngineStats:
        """What the engine does and has done; from any thread."""
        ...

    def close(self) -> None:
        """Take nothing new, end what runs, and stop; returns when it has."""
        ...


def check_gates(gates: str) -> None:
    """`UsageError` for what is none of `GATES`."""
    if gates not in GATES:
        raise UsageError(f"gates must be {' or '.join(GATES)}, got {gates!r}")
