"""The modes that torch runs a dense form in: eager, and under torch.compile."""

import contextlib
from collections.abc import Callable, Iterator

import torch

EAGER, COMPILE = "eager", "compile"


def dense_modes(device: torch.device) -> list[str]:
    """What a device is measured under; on the CPU nothing is compiled."""
    return [EAGER, COMPILE] if device.type == "cuda" else [EAGER]


def compiled(function: Callable, name: str) -> Callable:
    """`function` in the mode of that name, for one shape; itself for "eager"."""
    return function if name == EAGER else torch.compile(function, dynamic=False)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before counts inside, and a silent return to eager is an error."""
    torch._dynamo.reset()
    settings = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(settings):
        yield
    torch._dynamo.reset()
