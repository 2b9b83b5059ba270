"""The dense gated FFN that TwELL is measured against, in all the forms that torch makes fast.

Gate and up as two products or fused in one; eager, and under torch.compile.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.firing.synthetic import FfnWeights

EAGER, COMPILE = "eager", "compile"

Ffn = Callable[[Tensor, FfnWeights], Tensor]


def split_ffn(x, w_gate, w_up, w_down, b_gate, b_up, b_down) -> Tensor:
    """`[M, K]` to `[M, K]`: three products."""
    hidden = F.relu(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)
    return F.linear(hidden, w_down, b_down)


def fused_ffn(x, w_gate_up, w_down, b_gate_up, b_down) -> Tensor:
    """The same with gate and up in one product."""
    gate, up = F.linear(x, w_gate_up, b_gate_up).chunk(2, -1)
    return F.linear(F.relu(gate) * up, w_down, b_down)


def reference(x: Tensor, weights: FfnWeights) -> Tensor:
    """The dense equation in float64 for a few rows `[R, K]`."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = (
        None if tensor is None else tensor.double() for tensor in weights.split
    )
    x = x.double()
    hidden = F.relu(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)
    return F.linear(hidden, w_down, b_down)


def dense_ffns(modes: list[str]) -> dict[str, Ffn]:
    """{name: FFN} of the dense candidates; those to be compiled are, on their first call."""
    made: dict[str, Ffn] = {}
    for name in modes:
        split, fused = compiled(split_ffn, name), compiled(fused_ffn, name)
        made[f"dense {name}"] = lambda x, w, run=split: run(x, *w.split)
        made[f"dense {name}, fused"] = lambda x, w, run=fused: run(
            x, w.gate_up, w.down, w.gate_up_bias, w.down_bias
        )
    return made


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
