"""The operators of training: `train_ffn` and `train_ffn_grads`, and the same in plain torch.

What they return beside y is what backward needs: lists of what fired (twell_training.py), and the
weights as the kernels read them where they do not lie so. Shapes follow from those of the inputs
and from the device, never from what fired. A number of tokens is a constant of a compiled graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_format import keep_fired
from .twell_launch import KernelSet, device_limits, kernels_for
from .twell_plan import GradPlan
from .twell_sequence import PairLists
from .twell_training import Wanted, backward, forward, make_training_plan
from .twell_weights import FFN

_INPUTS = (
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor? b_down, Tensor? penalty, float threshold, int slots, str sources"
)
_LISTS = (
    *("pair_start", "pairs", "num_rounds", "rounds", "links"),
    *("heavy_rows", "gate_up", "heavy_count"),
)
_LAID = ("laid_gate", "laid_up", "laid_down")
_KEPT = ", ".join(f"Tensor {name}" for name in (*_LISTS, *_LAID))
FORWARD_SCHEMA = f"({_INPUTS}) -> (Tensor y, Tensor hidden_sum, Tensor fired, {_KEPT})"
BACKWARD_SCHEMA = (
    f"(Tensor grad_y, {_INPUTS}, {_KEPT}, bool[] wanted) "
    "-> (Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor biases)"
)


class AddL1Gradient(torch.autograd.Function):
    """An identity on `hidden` that adds the gradient of `weight * hidden.abs().sum()`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        hidden, weight = ctx.saved_tensors
        return grad + hidden.sign() * weight.to(grad.dtype), None


def plain_train_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    penalty: Tensor | None,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum of |h|, how many fired) in torch's own operators."""
    gate = keep_fired(F.linear(x, w_gate, b_gate), threshold)
    hidden = gate * F.linear(x, w_up, b_up)
    hidden_sum = hidden.detach().abs().sum(dtype=torch.float32)
    if penalty is not None:
        hidden = AddL1Gradient.apply(hidden, penalty)
    return F.linear(hidden, w_down, b_down), hidden_sum, (gate.detach() != 0).sum()


def define_training(library: torch.library.Library, digest: str) -> None:
    """The operators `train_ffn_<digest>` and its gradients', `train_ffn_grads_<digest>`.

    The number of tokens is at least 1; whether the kernels take the rest was asked before.
    """
    for name, schema, run, fake in (
        ("train_ffn", FORWARD_SCHEMA, _train_ffn, _fake_train_ffn),
        ("train_ffn_grads", BACKWARD_SCHEMA, _train_ffn_grads, _fake_train_ffn_grads),
    ):
        named = f"{name}_{digest}"
        library.define(named + schema, tags=(torch.Tag.needs_exact_strides,))
        library.impl(named, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"twell::{named}", fake, lib=library)
    grads_op = getattr(torch.ops.twell, f"train_ffn_grads_{digest}").default

    def differentiate(ctx, grad_y: Tensor | None, *_) -> tuple:
        if grad_y is None:
            return (None,) * 11
        *inputs, threshold, slots, sources = ctx.inputs
        tensors = _put_back(inputs, ctx.saved_tensors)
        needed = ctx.needs_input_grad
        found = grads_op(
            grad_y,
            *tensors[:8],
            *(threshold, slots, sources),
            *tensors[8:],
            list(needed[:6]),
        )
        b_gate, b_up, b_down = tensors[4:7]
        of_x, of_gate, of_up, of_down, of_biases = found
        biases = [
            of_biases[i].to(bias.dtype) if need else None
            for i, (bias, need) in enumerate(zip((b_gate, b_up), needed[4:6], strict=True))
        ]
        of_b_down = grad_y.flatten(0, -2).sum(0).to(b_down.dtype) if needed[6] else None
        weights = (of_gate, of_up, of_down.t())
        return (
            of_x if needed[0] else None,
            *(grad if need else None for grad, need in zip(weights, needed[1:4], strict=True)),
            *(*biases, of_b_down),
            *(None, None, None, None),
        )

    torch.library.register_autograd(
        f"twell::train_ffn_{digest}", differentiate, setup_context=_set_up, lib=library
    )


