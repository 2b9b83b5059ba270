"""The weights of a gated FFN, as the kernels read them; weights that one product takes."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import torch
from torch import Tensor, nn

E4M3_STEP = 128  # of e4m3 weights the kernels take sizes that are multiples of it


def kind_of(weight: Tensor) -> str:
    """Of twell_spec.KINDS."""
    return "e4m3" if weight.dtype == torch.float8_e4m3fn else "bf16"


def in_one(*tensors: Tensor | None) -> Tensor | None:
    """One view of `tensors` `[n, ...]` that lie behind one another; None where they do not."""
    if any(tensor is None or not tensor.is_contiguous() for tensor in tensors):
        return None
    first, *others = tensors
    end = first.storage_offset() + first.numel()
    for tensor in others:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.shape[1:] != first.shape[1:] or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def lay_together(*layers: nn.Linear) -> None:
    """Make weights, biases and scales of `layers` parts of one tensor each: one product takes all.

    Names, shapes and values stay, and so does what `save_pretrained` writes; `torch.save` of one
    layer writes the storage of all. What not all have stays as it is.
    """
    for name in ("weight", "bias", "weight_scale"):
        parts = [getattr(layer, name, None) for layer in layers]
        if any(part is None for part in parts) or in_one(*parts) is not None:
            continue
        with torch.inference_mode(parts[0].is_inference()):  # a tensor of their own kind
            whole = torch.cat([part.data for part in parts])
        for part, own in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = own


class Onto(TypedDict, total=False):
    """What an FFN for few tokens takes besides, each if it is wanted.

    `residual` `[M, K]` is added to the rounded result. `counts` int32 `[M]` is raised by how many
    neurons fired for each token. `overlap` as in `KernelSet.launch`: weights must not change then.
    """

    residual: Tensor | None
    counts: Tensor | None
    overlap: bool


@dataclass(frozen=True)
class FFN:
    """The weights of one gated FFN, all three by rows of neurons; biases `[N]`, `[N]`, `[K]`.

    `w_gate`, `w_up` and `w_down` are `[N, K]`: the last is an nn.Linear's weight turned over, so
    that what a neuron adds to y lies together. The kernels want all contiguous. Weights in e4m3
    have scales, float32: `[N]` and `[N]` of their rows, and `[K]` of the columns of `w_down`.
    """

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    s_gate: Tensor | None = None
    s_up: Tensor | None = None
    s_down: Tensor | None = None

    @cached_property
    def N(self) -> int:
        """Neurons."""
        return self.w_gate.shape[0]

    @cached_property
    def K(self) -> int:
        """Hidden size."""
        return self.w_gate.shape[1]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Weights, and the biases and scales there are."""
        more = (self.b_gate, self.b_up, self.b_down, self.s_gate, self.s_up, self.s_down)
        return (self.w_gate, self.w_up, self.w_down, *(t for t in more if t is not None))
