"""Why an input goes without the kernels."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .twell_cache import say_once
from .twell_few import few_kernels
from .twell_grad_plan import training_tokens
from .twell_launch import KernelError, LoadError, device_limits, kernels_for
from .twell_nvrtc import what_is_missing
from .twell_plan import Limits, why_unfit
from .twell_route import requested
from .twell_spec import ENTRY_FILES
from .twell_weights import E4M3_STEP, FFN, kind_of

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


def why_no_kernels(sources: str, index: int) -> str | None:
    """None if the kernels are loaded on CUDA device `index`, else why they cannot be.

    The first call for a device compiles what the cache does not hold.
    """
    return why_not_loaded(sources, index, _entries(device_limits(index)))


@functools.cache
def _entries(limits: Limits) -> tuple[str, ...]:
    """All at once: what comes later, and needs others, may be the capture of a graph."""
    many = HOPPER_KERNELS if limits.hopper else ()
    return (*many, *few_kernels(limits, "bf16"))


def why_no_e4m3_kernels(sources: str, index: int) -> str | None:
    """None if all kernels over e4m3 weights are loaded on CUDA device `index`, else why not."""
    limits = device_limits(index)
    if limits.capability < (8, 9):
        return "kernels over FP8 weights need compute capability 8.9 or newer"
    return why_not_loaded(sources, index, few_kernels(limits, "e4m3"))


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
    """None if the kernels take this, bf16 or e4m3 with scales, else what they do not take."""
    N, K, in_fp8 = ffn.N, ffn.K, ffn.s_gate is not None
    weights, biases = (ffn.w_gate, ffn.w_up, ffn.w_down), (ffn.b_gate, ffn.b_up, ffn.b_down)
    scales = (ffn.s_gate, ffn.s_up, ffn.s_down) if in_fp8 else ()
    are_e4m3 = {*map(kind_of, weights)} == {"e4m3"}
    if in_fp8 and not (are_e4m3 and all(s.dtype == torch.float32 for s in scales)):
        return "the kernels take FP8 weights in e4m3, with scales in float32"
    there = [n for n, bias in zip((N, N, K), biases, strict=True) if bias is not None]
    shapes = [*3 * [(N, K)], *((n,) for n in (*there, *((N, N, K) if in_fp8 else ())))]
    if [tuple(tensor.shape) for tensor in ffn.tensors] != shapes:
        scaled = ", a scale for each row" if in_fp8 else ""
        said = "weights [N, K], [N, K] and [K, N], biases [N], [N] and [K]"
        return f"the kernels take {said}{scaled}"
    if rows.dim() != 2 or rows.shape[1] != K:
        return f"the kernels take inputs [M, {K}], not {list(rows.shape)}"
    if rows.dtype != torch.bfloat16:
        return f"the kernels take bf16, not {str(rows.dtype).removeprefix('torch.')}"
    if in_fp8 and (K % E4M3_STEP or N % E4M3_STEP):
        return f"over FP8 weights the kernels take multiples of {E4M3_STEP}, not {K} and {N}"
    if said := why_unfit(K, N, tile, device_limits(rows.device.index).smem_bytes):
        return f"the kernels take {said}"
    if any(bias is not None and bias.dtype != torch.bfloat16 for bias in biases):
        return "the kernels take biases in bf16"
    of_other_dtype = not in_fp8 and any(weight.dtype != rows.dtype for weight in weights)
    if of_other_dtype or any(tensor.device != rows.device for tensor in ffn.tensors):
        return "the kernels take weights of the dtype and device of their input"
    as_they_are = (t for t in ffn.tensors if t is not ffn.w_down)  # of that a copy is made
    return why_they_do_not_lie_well(as_they_are)


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
