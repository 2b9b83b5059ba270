"""The loss at the head of a causal model: cross-entropy and KL to a teacher, some tokens at a time.

The logits of a step are never whole: those of 4 blocks of 1024 tokens with 150,000 ids would take
2.5 GB, and several times that with the teacher's and their gradients. `HeadLoss` takes the place of
the head's forward, so that what the model returns as "logits" is the loss. The gradients of the
head's input and weight are computed in the forward pass, while some logits are at hand.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

LOGITS_AT_ONCE = 1 << 25  # elements of one tensor of logits; some six such exist, in float32
COMPILED_LOGITS_AT_ONCE = 1 << 28  # three exist, in the head's dtype; few of them cost time
CAP = "final_logit_softcapping"  # in configs of Gemma 2: logits become `cap * tanh(logits / cap)`


@dataclass(frozen=True)
class Losses:
    """Means over the tokens that have a next one, in nats; `loss` carries the gradient."""

    loss: Tensor
    cross_entropy: Tensor
    teacher_kl: Tensor


class HeadLoss:
    """Replaces the forward of a causal model's head until `remove()`; `compiled` fuses its sums."""

    def __init__(self, model: nn.Module, compiled: bool = False):
        self.model = model
        self.compiled = compiled
        self.head = model.get_output_embeddings()
        self.cap = getattr(model.config, CAP, None)
        self.scale = _logit_scale(model, self.head)
        self._call: _Call | None = None
        self.head.forward = self._forward

    def remove(self) -> None:
        """Give the head its own forward again."""
        del self.head.forward

    def losses(
        self,
        ids: Tensor,
        teacher: "HeadLoss | None" = None,
        teacher_weight: float = 0.0,
        wrapped: nn.Module | None = None,
    ) -> Losses:
        """Of ids `[B, L]`: `(1 - w) * cross_entropy + w * KL(teacher || student)` and its parts.

        `wrapped` is the model as it is called: compiled, or with what a trainer puts around it.
        """
        if not teacher_weight:
            teacher = None
        wanted = teacher.states(ids) if teacher is not None else None
        self._call = _Call(self, ids[:, 1:].flatten(), teacher, wanted, teacher_weight)
        try:
            with _uncapped(self.model):
                loss = (wrapped or self.model)(input_ids=ids, use_cache=False).logits
            return Losses(loss / self.scale, *self._call.parts)
        finally:
            self._call = None

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """`[B * (L - 1), K]`: what the head reads at the tokens that have a next one."""
        with _uncapped(self.model):
            return self.model(input_ids=ids, use_cache=False).logits / self.scale

    def logits(self, states: Tensor, weights: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """`[M, V]` on states `[M, K]`, in their dtype; `weights`: as `weights()` returned them."""
        logits = F.linear(states, *(weights or self.weights(states.dtype)))
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def logit_rows(self, num_rows: int) -> Iterator[slice]:
        """Slices that cover `num_rows` rows, of as many as may have their logits at once."""
        at_once = COMPILED_LOGITS_AT_ONCE if self.compiled else LOGITS_AT_ONCE
        rows = max(1, at_once // len(self.head.weight))
        return (slice(start, start + rows) for start in range(0, num_rows, rows))

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) of the head in `dtype`, whole: a sharded one is gathered."""
        weight, bias = whole(self.head.weight), self.head.bias
        return weight.to(dtype), None if bias is None else whole(bias).to(dtype)

    def _forward(self, hidden: Tensor) -> Tensor:
        states = hidden[:, :-1].flatten(0, 1)
        if self._call is None:
            return states
        weight, bias = self.head.weight, self.head.bias
        return _LossOfStates.apply(states, weight, bias, self._call, torch.is_grad_enabled())


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered: all processes must call this; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Call:
    """One computation of the loss: what it needs besides the states, and the parts it found."""

    def __init__(self, student, targets, teacher, wanted, teacher_weight):
        self.student, self.targets = student, targets
        self.teacher, self.wanted, self.teacher_weight = teacher, wanted, teacher_weight
        self.parts: tuple[Tensor, ...] = ()  # cross-entropy and KL
        self._weights: dict[HeadLoss, tuple[Tensor, Tensor | None]] = {}

    def logits(self, head: HeadLoss, states: Tensor) -> Tensor:
        """`[M, V]` of `head` on states `[M, K]`, computed in their dtype."""
        if head not in self._weights:  # one cast of the weight for all chunks
            self._weights[head] = head.weights(states.dtype)
        return head.logits(states, self._weights[head])

    def of_some(self, states: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor]:
        """As `_sums`, of some rows."""
        logits, wanted = self.logits(self.student, states), None
        if self.teacher is not None:
            wanted = self.logits(self.teacher, self.wanted[some].to(states.dtype))
        sums = _compiled_sums() if self.student.compiled else _sums
        scale = self.student.scale / len(self.targets)
        found = sums(logits, wanted, self.targets[some, None], self.teacher_weight, scale)
        if (cap := self.student.cap) is not None:
            found[2].mul_(1 - (logits / cap).square())
        return found


def _sums(
    logits: Tensor, wanted: Tensor | None, targets: Tensor, weight: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy, KL) of M rows, summed, and `scale` times the gradient of the loss `[M, V]`.

    `logits` and the teacher's `wanted` are `[M, V]`, `targets` `[M, 1]`. Sums are by row, so that
    compiled it reads each of them twice and writes the gradient.
    """
    log_sum = logits.float().logsumexp(-1, keepdim=True)
    cross_entropy = (log_sum - logits.gather(-1, targets)).sum()
    kl = torch.zeros_like(cross_entropy)
    log_p = logits.float() - log_sum
    right = torch.arange(logits.shape[-1], device=logits.device) == targets
    gradient = log_p.exp() - (1 - weight) * right
    if wanted is not None:
        log_q = wanted.float() - wanted.float().logsumexp(-1, keepdim=True)
        q = log_q.exp()
        kl = (q * (log_q - log_p)).sum(-1).sum()
        gradient = gradient - weight * q
    return cross_entropy, kl, (gradient * scale).to(logits.dtype)


@functools.cache
def _compiled_sums() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_sums, dynamic=False)  # which imports the compiler: that takes a second


