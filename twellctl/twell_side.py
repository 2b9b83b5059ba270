"""The TwELL side of a bench: this installation's kernels, on one FFN or in a whole model."""

import copy
import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from twellctl.bundle import twell_format
from twellctl.errors import TwellError, UsageError
from twellctl.machine import line
from twellctl.resources import bundle_files
from twellctl.synthetic import FfnWeights

ROUTES = ("auto", "twell", "dense", "portable")


def check_routes(routes: tuple[str, ...]) -> None:
    """`UsageError` unless each is known, and there is one."""
    if bad := [route for route in routes if route not in ROUTES]:
        raise UsageError(f"route must be one of {', '.join(ROUTES)}, got {bad[0]!r}")
    if not routes or len(set(routes)) < len(routes):
        raise UsageError(f"route must be given once or not at all, got {', '.join(routes)}")


def kernel_sources() -> dict[str, bytes]:
    """{"pack.cu": source} and so on, of this installation."""
    files = bundle_files().items()
    kernels = {name: path for name, path in files if name.endswith((".cu", ".cuh"))}
    return {name.split("/")[-1]: path.read_bytes() for name, path in kernels.items()}


def twell_name(route: str, device: torch.device) -> str:
    """What a TwELL candidate is called in tables and JSON."""
    if device.type != "cuda":
        return "twell plain"
    return "twell" if route == "auto" else f"twell {route}"


def twell_ffn(
    route: str, slots: int, device: torch.device
) -> Callable[[Tensor, FfnWeights], Tensor]:
    """The FFN over TwELL: by kernels on CUDA; on the CPU plain torch, where no route is."""
    if device.type != "cuda":
        return lambda x, w: twell_format.gated_ffn(x, *w.split, slots=slots)
    from twellctl.bundle.twell_ffn import register_sources, sparse_ffn

    run = functools.partial(
        sparse_ffn,
        threshold=0.0,
        slots=slots,
        sources=register_sources(kernel_sources()),
        route=route,
    )
    return lambda x, w: run(x, *w.split)


def sharing_copy(model: nn.Module) -> nn.Module:
    """Another model over the same weights."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def failed(what: str, error: Exception) -> TwellError:
    """The one line of a candidate that must run and did not."""
    return TwellError(f"{what} failed: {line(error)}")
