"""The weights of a linear layer and of a gated FFN, as PyTorch and the kernels read them."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Weight:
    """The weight `[N, K]` of a linear layer, and its bias `[N]`, if it has one.

    `kind` names one of `twell_spec.KINDS`:

        bf16   `values` `[N, K]` are the weight. The kernels take bf16, PyTorch any dtype.
        e4m3   The weight is `values` times `scales`: float8_e4m3fn `[N, K]`, float32 `[N, 1]`.
    """

    kind: str
    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def N(self) -> int:
        """Outputs."""
        return self.values.shape[0]

    @property
    def K(self) -> int:
        """Inputs."""
        return self.values.shape[1]

    @property
    def is_rounded(self) -> bool:
        """Whether the weight is `values` times `scales`."""
        return self.scales is not None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The values, and the scales and the bias there are."""
        return tuple(t for t in (self.values, self.scales, self.bias) if t is not None)

    def chunk(self, count: int) -> list["Weight"]:
        """`count` weights of equally many outputs, as views."""

        def pieces(tensor: Tensor | None) -> tuple[Tensor | None, ...]:
            return (None,) * count if tensor is None else tensor.chunk(count)

        parts = zip(pieces(self.values), pieces(self.scales), pieces(self.bias), strict=True)
        return [Weight(self.kind, *part) for part in parts]

    def detached(self) -> "Weight":
        """The numbers as they lie now: they stay there if a module's are laid otherwise later."""
        parts = (None if t is None else t.detach() for t in (self.values, self.scales, self.bias))
        return Weight(self.kind, *parts)


def plain_weight(values: Tensor, bias: Tensor | None = None) -> Weight:
    """The weight `[N, K]` of an nn.Linear, which is not rounded."""
    return Weight("bf16", values, None, bias)


@dataclass(frozen=True)
class FFN:
    """The weights of one gated FFN with K inputs and N neurons: `gate`, `up` `[N, K]`, `down`
    `[K, N]`, all of one kind.

    The kernels read what a neuron adds to y as a row: the values of `down` by neurons, `[N, K]`.
    `down` has strides (1, K) for that, or `turned` has the same values once more.
    """

    gate: Weight
    up: Weight
    down: Weight
    turned: Tensor | None = None

    @property
    def kind(self) -> str:
        """Of all three weights."""
        return self.gate.kind

    @property
    def N(self) -> int:
        """Neurons."""
        return self.gate.N

    @property
    def K(self) -> int:
        """Hidden size."""
        return self.gate.K

    @property
    def by_neurons(self) -> Tensor:
        """The values of `down`, `[N, K]`."""
        return self.down.values.t() if self.turned is None else self.turned

    @property
    def weights(self) -> tuple[Weight, Weight, Weight]:
        """Gate, up and down."""
        return self.gate, self.up, self.down


class Onto(TypedDict, total=False):
    """What an FFN for few tokens takes besides, each if it is wanted.

    `residual` `[M, K]` is added to the rounded result. `counts` int32 `[M]` is raised by how many
    neurons fired for each token. `overlap` as in `KernelSet.launch`: weights must not change then.
    """

    residual: Tensor | None
    counts: Tensor | None
    overlap: bool


# ---- how they lie


def in_one(*tensors: Tensor | None) -> Tensor | None:
    """One view of `tensors` `[n, ...]` that lie behind one another; None where they do not."""
    there = [tensor for tensor in tensors if tensor is not None and tensor.is_contiguous()]
    if len(there) < len(tensors):
        return None
    first, *others = there
    end = first.storage_offset() + first.numel()
    for tensor in others:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.shape[1:] != first.shape[1:] or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in there)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def joined(*weights: Weight) -> Weight:
    """The weight with the outputs of all `weights`, of layers that `lay_together` laid: a view."""
    values, scales, biases = zip(*((w.values, w.scales, w.bias) for w in weights), strict=True)
    return Weight(weights[0].kind, in_one(*values), in_one(*scales), in_one(*biases))


def lay_together(*layers: nn.Linear) -> None:
    """Make weights, biases and scales of `layers` parts of one tensor each: one product takes all.

    Names, shapes and values stay, and so does what `save_pretrained` writes; `torch.save` of one
    layer writes the storage of all. What not all have stays as it is.
    """
    for name in ("weight", "bias", "weight_scale"):
        found: list[Tensor | None] = [getattr(layer, name, None) for layer in layers]
        parts = [part for part in found if part is not None]
        if len(parts) < len(layers) or in_one(*parts) is not None:
            continue
        with torch.inference_mode(parts[0].is_inference()):  # a tensor of their own kind
            whole = torch.cat([part.data for part in parts])
        for part, own in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = own
