"""Why an input goes without the kernels."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .twell_cache import say_once
from .twell_config import requested
from .twell_dense import ROUNDINGS
from .twell_few import few_kernels
from .twell_grad_plan import training_tokens
from .twell_launch import KernelError, LoadError, device_limits, kernels_for
from .twell_nvrtc import what_is_missing
from .twell_plan import Limits, why_unfit
from .twell_spec import ENTRY_FILES, KINDS
from .twell_weights import FFN, Weight

# every entry that an exported model may launch, on any device
ALL_KERNELS = frozenset(e for e, source in ENTRY_FILES.items() if not source.startswith("decode/"))
_FOR_LISTS = ("gate_pack", "plan", "up", "hidden", "down", "heavy")
# of Hopper: for many tokens, and for training
HOPPER_KERNELS = tuple(
    entry
    for entry, source in ENTRY_FILES.items()
    if source in {f"ffn/{name}.cu" for name in _FOR_LISTS}
)
GRAD_KERNELS = tuple(e for e, source in ENTRY_FILES.items() if source.startswith("train/"))


def check_numbers(slots: int, tile: int) -> None:
    if not 1 <= slots <= tile:
        raise ValueError(f"TwELL needs 1 <= slots <= tile, got {slots} of {tile}")


def takes_hopper_kernels(index: int) -> bool:
    """Whether CUDA device `index` runs Hopper's kernels; others have those for few tokens."""
    return device_limits(index).hopper


def why_no_kernels(sources: str, index: int, kind: str = "bf16") -> str | None:
    """None if the kernels over weights of `kind` are loaded on CUDA device `index`, else why not.

    The first call for a device compiles what the cache does not hold.
    """
    limits = device_limits(index)
    if kind != "bf16" and (said := why_too_old(kind, limits)):
        return said
    return why_not_loaded(sources, index, _entries(limits, kind))


def why_too_old(kind: str, limits: Limits) -> str | None:
    """None if the operator takes weights of `kind` on such a GPU, else what GPU it needs."""
    needed = KINDS[kind].capability
    if limits.capability >= needed:
        return None
    version = ".".join(map(str, needed))
    return f"kernels over {kind} weights need compute capability {version} or newer"


def why_no_multiples(kind: str, K: int, N: int) -> str | None:
    """None if rows of K and of N have as many weights of `kind` as the kernels take, else why not.

    Rows of N are those of W_down, of which dense products are made.
    """
    step = KINDS[kind].step
    if K % step or N % step:
        return f"over {kind} weights the kernels take multiples of {step}, not {K} and {N}"
    return None


@functools.cache
def _entries(limits: Limits, kind: str) -> tuple[str, ...]:
    """All at once: what comes later, and needs others, may be the capture of a graph."""
    many = HOPPER_KERNELS if limits.hopper and kind == "bf16" else ()
    return (*many, *few_kernels(limits, kind))


def why_not_loaded(sources: str, index: int, entries: tuple[str, ...]) -> str | None:
    """None if `entries` are compiled and loaded on CUDA device `index`, else why they are not."""
    try:
        return _why_never_loaded(sources, index, entries)
    except LoadError as error:
        return str(error)


@functools.cache
def _why_never_loaded(sources: str, index: int, entries: tuple[str, ...]) -> str | None:
    """The same, once and for all; a `LoadError`, which may pass, goes through and is not kept."""
    if torch.version.cuda is None or device_limits(index).capability < (8, 0):
        return "the kernels need an NVIDIA GPU of compute capability 8.0 or newer"
    if said := what_is_missing():
        return said
    try:
        kernels_for(sources, index).prepare(entries)
    except LoadError:
        raise
    except KernelError as error:
        return str(error)
    return None


