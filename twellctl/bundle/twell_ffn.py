"""The gated FFN as one torch operator: kernels where they run and pay, else plain torch.

`sparse_ffn` takes any input that torch's own products take and gives the same result; `train_ffn`
is the same for training. What the kernels do not take goes to those products, with one line in the
log for each reason. The operators are opaque to torch.compile and may be captured in a
CUDA graph.

Exports carry copies of this code, which transformers imports under a package of its own for each.
Copies that are equal share the state of the first one; others have operators of other names.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .twell_cache import reasons_said, say_once
from .twell_config import SLOTS, TILE
from .twell_few import FEW_TOKENS
from .twell_fp8 import Fp8Weight, fp8_ffn
from .twell_launch import register_sources
from .twell_reasons import (
    check_numbers,
    most_trained_tokens,
    route_of_training,
    why_no_e4m3_kernels,
    why_no_kernels,
    why_not_ffn,
    why_not_trained,
)
from .twell_route import known_choices, requested
from .twell_train import define_operators, define_training, plain_train_ffn
from .twell_ways import Way, aligned, dense_products, run_by_route
from .twell_weights import FFN

# unless a route says so, gradients go over the kernels from so much work on (tokens x N x K: with a
# quarter of it the host was the slower one in a small model, LAB.md), below this density
TRAINED_FROM, TRAINED_BELOW = 10**11, 0.015


def sparse_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    slots: int = SLOTS,
    tile: int = TILE,
    sources: str = "",
    route: str = "auto",
    density: float | None = None,
) -> Tensor:
    """`down(relu(gate(x)) * up(x))`, `[..., K]` to `[..., K]`.

    `w_gate`, `w_up` are `[N, K]`, `w_down` `[K, N]`, biases `[N]`, `[N]`, `[K]`. Under autocast it
    computes in the autocast dtype.

    `sources` is what `register_sources` returned for the kernels; "" means none. `route`: "twell"
    (the fastest of this GPU's ways over what fires), "dense" (torch's products), or "auto": the
    fastest of all ways (twell_ways.py), unless TWELL_ROUTE says which.
    `density`: the share of neurons that fire, if a profile tells it.

    The kernels read `w_down` by rows of neurons. So it lies with strides (1, K), as after
    `w_down.t().contiguous().t()`; of any other layout each call makes a copy, which costs time.
    """
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        most = max(slots, min(SLOTS, tile))  # a row without room takes ten times as long there
        numbers = {"slots": most, "tile": tile, "density": density}
        return _trained(tensors, None, **numbers, sources=sources, route=route, counted=False)[0]
    if (dtype := _autocast_dtype(x)) is not None:
        tensors = tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    known = -1.0 if density is None else density
    return _gated_ffn_op(*tensors, tile, slots, known, sources, route)


def sparse_fp8_ffn(
    x: Tensor,
    gate: Fp8Weight,
    up: Fp8Weight,
    down: Fp8Weight,
    turned: Tensor | None = None,
    *,
    slots: int = SLOTS,
    tile: int = TILE,
    sources: str = "",
    route: str = "auto",
    density: float | None = None,
) -> Tensor:
    """The same of weights in e4m3: `fp8_ffn`, or a way over what fires, where that is faster.

    `fp8_ffn` rounds x and h to e4m3, ways over what fires do not. So results differ a little
    between ways. Beyond FEW_TOKENS tokens there is `fp8_ffn` alone, which torch.compile sees into.

    `turned`: the values of `down` by rows of neurons, `[N, K]`; without it each call of the kernels
    makes a copy. No gradients.
    """
    if not (sources and x.is_cuda) or x.numel() > FEW_TOKENS * x.shape[-1]:
        return fp8_ffn(x, gate, up, down)
    known = -1.0 if density is None else density
    tensors = x, *_parts(gate, up, down), turned
    return _fp8_ffn_op(*tensors, tile, slots, known, sources, route)


def _parts(*weights: Fp8Weight) -> tuple[Tensor | None, ...]:
    """Values, biases and scales `[N]`, as the operator takes them."""
    values, biases = [w.values for w in weights], [w.bias for w in weights]
    return (*values, *biases, *(w.scale.reshape(-1) for w in weights))


def fp8_ffn_beside(
    dense: Way,
    x: Tensor,
    gate: Fp8Weight,
    up: Fp8Weight,
    down: Fp8Weight,
    turned: Tensor,
    *,
    slots: int,
    tile: int,
    sources: str,
    density: float,
) -> Tensor:
    """`sparse_fp8_ffn` on a GPU where `dense` stands in for the way of that name.

    For engines with dense FP8 products of their own. It is no operator: call it inside of one.
    """
    numbers = tile, slots, density, sources, "auto"
    return _fp8_ffn(x, *_parts(gate, up, down), turned, *numbers, dense=dense)


def train_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    penalty: Tensor | float | None = None,
    slots: int = SLOTS,
    tile: int = TILE,
    sources: str = "",
    route: str = "auto",
    density: float | None = None,
    plain: Callable[..., tuple[Tensor, Tensor]] = plain_train_ffn,
) -> tuple[Tensor, Tensor]:
    """(y as of `sparse_ffn`, how many fired), for training.

    `h = relu(gate) * up`. The gradient of `penalty` times the sum of |h| over tokens and neurons is
    added to the gradients, as if it were part of the loss. `penalty` is one number: a tensor, so
    that a compiled graph does not depend on its value, or a float. The count has no gradient, and
    there is no second derivative. Weights may be fp32 under autocast; their gradients are fp32
    then. Without a route of its own, and without TWELL_ROUTE, the kernels take what has a known
    density below `TRAINED_BELOW` and work of `TRAINED_FROM` or more; `plain` (some form of
    `plain_train_ffn`) the rest.
    """
    if isinstance(penalty, Tensor) and penalty.numel() != 1:
        raise ValueError(f"penalty must be one number, got {list(penalty.shape)}")
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    numbers = {"slots": slots, "tile": tile, "density": density}
    how = {"sources": sources, "route": route, "counted": True, "plain": plain}
    return _trained(tensors, penalty, **numbers, **how)


def _trained(
    tensors: tuple[Tensor | None, ...],
    penalty: Tensor | float | None,
    *,
    slots: int,
    tile: int,
    sources: str,
    route: str,
    density: float | None,
    counted: bool,
    plain: Callable[..., tuple[Tensor, Tensor | None]] = plain_train_ffn,
) -> tuple[Tensor, Tensor | None]:
    """`train_ffn` of x, weights and biases; `counted`: whether the count is wanted."""
    if not torch.compiler.is_compiling():
        check_numbers(slots, tile)  # the operator asks again
    x, weights, biases = tensors[0], tensors[1:4], tensors[4:]
    if isinstance(penalty, Tensor):
        penalty = penalty.to(x.device, torch.float32)
    N, K = weights[0].shape  # and not of x, whose sizes may be symbols of a compiler
    if not (
        sources
        and x.is_cuda
        and x.numel()
        and x.shape[-1] == K
        and takes_training(route_of_training(route), x.numel() * N, density)
        and not why_not_trained(*_for_training(sources, x, weights, biases, tile))
    ):
        return plain(x, *weights, *biases, penalty, counted)
    if isinstance(penalty, float):
        penalty = torch.full((), penalty, dtype=torch.float32, device=x.device)
    x = x.to(_autocast_dtype(x) or x.dtype)
    rest = (*weights, biases[2], penalty, slots, sources)
    most = most_trained_tokens(x.device.index, N, K, slots)
    if x.numel() // K <= most:
        return _train_ffn_op(x, *rest)[:2]
    found = [_train_ffn_op(piece, *rest)[:2] for piece in x.reshape(-1, K).split(most)]
    y, fired = zip(*found, strict=True)
    return torch.cat(y).view(x.shape), sum(fired)


def _for_training(
    sources: str, x: Tensor, weights: tuple[Tensor, ...], biases: tuple, tile: int
) -> tuple[object, ...]:
    """What `why_not_trained` is asked, constants of a compiled graph."""
    autocast = _autocast_dtype(x)
    there = [t for t in (*weights, *biases) if t is not None]
    dtypes = [t.dtype for t in there]
    own = (x.dtype if autocast is None else autocast,)
    taken = own if autocast is None else (*own, torch.float32)
    lie = dtypes[0] in taken and all(dtype == dtypes[0] for dtype in dtypes)
    # a DTensor has no kernels
    lie = lie and all(t.device == x.device and not hasattr(t, "device_mesh") for t in there)
    shapes = tuple(None if t is None else tuple(t.shape) for t in (*weights, *biases))
    N, K = weights[0].shape
    return sources, x.device.index, K, N, tile, str(own[0]), shapes, lie


def takes_training(route: str, work: int, density: float | None) -> bool:
    """Whether gradients are to go over the kernels, where these take them; `work`: M x N x K."""
    if route != "auto":
        return route == "twell"
    return work >= TRAINED_FROM and density is not None and density < TRAINED_BELOW


# ---- which path ----


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has none, and raises
        return None
    return torch.get_autocast_dtype(device)


def _gated_ffn(x: Tensor, *given: Any) -> Tensor:
    """The operator `gated_ffn`, of what _FFN_SCHEMA names."""
    w_gate, w_up, w_down, *biases, tile, slots, density, sources, route = given
    check_numbers(slots, tile)
    rows, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], w_down.shape[0])
    if not rows.numel():
        return x.new_empty(shape)
    ffn = FFN(w_gate, w_up, w_down.t(), *biases)
    route = requested(route) if sources and x.is_cuda else "dense"
    if route == "dense":
        return dense_products(rows, ffn).view(shape)
    index = rows.device.index
    if said := why_not_ffn(rows, ffn, tile) or why_no_kernels(sources, index):
        say_once(said)
        return dense_products(rows, ffn).view(shape)
    return run_by_route(aligned(rows), ffn, slots, density, sources, route).view(shape)


def _fp8_ffn(x: Tensor, *given: Any, dense: Way | None = None) -> Tensor:
    """The operator `fp8_ffn`, of what _FP8_SCHEMA names; `dense` stands in for torch's products."""
    w_gate, w_up, w_down, *rest, turned, tile, slots, density, sources, route = given
    check_numbers(slots, tile)
    ffn = FFN(w_gate, w_up, w_down.t(), *rest)
    rows, route = x.reshape(-1, x.shape[-1]), requested(route)
    if rows.numel() and route != "dense":
        read = ffn if turned is None else replace(ffn, w_down=turned)
        said = why_not_ffn(rows, read, tile) or why_no_e4m3_kernels(sources, x.device.index)
        if said is None:
            y = run_by_route(aligned(rows), ffn, slots, density, sources, route, turned, dense)
            return y.view(x.shape)
        say_once(said)
    y = dense_products(rows, ffn) if dense is None else dense.run(None, None, rows, ffn, slots)
    return y.view(x.shape)


