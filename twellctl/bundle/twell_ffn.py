"""The gated FFN as one torch operator: kernels where they run and pay, else plain torch.

`sparse_ffn` takes any input that torch's own products take and gives the same result; `train_ffn`
is the same for training. What the kernels do not take goes to those products, with one line in the
log for each reason. The operators are opaque to torch.compile. A CUDA graph can capture them, but
for the backward pass of training.

Exports carry copies of this code, which transformers imports under a package of its own for each.
Copies that are equal share the state of the first one; others have operators of other names.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .twell_cache import reasons_said, say_once
from .twell_config import ROUTES, SLOTS, TILE, requested
from .twell_dense import gated_ffn
from .twell_few import FEW_TOKENS
from .twell_launch import register_sources
from .twell_reasons import (
    check_numbers,
    most_trained_tokens,
    route_of_training,
    why_no_kernels,
    why_not_ffn,
    why_not_trained,
)
from .twell_train import define_operators, define_training, plain_train_ffn
from .twell_ways import Way, aligned, run_by_plan
from .twell_weights import FFN, Weight, plain_weight

# unless a route says so, gradients go over the kernels from so much work on (tokens x N x K: with a
# quarter of it the host was the slower one in a small model, LAB.md), below this density
TRAINED_FROM, TRAINED_BELOW = 10**11, 0.015


def sparse_ffn(
    x: Tensor,
    ffn: FFN,
    *,
    slots: int = SLOTS,
    tile: int = TILE,
    sources: str = "",
    route: str = "auto",
    plan: str = "",
    density: float | None = None,
) -> Tensor:
    """`down(relu(gate(x)) * up(x))`, `[..., K]` to `[..., K]`.

    Under autocast it computes in the autocast dtype, if the weights are not rounded.

    `sources` is what `register_sources` returned for the kernels; "" means none. `route`: "twell"
    (over what fires), "dense" (torch's products), or "auto": either, unless TWELL_ROUTE says which.
    By which way is told by `plan`, the text of a `WayPlan` that was measured (twell_choice.py), and
    without one by the rule of the route (twell_ways.py).
    `density`: the share of neurons that fire, if a profile measured it.

    The kernels read W_down by rows of neurons. So its values lie with strides (1, K), as after
    `w_down.t().contiguous().t()`, or `ffn.turned` has them so; else each call makes a copy, which
    costs time.

    Over rounded weights `gated_ffn` (twell_dense.py) rounds x and h, too; ways over what fires do
    not, so results differ a little between ways. Beyond FEW_TOKENS tokens there is `gated_ffn`
    alone for them, which torch.compile sees into. Rounded weights have no gradients.
    """
    if ffn.gate.is_rounded:
        if not (sources and x.is_cuda) or x.numel() > FEW_TOKENS * x.shape[-1]:
            return gated_ffn(x, ffn)
    else:
        tensors = (x, *(tensor for weight in ffn.weights for tensor in weight.tensors))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _trained(
                x,
                tuple(weight.values for weight in ffn.weights),
                tuple(weight.bias for weight in ffn.weights),
                None,
                slots=max(slots, min(SLOTS, tile)),  # a row without room takes ten times as long
                tile=tile,
                density=density,
                sources=sources,
                route=route,
                counted=False,
            )[0]
        if (dtype := _autocast_dtype(x)) is not None:
            x, ffn = x.to(dtype), _in_dtype(ffn, dtype)
    known = -1.0 if density is None else density
    return _gated_ffn_op(x, *_as_lists(ffn), tile, slots, known, sources, plan or route)


def sparse_ffn_of_engine(
    dense: Way,
    x: Tensor,
    ffn: FFN,
    *,
    slots: int,
    tile: int,
    sources: str,
    plan: str,
    density: float,
) -> Tensor:
    """`sparse_ffn` on a GPU where `dense` stands in for the way of that name.

    For engines with dense products of their own. It is no operator: call it inside of one.
    """
    return _run(x, ffn, tile, slots, density, sources, plan, dense)


def _in_dtype(ffn: FFN, dtype: torch.dtype) -> FFN:
    """The same weights, which are not rounded, in another dtype."""

    def cast(weight: Weight) -> Weight:
        bias = None if weight.bias is None else weight.bias.to(dtype)
        return plain_weight(weight.values.to(dtype), bias)

    return FFN(*map(cast, ffn.weights))


def _as_lists(ffn: FFN) -> tuple[Any, ...]:
    """An FFN as the operator takes it: kind, values, scales, biases, turned."""
    values = [weight.values for weight in ffn.weights]
    scales = [weight.scales for weight in ffn.weights]
    return ffn.kind, values, scales, [weight.bias for weight in ffn.weights], ffn.turned


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
    return _trained(
        x,
        (w_gate, w_up, w_down),
        (b_gate, b_up, b_down),
        penalty,
        slots=slots,
        tile=tile,
        density=density,
        sources=sources,
        route=route,
        counted=True,
        plain=plain,
    )


def _trained(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
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
    """`train_ffn` of gate, up and down; `counted`: whether the count is wanted."""
    if not torch.compiler.is_compiling():
        check_numbers(slots, tile)  # the operator asks again
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


def _gated_ffn(
    x: Tensor,
    kind: str,
    values: list[Tensor],
    scales: list[Tensor | None],
    biases: list[Tensor | None],
    turned: Tensor | None,
    tile: int,
    slots: int,
    density: float,
    sources: str,
    route: str,
) -> Tensor:
    """The operator `gated_ffn`, of what _FFN_SCHEMA names."""
    parts = zip(values, scales, biases, strict=True)
    gate, up, down = (Weight(kind, *of_one) for of_one in parts)
    route = route if sources and x.is_cuda else "dense"
    return _run(x, FFN(gate, up, down, turned), tile, slots, density, sources, route)


def _run(
    x: Tensor,
    ffn: FFN,
    tile: int,
    slots: int,
    density: float,
    sources: str,
    route: str,
    dense: Way | None = None,
) -> Tensor:
    """`[..., K]` to `[..., K]` by a route or a plan; `density` below 0: not known.

    `dense` stands in for torch's products.
    """
    check_numbers(slots, tile)
    rows, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], ffn.K)
    if not rows.numel():
        route = "dense"
    elif route in ROUTES:
        route = requested(route)
    if route != "dense":
        said = why_not_ffn(rows, ffn, tile)
        said = said or why_no_kernels(sources, rows.device.index, ffn.kind)
        if not said:
            y = run_by_plan(aligned(rows), ffn, slots, density, sources, route, dense)
            return y.view(shape)
        say_once(said)
    if dense is not None and rows.numel():
        return dense.run(None, None, rows, ffn, slots).view(shape)
    return gated_ffn(rows, ffn).view(shape)


# ---- operators ----


_FFN_SCHEMA = (
    "(Tensor x, str kind, Tensor[] values, Tensor?[] scales, Tensor?[] biases, Tensor? turned, "
    "int tile, int slots, float density, str sources, str route) -> Tensor"
)


def _fake_ffn(x: Tensor, kind: str, values: list[Tensor], *rest) -> Tensor:
    return x.new_empty(*x.shape[:-1], values[-1].shape[0])


def _own_digest() -> str:
    files = sorted(Path(__file__).parent.glob("twell_*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _define(digest: str) -> torch.library.Library:
    """The operator `twell::gated_ffn_<digest>`, and training's."""
    library = torch.library.Library("twell", "FRAGMENT")
    define_operators(library, digest, ("gated_ffn", _FFN_SCHEMA, _gated_ffn, _fake_ffn))
    define_training(library, digest)
    return library


_DIGEST = _own_digest()
_owner = sys.modules.setdefault(f"twell_ffn_{_DIGEST}", sys.modules[__name__])
if _owner is sys.modules[__name__]:
    _library = _define(_DIGEST)  # the operators live as long as this does
    _gated_ffn_op = getattr(torch.ops.twell, f"gated_ffn_{_DIGEST}").default
    _train_ffn_op = getattr(torch.ops.twell, f"train_ffn_{_DIGEST}").default
else:
    register_sources, sparse_ffn = _owner.register_sources, _owner.sparse_ffn
    sparse_ffn_of_engine = _owner.sparse_ffn_of_engine
    train_ffn, takes_training = _owner.train_ffn, _owner.takes_training
    reasons_said = _owner.reasons_said
    why_no_kernels = _owner.why_no_kernels
