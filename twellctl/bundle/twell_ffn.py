"""The gated FFN as one torch operator: kernels where they run and pay, else plain torch.

`sparse_ffn` takes any input that `twell_format.gated_ffn` takes and gives the same result. What
the kernels do not take goes to plain torch, with one line in the log for each reason; so does what
wants gradients. The operators are opaque to torch.compile and may be captured in a CUDA graph.

Exports carry copies of this code, which transformers imports under a package of its own for each.
Copies that are equal share the state of the first one; others have operators of other names.
"""

import contextlib
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_config import SLOTS, TILE, storable_threshold
from .twell_few import few_ffn, few_ffn_kernels, takes_few
from .twell_format import fires, gated_ffn
from .twell_launch import (
    KernelError,
    KernelSet,
    Limits,
    LoadError,
    device_limits,
    kernels_for,
    register_sources,
)
from .twell_nvrtc import what_is_missing
from .twell_plan import ceil_div, why_unfit
from .twell_route import Kind, choose, density_bucket, known_choices, requested, token_bucket
from .twell_sequence import (
    HOPPER_KERNELS,
    PORTABLE_KERNELS,
    dense_ffn,
    fused_ffn,
    hopper_ffn,
    launch_gate_pack,
    portable_ffn,
)
from .twell_weights import FFN

logger = logging.getLogger(__name__)
NOT_FINITE = 1 << 30  # in a count of `gate_pack`
_SAMPLED_ROWS = 4096


def sparse_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    threshold: float = 0.0,
    slots: int = SLOTS,
    tile: int = TILE,
    sources: str = "",
    route: str = "auto",
    density: float | None = None,
) -> Tensor:
    """`down(relu_t(gate(x)) * up(x))`, `[..., K]` to `[..., K]`, like `gated_ffn`.

    `sources` is what `register_sources` returned for the kernels; "" means none. `route`: "twell"
    (the kernels of this GPU), "portable" (those of any), "dense" (torch's products), "fused" (dense
    on Hopper, gate and up in one kernel), or "auto": the fastest, unless TWELL_ROUTE says which.
    `density`: the share of neurons that fire, if a profile tells it.

    The kernels read `w_down` by rows of neurons. So it lies with strides (1, K), as after
    `w_down.t().contiguous().t()`; of any other layout each call makes a copy, which costs time.
    """
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    numbers = {"threshold": threshold, "tile": tile, "slots": slots}
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        if sources and x.is_cuda and not torch.compiler.is_compiling():
            _say_once("gradients are asked for, and slow here; torch.no_grad() asks for none")
        return gated_ffn(*tensors, **numbers)
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # meta has none, and raises
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    known = -1.0 if density is None else density
    return _gated_ffn_op(*tensors, threshold, tile, slots, known, sources, route)


def gate_pack(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None = None,
    *,
    threshold: float = 0.0,
    slots: int = SLOTS,
    sources: str,
) -> tuple[Tensor, Tensor]:
    """(counts `[M, T]`, entries `[M, T, slots]`), int32, of the gate of `x` `[M, K]`, on Hopper.

    As `twell_format.pack` has them, but: a count has `NOT_FINITE` added where the tile holds NaN
    or Inf, entries of a tile are in no order of columns, and slots behind the count are not
    written. `KernelError` where the kernel cannot run.
    """
    return _gate_pack_op(x, w_gate, b_gate, threshold, slots, sources)


# ---- which path ----


def why_no_kernels(sources: str, index: int, route: str = "auto") -> str | None:
    """None if the kernels of `route` are loaded on CUDA device `index`, else why they cannot be.

    The first call for a device compiles what the cache does not hold.
    """
    return _why_not_here(sources, index, takes_hopper_kernels(index, route))


def takes_hopper_kernels(index: int, route: str = "auto") -> bool:
    """Whether CUDA device `index` goes the way of Hopper, not the portable one."""
    portable = route == "portable" or os.environ.get("TWELL_PORTABLE") == "1"
    return not portable and device_limits(index).capability == (9, 0)