class _LossOfStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, bias, call: _Call, with_gradient: bool) -> Tensor:
        # the head's own dtype, or autocast's: what its forward would have computed in
        device, dtype = states.device.type, states.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        needs = [with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        ctx.dtypes = [t if t is None else t.dtype for t in (states, weight, bias)]
        gradients: list[Any] = [  # tensors where they are needed, else None
            torch.zeros_like(t, dtype=torch.float32) if needed else None
            for t, needed in zip((states, weight, bias), needs, strict=True)
        ]
        weight = weight.to(dtype)
        sums = torch.zeros(2, device=states.device)
        for some in call.student.logit_rows(len(states)):
            x = states[some].to(dtype)
            cross_entropy, kl, gradient = call.of_some(x, some)
            sums = sums + torch.stack([cross_entropy, kl])
            if needs[0]:
                gradients[0][some] = gradient @ weight
            if needs[1]:
                gradients[1] += gradient.T @ x
            if needs[2]:
                gradients[2] += gradient.sum(0)
        ctx.gradients = gradients
        cross_entropy, kl = sums / len(states)
        call.parts = cross_entropy, kl
        return (1 - call.teacher_weight) * cross_entropy + call.teacher_weight * kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gradients, ctx.gradients = ctx.gradients, None  # they are scaled in place: no second time
        if gradients is None:
            raise RuntimeError("the gradients of this loss are already taken: call `losses` again")
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if g is None else g.mul_(grad).to(dtype) for g, dtype in pairs), None, None


@contextlib.contextmanager
def _uncapped(model: nn.Module) -> Iterator[None]:
    """Inside, `model` does not cap what its head returns, which are no logits."""
    if (cap := getattr(model.config, CAP, None)) is None:
        yield
        return
    setattr(model.config, CAP, None)
    try:
        yield
    finally:
        setattr(model.config, CAP, cap)


@torch.no_grad()
def _logit_scale(model: nn.Module, head: nn.Module) -> float:
    """What the family multiplies its head's output by (1 for most)."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
    head.forward = lambda hidden: hidden.new_ones(*hidden.shape[:-1], 1)
    try:
        with _uncapped(model):
            return float(model(input_ids=token, use_cache=False).logits)
    finally:
        del head.forward
