"""The loss of a draft head: the cross-entropy of what it guesses under the model's distribution.

Logits are never whole: those of four steps of 10,000 tokens over 32,768 tokens would take 5 GB, and
several times that with their gradients. The gradients of the guesses are computed in the forward
pass, while some logits are at hand.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from twellctl.heads.original import rows_at_once

LESS = 0.8  # is the share of each step beside the one before


def guessing_loss(guesses: list[Tensor], states: Tensor, rows: Tensor) -> Tensor:
    """A number, in nats: the sum over steps j of `LESS**j` times the mean over bases.

    `guesses`: the states of each step `[B, T, K]`, as `unroll` gives them. `states` `[B, S, K]` are
    the model's, `rows` `[V, K]` those of its LM head for the tokens that can be guessed.
    """
    ahead, (B, S, _) = len(guesses), states.shape
    # by the position of what is guessed: then all steps share one distribution of the model
    placed = [F.pad(one, (0, 0, 1 + j, ahead - 1 - j)) for j, one in enumerate(guesses)]
    shares = states.new_zeros(ahead, S, dtype=_wide(states).dtype)
    for j, one in enumerate(guesses):
        shares[j, 1 + j : 1 + j + one.shape[1]] = LESS**j / one[..., 0].numel()
    found = _GuessingLoss.apply(
        torch.stack(placed).flatten(1, 2),
        states.flatten(0, 1),
        shares.repeat(1, B),
        rows,
    )
    assert isinstance(found, Tensor)
    return found


class _GuessingLoss(torch.autograd.Function):
    """Of guesses `[J, M, K]`, states `[M, K]`, the shares `[J, M]` of the guesses and rows."""

    @staticmethod
    def forward(ctx, guesses: Tensor, states: Tensor, shares: Tensor, rows: Tensor) -> Tensor:
        gradient, loss = torch.zeros_like(guesses), shares.new_zeros(())
        at_once = rows_at_once(len(rows))
        for start in range(0, len(states), at_once):
            some = slice(start, start + at_once)
            wanted = _wide(F.linear(states[some].to(rows.dtype), rows)).softmax(-1)
            for j in range(len(guesses)):
                share = shares[j, some, None]
                logits = F.linear(guesses[j, some].to(rows.dtype), rows)
                log_p = _wide(logits).log_softmax(-1)
                loss = loss - (share * (wanted * log_p).sum(-1, keepdim=True)).sum()
                away = log_p.exp_().sub_(wanted).mul_(share).to(rows.dtype)
                gradient[j, some] = (away @ rows).to(gradient.dtype)
        ctx.gradient = gradient
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.gradient * grad, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.float() if tensor.itemsize < 4 else tensor