@contextlib.contextmanager
def reasons_said() -> Iterator[list[str]]:
    """Collect what calls in the block say of going without the kernels; the log has none of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    _say_once.cache_clear()
    try:
        yield said
    finally:
        _say_once.cache_clear()
        logger.removeHandler(handler)
        logger.propagate = propagate


def _gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    threshold: float,
    tile: int,
    slots: int,
    density: float,
    sources: str,
    route: str,
) -> Tensor:
    """The operator `gated_ffn`."""
    if not x.is_cuda:
        numbers = {"threshold": threshold, "tile": tile, "slots": slots}
        return gated_ffn(x, w_gate, w_up, w_down, b_gate, b_up, b_down, **numbers)
    _check(threshold, slots, tile)
    rows = x.reshape(-1, x.shape[-1])
    if not rows.numel():
        return x.new_empty(*x.shape[:-1], w_down.shape[0])
    ffn = FFN(w_gate, w_up, w_down.t(), b_gate, b_up, b_down, threshold)
    route = requested(route) if sources else "dense"
    hopper = takes_hopper_kernels(rows.device.index, route)
    if route != "dense" and (
        said := _why_not_ffn(rows, ffn, tile)
        or _why_not_here(sources, rows.device.index, hopper)
        or _why_not_route(route, hopper)
    ):
        _say_once(said)
        route = "dense"
    if route == "dense":
        y = dense_ffn(rows, ffn)
    else:
        y = _by_route(_aligned(rows), ffn, slots, density, sources, route, hopper)
    return y.view(*x.shape[:-1], y.shape[-1])


def _by_route(
    rows: Tensor, ffn: FFN, slots: int, density: float, sources: str, route: str, hopper: bool
) -> Tensor:
    limits = device_limits(rows.device.index)
    kernels = kernels_for(sources, rows.device.index)
    lies_well = _lies_well(ffn.w_down)

    def sparse() -> Tensor:
        laid = ffn if lies_well else replace(ffn, w_down=_aligned(ffn.w_down))
        return _sparse_by_tokens(kernels, limits, rows, laid, slots, hopper)

    runs = {"dense": lambda: dense_ffn(rows, ffn), "twell": sparse}
    if hopper:
        runs["fused"] = lambda: fused_ffn(kernels, limits, rows, ffn)
    if route == "auto":
        known = None if density < 0 else density
        kind = Kind(
            torch.cuda.get_device_name(rows.device),
            ffn.K,
            ffn.N,
            len(ffn.tensors) > 3,
            token_bucket(rows.shape[0]),
            None if known is None else density_bucket(known),
            slots,
            f"{'hopper' if hopper else 'portable'} {sources[:12]}{'' if lies_well else ' copying'}",
            lies_well and takes_few(rows.shape[0], ffn.N, limits),
        )
        with torch.cuda.device(rows.device.index):  # whose stream is timed, or captured
            route = choose(
                kind,
                known,
                torch.cuda.is_current_stream_capturing(),
                runs,
                lambda: _sampled_density(rows, ffn),
            )
    return runs.get(route, sparse)()


def _sparse_by_tokens(
    kernels: KernelSet, limits: Limits, rows: Tensor, ffn: FFN, slots: int, hopper: bool
) -> Tensor:
    if takes_few(rows.shape[0], ffn.N, limits):
        return few_ffn(kernels, limits, rows, ffn)
    if hopper:
        return hopper_ffn(kernels, limits, rows, ffn, slots)
    return portable_ffn(kernels, limits, rows, ffn)


def _why_not_ffn(rows: Tensor, ffn: FFN, tile: int) -> str | None:
    """None if the kernels take this, else what they do not take."""
    N, K = ffn.N, ffn.K
    shapes = [tuple(tensor.shape) for tensor in ffn.tensors]
    biases = [n for n, b in ((N, ffn.b_gate), (N, ffn.b_up), (K, ffn.b_down)) if b is not None]
    if shapes != [(N, K), (N, K), (N, K), *((n,) for n in biases)]:
        return "the kernels take weights [N, K], [N, K] and [K, N], biases [N], [N] and [K]"
    said = _why_not(rows, ffn.tensors, K, N, tile)
    as_they_are = (t for t in ffn.tensors if t is not ffn.w_down)  # of that a copy is made
    return said or _why_they_do_not_lie_well(as_they_are)


def _why_not(
    rows: Tensor, weights: tuple[Tensor, ...], K: int, N: int, tile: int = TILE
) -> str | None:
    if rows.dim() != 2 or rows.shape[1] != K:
        return f"the kernels take inputs [M, {K}], not {list(rows.shape)}"
    if rows.dtype != torch.bfloat16:
        return f"the kernels take bf16, not {str(rows.dtype).removeprefix('torch.')}"
    if said := why_unfit(K, N, tile, device_limits(rows.device.index).smem_bytes):
        return f"the kernels take {said}"
    for weight in weights:
        if (weight.dtype, weight.device) != (rows.dtype, rows.device):
            return "the kernels take weights of the dtype and device of their input"
    return None


def _lies_well(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _why_they_do_not_lie_well(weights: Iterable[Tensor]) -> str | None:
    if all(map(_lies_well, weights)):
        return None
    return "the kernels take contiguous weights that begin at multiples of 16 bytes"


def _why_not_here(sources: str, index: int, hopper: bool) -> str | None:
    """None if the kernels are compiled and loaded on a device, else why they are not."""
    try:
        return _why_never_here(sources, index, hopper)
    except LoadError as error:
        return str(error)


@functools.cache
def _why_never_here(sources: str, index: int, hopper: bool) -> str | None:
    """The same, once and for all; a `LoadError`, which may pass, goes through and is not kept."""
    if torch.version.cuda is None or device_limits(index).capability < (8, 0):
        return "the kernels need an NVIDIA GPU of compute capability 8.0 or newer"
    if said := what_is_missing():
        return said
    try:
        kernels = kernels_for(sources, index)
        # all at once: what comes later, and needs others, may be the capture of a graph
        few = few_ffn_kernels(device_limits(index))
        kernels.prepare((*(HOPPER_KERNELS if hopper else PORTABLE_KERNELS), *few))
    except LoadError:
        raise
    except KernelError as error:
        return str(error)
    return None


def _why_not_route(route: str, hopper: bool) -> str | None:
    """None if there are kernels for `route`, else where there are."""
    if route == "fused" and not hopper:
        return "the fused route needs a Hopper GPU (compute capability 9.0) and no TWELL_PORTABLE"
    return None


@functools.cache
def _check(threshold: float, slots: int, tile: int) -> None:
    if storable_threshold(threshold) != threshold:
        raise ValueError(f"threshold {threshold} is not exact in bf16: use storable_threshold")
    if not 1 <= slots <= tile:
        raise ValueError(f"TwELL needs 1 <= slots <= tile, got {slots} of {tile}")


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("TwELL kernels are not used, plain PyTorch is: %s", reason)


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _sampled_density(rows: Tensor, ffn: FFN) -> float:
    step = ceil_div(rows.shape[0], _SAMPLED_ROWS)
    gate = F.linear(rows[::step], ffn.w_gate, ffn.b_gate)
    return fires(gate, ffn.threshold).float().mean().item()


# ---- operators ----


def _gate_pack(
    x: Tensor, w_gate: Tensor, b_gate: Tensor | None, threshold: float, slots: int, sources: str
) -> tuple[Tensor, Tensor]:
    """The operator `gate_pack`."""
    _check(threshold, slots, TILE)
    if not x.is_cuda or not takes_hopper_kernels(x.device.index):
        raise KernelError("gate_pack needs a Hopper GPU (compute capability 9.0)")
    biases = () if b_gate is None else (b_gate,)
    index, (N, K) = x.device.index, w_gate.shape
    weights = (w_gate, *biases)
    if said := (
        _why_not(x, weights, K, N)
        or _why_they_do_not_lie_well(weights)
        or _why_not_here(sources, index, True)
    ):
        raise KernelError(f"gate_pack cannot run: {said}")
    counts, entries = _fake_gate_pack(x, w_gate, b_gate, threshold, slots, sources)
    if x.shape[0]:
        rows, heavy_count = _aligned(x), counts.new_empty(1)
        limits, kernels = device_limits(index), kernels_for(sources, index)
        gate = (w_gate, b_gate, threshold)
        launch_gate_pack(kernels, limits, rows, *gate, counts, entries, heavy_count)
    return counts, entries


def _fake_gated_ffn(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *rest) -> Tensor:
    return x.new_empty(*x.shape[:-1], w_down.shape[0])


def _fake_gate_pack(x, w_gate, b_gate, threshold, slots, sources) -> tuple[Tensor, Tensor]:
    tiles = (x.shape[0], ceil_div(w_gate.shape[0], TILE))
    counts = torch.empty(tiles, dtype=torch.int32, device=x.device)
    return counts, torch.empty((*tiles, slots), dtype=torch.int32, device=x.device)


_FFN_SCHEMA = (
    "(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor? b_down, float threshold, int tile, int slots, float density, str sources, str route) "
    "-> Tensor"
)
_PACK_SCHEMA = (
    "(Tensor x, Tensor w_gate, Tensor? b_gate, float threshold, int slots, str sources) "
    "-> (Tensor counts, Tensor entries)"
)


def _own_digest() -> str:
    files = sorted(Path(__file__).parent.glob("twell_*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _define(digest: str) -> torch.library.Library:
    """The operators `twell::gated_ffn_<digest>` and `twell::gate_pack_<digest>`."""
    library = torch.library.Library("twell", "FRAGMENT")
    for name, schema, run, fake in (
        ("gated_ffn", _FFN_SCHEMA, _gated_ffn, _fake_gated_ffn),
        ("gate_pack", _PACK_SCHEMA, _gate_pack, _fake_gate_pack),
    ):
        named = f"{name}_{digest}"
        library.define(named + schema, tags=(torch.Tag.needs_exact_strides,))
        library.impl(named, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"twell::{named}", fake, lib=library)
    return library


_DIGEST = _own_digest()
_owner = sys.modules.setdefault(f"twell_ffn_{_DIGEST}", sys.modules[__name__])
if _owner is sys.modules[__name__]:
    _library = _define(_DIGEST)  # the operators live as long as this does
    _gated_ffn_op = getattr(torch.ops.twell, f"gated_ffn_{_DIGEST}").default
    _gate_pack_op = getattr(torch.ops.twell, f"gate_pack_{_DIGEST}").default
else:
    register_sources = _owner.register_sources
    sparse_ffn, gate_pack = _owner.sparse_ffn, _owner.gate_pack
    reasons_said, known_choices = _owner.reasons_said, _owner.known_choices
    why_no_kernels = _owner.why_no_kernels
