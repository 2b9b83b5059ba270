"""The log of what goes without the kernels: each reason once."""

import contextlib
import functools
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@functools.cache
def say_once(reason: str) -> None:
    logger.warning("TwELL kernels are not used, plain PyTorch is: %s", reason)


@contextlib.contextmanager
def reasons_said() -> Iterator[list[str]]:
    """Collect what calls in the block say of going without the kernels; the log has none of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    say_once.cache_clear()
    try:
        yield said
    finally:
        say_once.cache_clear()
        logger.removeHandler(handler)
        logger.propagate = propagate
