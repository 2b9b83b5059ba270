"""The seam between HTTP and the model: tokens in, tokens out. No torch, no text.

`GenerateEngine` in generation.py stands behind it; a faster engine keeps these shapes.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen, and at most how many."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None  # None: another draw each time


class EngineError(Exception):
    """A generation failed; the engine goes on with the next one."""


class OutOfMemory(EngineError):
    """There was no memory for this generation."""


class EngineClosed(EngineError):
    """The engine stops or has stopped."""


class Engine(Protocol):
    """One model that continues token lists."""

    context: int
    vocab_size: int
    eos_tokens: frozenset[int]

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[int, None]:
        """The tokens after `prompt`, as they come, up to and with one of `eos_tokens`.

        Closing the generator stops the work. Raises `EngineError`.
        """
        ...

    def close(self) -> None:
        """Stop what runs and what waits; returns when the worker has ended."""
        ...
