"""What is launched, kept instead of launched, and what the kernels take."""

import functools
from collections.abc import Iterator, Mapping

import torch
from compiled import SOURCES
from ffns import ffn_by_neurons
from torch import Tensor

from twellctl.bundle.twell_few import FEW_TOKENS
from twellctl.bundle.twell_nvrtc import with_headers
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_signatures import Signature, signature_of
from twellctl.bundle.twell_spec import ENTRY_FILES
from twellctl.bundle.twell_ways import Problem, ways_of
from twellctl.bundle.twell_weights import FFN


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def zero_ffn(K: int, N: int, biases: bool, kind: str = "bf16") -> FFN:
    """Weights of zeros, which are one tensor; in e4m3 with scales."""
    zeros = torch.zeros(N, K, dtype=torch.float8_e4m3fn if kind == "e4m3" else torch.bfloat16)
    rest = [bf16(n) if biases else None for n in (N, N, K)]
    scales = [torch.ones(n) if kind == "e4m3" else None for n in (N, N, K)]
    return ffn_by_neurons(zeros, zeros, zeros, *rest, *scales)


def ways_by_tokens(limits: Limits, *, N: int, K: int, kind: str = "bf16") -> Iterator[str]:
    """The table for one FFN, a line for each range of numbers of tokens; `kind` as in `Problem`."""
    found: dict[tuple[str, ...], list[int]] = {}
    for M in (*range(1, FEW_TOKENS + 2), 4096, 4097):
        problem = Problem(M, N, K, limits, kind=kind)
        found.setdefault(tuple(way.name for way in ways_of("auto", problem)), []).append(M)
    for names, tokens in found.items():
        last = "" if tokens[-1] == 4097 else f" to {tokens[-1]}"
        yield f"{tokens[0]}{last or ' and more'} tokens: {', '.join(names)}"


class Map:
    """Stands for a tensor map."""

    def __init__(self, tensor, box_rows):
        self.tensor, self.box_rows = tensor, box_rows

    def tobytes(self) -> bytes:
        return bytes(128)


class Launches:
    """Stands for a KernelSet: keeps what is launched, and which launches overlap."""

    def __init__(self):
        self.made, self.overlaps = [], []

    def clusters_at_once(self, name, cluster, block, smem_bytes):
        return 30  # as on an H200

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        assert_taken(name, args)
        self.made.append((name, grid, block, args, smem_bytes))
        self.overlaps.append(overlap)


# what a tensor holds, by the type of its pointer; by others 4 numbers are read together, or so
_DTYPES = {
    "float *": (torch.float32,),
    "int *": (torch.int32,),
    "unsigned short *": (torch.bfloat16, torch.int16),
    "Weight::Memory *": (torch.bfloat16, torch.float8_e4m3fn),
}


def assert_taken(entry: str, args: Mapping[str, object]) -> None:
    """That a kernel takes arguments of these names and types."""
    taken = signature(entry)
    taken.pack_into(bytearray(taken.layout.size), args)
    for name, kind in zip(taken.names, taken.types, strict=True):
        if isinstance(tensor := args[name], Tensor) and kind in _DTYPES:
            assert tensor.dtype in _DTYPES[kind], f"{entry}: {name}"


@functools.cache
def signature(entry: str) -> Signature:
    """What an entry takes."""
    return signature_of(entry, with_headers(ENTRY_FILES[entry], SOURCES).values())
