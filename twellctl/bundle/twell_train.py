"""The operators of training: `train_ffn` and `train_ffn_grads`, and the same in plain torch.

What they return beside y is what backward needs: lists of what fired (twell_training.py). Their
shapes follow from those of the inputs and from the device, never from what fired. A number of
tokens is a constant of a compiled graph. Weights in fp32, or that do not lie as the kernels read
them, are copied in either pass, and no copy is kept between the two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_config import TILE
from .twell_grad_plan import GradPlan
from .twell_launch import KernelSet, device_limits, kernels_for
from .twell_plan import Limits
from .twell_reasons import check_numbers
from .twell_sequence import PairLists
from .twell_training import Wanted, backward, forward, make_training_plan
from .twell_weights import FFN, plain_weight

_INPUTS = (
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? b_down, Tensor? penalty, "
    "int slots, str sources"
)
_LISTS = (
    *("pair_start", "pairs", "num_rounds", "rounds", "links"),
    *("heavy_rows", "gate_up", "heavy_count", "num_heavy"),
)
_KEPT = ", ".join(f"Tensor {name}" for name in _LISTS)
FORWARD_SCHEMA = f"({_INPUTS}) -> (Tensor y, Tensor fired, {_KEPT})"
BACKWARD_SCHEMA = (
    f"(Tensor grad_y, {_INPUTS}, {_KEPT}, bool[] wanted) "
    "-> (Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down)"
)


class AddL1Gradient(torch.autograd.Function):
    """An identity on `hidden` that adds the gradient of `weight * hidden.abs().sum()`.

    A weight that is a tensor counts as rounded to hidden's dtype, one that is a number does not.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor | float) -> Tensor:
        is_tensor = isinstance(weight, Tensor)
        ctx.save_for_backward(hidden, *((weight,) if is_tensor else ()))
        ctx.weight = None if is_tensor else weight
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        hidden, *weight = ctx.saved_tensors
        if weight:
            return grad + hidden.sign() * weight[0].to(grad.dtype), None
        return grad.add(hidden.sign(), alpha=ctx.weight), None


class FfnMeter:
    """What training asks of one FFN: a penalty on |h|, and what was measured.

    `price` is the penalty's weight for one token, `density` that of the step before (None: there is
    none), by which the FFN takes the kernels or `plain`. After a forward pass there are how many
    fired, tokens and neurons.
    """

    def __init__(self):
        self.price = 0.0
        self.density: float | None = None
        self.plain = plain_train_ffn
        self.fired: Tensor | None = None
        self.num_tokens = self.num_neurons = 0

    def weight(self, num_tokens: int, num_neurons: int) -> float | None:
        """Of the sum of |h| over so many tokens in the loss; None if there is no penalty."""
        self.num_tokens, self.num_neurons = num_tokens, num_neurons
        share = self.price / num_tokens
        return share if share and torch.is_grad_enabled() else None

    def measure(self, gate: Tensor, up: Tensor) -> Tensor:
        """`gate * up`, penalised and measured, of an FFN that its own modules compute."""
        hidden = gate * up
        self.fired = (gate.detach() != 0).sum()
        weight = self.weight(hidden.numel() // hidden.shape[-1], hidden.shape[-1])
        penalised = weight is not None and hidden.requires_grad
        return AddL1Gradient.apply(hidden, weight) if penalised else hidden


def plain_train_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    penalty: Tensor | float | None,
    counted: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, how many fired) in torch's own operators; `counted`: else y alone."""
    gate = F.relu(F.linear(x, w_gate, b_gate))
    hidden = gate * F.linear(x, w_up, b_up)
    fired = None
    if counted:  # by rows first: a compiler takes these sums where it makes what is summed
        fired = (gate.detach() != 0).sum(-1).sum()
    if penalty is not None:
        hidden = AddL1Gradient.apply(hidden, penalty)
    return F.linear(hidden, w_down, b_down), fired


def define_operators(library: torch.library.Library, digest: str, *operators: tuple) -> None:
    """Register each (name, schema, function, fake) as `twell::<name>_<digest>`."""
    for name, schema, run, fake in operators:
        named = f"{name}_{digest}"
        library.define(named + schema, tags=(torch.Tag.needs_exact_strides,))
        library.impl(named, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"twell::{named}", fake, lib=library)