# ---- operators ----


_WEIGHTS = (
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor? b_down"
)
_NUMBERS = "int tile, int slots, float density, str sources, str route"
_FFN_SCHEMA = f"({_WEIGHTS}, {_NUMBERS}) -> Tensor"
_SCALES = "Tensor s_gate, Tensor s_up, Tensor s_down, Tensor? turned"
_FP8_SCHEMA = f"({_WEIGHTS}, {_SCALES}, {_NUMBERS}) -> Tensor"


def _fake_ffn(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *rest) -> Tensor:
    return x.new_empty(*x.shape[:-1], w_down.shape[0])


def _own_digest() -> str:
    files = sorted(Path(__file__).parent.glob("twell_*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _define(digest: str) -> torch.library.Library:
    """The operators `twell::gated_ffn_<digest>` and `fp8_ffn_`, and training's."""
    library = torch.library.Library("twell", "FRAGMENT")
    define_operators(
        library,
        digest,
        ("gated_ffn", _FFN_SCHEMA, _gated_ffn, _fake_ffn),
        ("fp8_ffn", _FP8_SCHEMA, _fp8_ffn, _fake_ffn),
    )
    define_training(library, digest)
    return library


_DIGEST = _own_digest()
_owner = sys.modules.setdefault(f"twell_ffn_{_DIGEST}", sys.modules[__name__])
if _owner is sys.modules[__name__]:
    _library = _define(_DIGEST)  # the operators live as long as this does
    _gated_ffn_op = getattr(torch.ops.twell, f"gated_ffn_{_DIGEST}").default
    _fp8_ffn_op = getattr(torch.ops.twell, f"fp8_ffn_{_DIGEST}").default
    _train_ffn_op = getattr(torch.ops.twell, f"train_ffn_{_DIGEST}").default
else:
    register_sources, sparse_ffn = _owner.register_sources, _owner.sparse_ffn
    sparse_fp8_ffn, fp8_ffn_beside = _owner.sparse_fp8_ffn, _owner.fp8_ffn_beside
    train_ffn, takes_training = _owner.train_ffn, _owner.takes_training
    reasons_said, known_choices = _owner.reasons_said, _owner.known_choices
    why_no_kernels = _owner.why_no_kernels