def why_not_ffn(rows: Tensor, ffn: FFN, tile: int) -> str | None:
    """None if the kernels take these inputs and weights, else what they do not take."""
    N, K = ffn.N, ffn.K
    shapes = (N, K), (N, K), (K, N)
    if not all(map(_has_shape, ffn.weights, shapes)) or {w.kind for w in ffn.weights} != {ffn.kind}:
        shapes_said = "weights [N, K], [N, K] and [K, N] of one kind, biases [N], [N] and [K]"
        return f"the kernels take {shapes_said}, a scale for each row of what is rounded"
    if rows.dim() != 2 or rows.shape[1] != K:
        return f"the kernels take inputs [M, {K}], not {list(rows.shape)}"
    if rows.dtype != torch.bfloat16:
        return f"the kernels take bf16, not {str(rows.dtype).removeprefix('torch.')}"
    if said := why_not_sizes(K, N, ffn.kind, tile, rows.device.index):
        return said
    for weight in ffn.weights:
        if said := _why_not_weight(weight, rows):
            return said
    turned, values = ffn.turned, ffn.down.values
    if turned is not None:
        found, wanted = (turned.shape, turned.dtype, turned.device), values.dtype
        if found != ((N, K), wanted, rows.device):
            return "the kernels take W_down by rows of neurons, [N, K], of its dtype and device"
    # of the values of down a copy is made
    as_they_are = (t for w in ffn.weights for t in w.tensors if t is not ffn.down.values)
    return why_they_do_not_lie_well(as_they_are)


def why_not_sizes(K: int, N: int, kind: str, tile: int, index: int) -> str | None:
    """None if the kernels on CUDA device `index` take an FFN of these sizes, else why not."""
    if kind != "bf16" and (said := why_no_multiples(kind, K, N)):
        return said
    if said := why_unfit(K, N, tile, device_limits(index).smem_bytes):
        return f"the kernels take {said}"
    return None


def _has_shape(weight: Weight, shape: tuple[int, int]) -> bool:
    """Whether the values, and the scales of rows and the bias there are, have their shapes."""
    wanted: list[tuple[int, ...]] = [shape]
    if weight.is_rounded:
        wanted.append((shape[0], 1))
    if weight.bias is not None:
        wanted.append(shape[:1])
    return [tuple(tensor.shape) for tensor in weight.tensors] == wanted


def _why_not_weight(weight: Weight, rows: Tensor) -> str | None:
    """None if the kernels take a weight with inputs `rows`, by dtypes and devices, else why not."""
    dtype = ROUNDINGS[weight.kind].dtype if weight.is_rounded else rows.dtype
    scales = weight.scales
    if scales is not None and (weight.values.dtype, scales.dtype) != (dtype, torch.float32):
        return f"the kernels take {weight.kind} weights with scales in float32"
    if weight.bias is not None and weight.bias.dtype != torch.bfloat16:
        return "the kernels take biases in bf16"
    if weight.values.dtype != dtype or any(t.device != rows.device for t in weight.tensors):
        return "the kernels take weights of the dtype and device of their input"
    return None


def lies_well(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def why_they_do_not_lie_well(weights: Iterable[Tensor]) -> str | None:
    if all(map(lies_well, weights)):
        return None
    return "the kernels take contiguous weights that begin at multiples of 16 bytes"


@torch.compiler.assume_constant_result
def why_not_trained(
    sources: str, index: int, K: int, N: int, tile: int, dtype: str, shapes: tuple, lie: bool
) -> str | None:
    """None if the kernels of training take this, else why not, which is said once."""
    said = _why_training_does_not_take(sources, index, K, N, tile, dtype, shapes, lie)
    if said:
        say_once(said)
    return said


def _why_training_does_not_take(
    sources: str, index: int, K: int, N: int, tile: int, dtype: str, shapes: tuple, lie: bool
) -> str | None:
    if not takes_hopper_kernels(index):
        return "those of training need a Hopper GPU (compute capability 9.0)"
    if shapes[3] is not None or shapes[4] is not None:
        return "those of training take no biases of gate and up"
    wanted = ((N, K), (N, K), (K, N), None, None, (K,))
    if any(shape is not None and shape != want for shape, want in zip(shapes, wanted, strict=True)):
        return "the kernels take weights [N, K], [N, K] and [K, N], a bias [K]"
    if dtype != "torch.bfloat16":
        return f"the kernels take bf16, not {dtype.removeprefix('torch.')}"
    if not lie:
        return (
            "the kernels take weights of one dtype, the input's (or autocast's fp32), where it lies"
        )
    if said := why_unfit(K, N, tile, device_limits(index).smem_bytes):
        return f"the kernels take {said}"
    said = why_no_kernels(sources, index)
    return said or why_not_loaded(sources, index, GRAD_KERNELS)


@torch.compiler.assume_constant_result
def most_trained_tokens(index: int, N: int, K: int, slots: int) -> int:
    """Tokens that the kernels of training take at a time on CUDA device `index`."""
    return training_tokens(N, K, slots, device_limits(index))


@torch.compiler.assume_constant_result
def route_of_training(route: str) -> str:
    """`route`, or what TWELL_ROUTE says."""
    return requested(route)