def define_training(library: torch.library.Library, digest: str) -> None:
    """The operators `train_ffn_<digest>` and its gradients', `train_ffn_grads_<digest>`.

    The number of tokens is at least 1; whether the kernels take the rest was asked before.
    """
    define_operators(
        library,
        digest,
        ("train_ffn", FORWARD_SCHEMA, _train_ffn, _fake_train_ffn),
        ("train_ffn_grads", BACKWARD_SCHEMA, _train_ffn_grads, _fake_train_ffn_grads),
    )
    grads_op = getattr(torch.ops.twell, f"train_ffn_grads_{digest}").default

    def differentiate(ctx, grad_y: Tensor | None, *_) -> tuple:
        if grad_y is None:
            return (None,) * 8
        *inputs, slots, sources = ctx.inputs
        saved = iter(ctx.saved_tensors)
        tensors = [next(saved) if is_there else None for is_there in inputs]
        needed, b_down = ctx.needs_input_grad, tensors[4]
        of_x = of_gate = of_up = of_b_down = None
        of_down = tensors[3]
        if any(needed[:4]):
            rest = (slots, sources, *tensors[6:], list(needed[:4]))
            of_x, of_gate, of_up, of_down = grads_op(grad_y, *tensors[:6], *rest)
        if needed[4]:
            of_b_down = grad_y.reshape(-1, len(b_down)).sum(0, dtype=torch.float32)
            of_b_down = of_b_down.to(b_down.dtype)
        weights = (of_gate, of_up, of_down.t())
        return (
            of_x if needed[0] else None,
            *(grad if need else None for grad, need in zip(weights, needed[1:4], strict=True)),
            *(of_b_down, None, None, None),
        )

    torch.library.register_autograd(
        f"twell::train_ffn_{digest}", differentiate, setup_context=_set_up, lib=library
    )
    torch.library.register_autograd(
        f"twell::train_ffn_grads_{digest}", _refuse_second_derivatives, lib=library
    )


def _refuse_second_derivatives(ctx, *grads: Tensor | None) -> None:
    raise RuntimeError("TwELL kernels have no second derivatives: use the route 'dense' for them")


def _set_up(ctx, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    tensors = (*inputs[:6], *output[2:])
    ctx.inputs = (*(tensor is not None for tensor in tensors), *inputs[6:])
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


# ---- what the operators do ----


def _laid(weight: Tensor) -> Tensor:
    """`weight` as the kernels read it: itself if it lies so."""
    laid = weight.to(torch.bfloat16, memory_format=torch.contiguous_format).contiguous()
    return laid.clone() if laid.data_ptr() % 16 else laid


def _nothing(like: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return like.new_empty(0, dtype=dtype)


def _laid_ffn(w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_down: Tensor | None) -> FFN:
    """The weights, w_down `[K, N]` among them, as the kernels read them."""
    down = plain_weight(_laid(w_down.t()).t(), None if b_down is None else _laid(b_down))
    return FFN(plain_weight(_laid(w_gate)), plain_weight(_laid(w_up)), down)


def _rows(x: Tensor) -> Tensor:
    return _laid(x.reshape(-1, x.shape[-1]))


def _kernels(x: Tensor, sources: str) -> tuple[KernelSet, Limits]:
    return kernels_for(sources, x.device.index), device_limits(x.device.index)


def _train_ffn(x, w_gate, w_up, w_down, b_down, penalty, slots, sources) -> tuple[Tensor, ...]:
    """The operator `train_ffn`."""
    check_numbers(slots, TILE)
    ffn = _laid_ffn(w_gate, w_up, w_down, b_down)
    y, fired, lists = forward(*_kernels(x, sources), _rows(x), ffn, slots)
    return y.view(x.shape), fired, *(getattr(lists, name) for name in _LISTS)


def _train_ffn_grads(
    grad_y, x, w_gate, w_up, w_down, b_down, penalty, slots, sources, *rest
) -> tuple[Tensor, ...]:
    """The operator `train_ffn_grads`."""
    *kept, wanted = rest
    lists = PairLists(**dict(zip(_LISTS, kept, strict=True)))
    ffn = _laid_ffn(w_gate, w_up, w_down, b_down)
    kernels, limits = _kernels(x, sources)
    given = (_rows(x), ffn, _rows(grad_y), penalty, lists, slots)
    dtype = w_gate.dtype
    found = backward(kernels, limits, *given, Wanted(*wanted), dtype)
    grads = (found.w_gate, found.w_up, found.w_down)
    return (
        _nothing(x) if found.x is None else found.x.view(x.shape),
        *(_nothing(x, dtype).view(0, 0) if grad is None else grad for grad in grads),
    )


# ---- their shapes ----


def _plan(x: Tensor, w_gate: Tensor, slots: int) -> GradPlan:
    N, K = map(int, w_gate.shape)
    return make_training_plan(int(x.numel()) // K, N, K, slots, device_limits(x.device.index))


def _fake_train_ffn(x, w_gate, w_up, w_down, b_down, penalty, slots, sources) -> tuple[Tensor, ...]:
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
        torch.empty(1, dtype=torch.int32),
    )
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.int64), *lists


def _fake_train_ffn_grads(grad_y, x, w_gate, *rest) -> tuple[Tensor, ...]:
    wanted = Wanted(*rest[-1])
    size = w_gate.shape

    def weight(is_made: bool) -> Tensor:
        return w_gate.new_empty(size if is_made else (0, 0))

    of_x = x.new_empty(x.shape) if wanted.x else _nothing(x)
    gate_up = weight(wanted.gate_up), weight(wanted.gate_up)
    return of_x, *gate_up, weight(wanted.w_down)