def _set_up(ctx, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    tensors = (*inputs[:8], *output[3:])
    ctx.inputs = (*(tensor is not None for tensor in tensors), *inputs[8:])
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _put_back(there: list[bool], saved: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The saved tensors in their places."""
    left = iter(saved)
    return [next(left) if is_there else None for is_there in there]


# ---- what the operators do ----


def _laid(weight: Tensor) -> Tensor:
    """`weight` as the kernels read it: itself if it lies so."""
    laid = weight.to(torch.bfloat16, memory_format=torch.contiguous_format).contiguous()
    return laid.clone() if laid.data_ptr() % 16 else laid


def _nothing(like: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return like.new_empty(0, dtype=dtype)


def _bf16(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.bfloat16)


def _problem(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple, threshold: float
) -> tuple[Tensor, FFN]:
    """Rows of x, and the weights, which lie as the kernels read them."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    rows = rows.clone() if rows.data_ptr() % 16 else rows
    return rows, FFN(*weights, *map(_bf16, biases), threshold)


def _kernels(x: Tensor, sources: str) -> tuple[KernelSet, object]:
    return kernels_for(sources, x.device.index), device_limits(x.device.index)


def _train_ffn(
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, penalty, threshold, slots, sources
) -> tuple[Tensor, ...]:
    """The operator `train_ffn`."""
    given = (w_gate, w_up, w_down.t())
    weights = tuple(map(_laid, given))
    rows, ffn = _problem(x, weights, (b_gate, b_up, b_down), threshold)
    y, hidden_sum, fired, lists = forward(*_kernels(x, sources), rows, ffn, slots)
    kept = (getattr(lists, name) for name in _LISTS)
    copies = (
        _nothing(x) if own.data_ptr() == laid.data_ptr() else laid
        for own, laid in zip(given, weights, strict=True)
    )
    return y.view(x.shape), hidden_sum, fired, *kept, *copies


def _train_ffn_grads(
    grad_y, x, w_gate, w_up, w_down, b_gate, b_up, b_down, penalty, threshold, slots, sources, *rest
) -> tuple[Tensor, ...]:
    """The operator `train_ffn_grads`."""
    *kept, wanted = rest
    lists = PairLists(**dict(zip(_LISTS, kept, strict=False)))
    given = (w_gate, w_up, w_down.t())
    weights = tuple(
        laid if laid.numel() else own for own, laid in zip(given, kept[-3:], strict=True)
    )
    rows, ffn = _problem(x, weights, (b_gate, b_up, b_down), threshold)
    grad_rows = grad_y.reshape(rows.shape).contiguous()
    grad_rows = grad_rows.clone() if grad_rows.data_ptr() % 16 else grad_rows
    kernels, limits = _kernels(x, sources)
    dtype = w_gate.dtype
    found = backward(
        kernels, limits, rows, ffn, grad_rows, penalty, lists, slots, Wanted(*wanted), dtype
    )
    grads = (found.w_gate, found.w_up, found.w_down)
    return (
        _nothing(x) if found.x is None else found.x.view(x.shape),
        *(_nothing(x, dtype).view(0, 0) if grad is None else grad for grad in grads),
        _nothing(x, torch.float32) if found.biases is None else found.biases,
    )


# ---- their shapes ----


def _plan(x: Tensor, w_gate: Tensor, slots: int) -> GradPlan:
    M = int(x.numel()) // int(x.shape[-1])
    weights = FFN(w_gate, w_gate, w_gate, None, None, None, 0.0)
    return make_training_plan(M, weights, slots, device_limits(x.device.index))


def _fake_train_ffn(
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, penalty, threshold, slots, sources
) -> tuple[Tensor, ...]:
    plan = _plan(x, w_gate, slots).plan

    def empty(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    group_panels = plan.num_groups * plan.num_panels
    lists = (
        empty(plan.num_tiles, plan.num_neuron_groups + 1),
        empty(plan.num_pairs),
        empty(group_panels),
        empty(group_panels, plan.group_rounds, 16),
        empty(group_panels, plan.group_rounds, 16),
        empty(plan.M),
        empty(plan.num_pairs),
        empty(1),
    )
    copies = (
        _nothing(x)
        if own.dtype == torch.bfloat16 and own.is_contiguous()
        else x.new_empty(own.shape, dtype=torch.bfloat16)
        for own in (w_gate, w_up, w_down.t())
    )
    scalars = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.int64)
    return x.new_empty(x.shape), *scalars, *lists, *copies


def _fake_train_ffn_grads(grad_y, x, w_gate, *rest) -> tuple[Tensor, ...]:
    wanted = Wanted(*rest[-1])
    size = w_gate.shape

    def weight(is_made: bool) -> Tensor:
        return w_gate.new_empty(size if is_made else (0, 0))

    biases = w_gate.new_empty((2, size[0]) if wanted.biases else (0,), dtype=torch.float32)
    of_x = x.new_empty(x.shape) if wanted.x else _nothing(x)
    gate_up = weight(wanted.gate_up), weight(wanted.gate_up)
    return of_x, *gate_up, weight(wanted.w_down), biases
