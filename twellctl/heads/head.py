"""A draft head: one decoder layer that guesses what a model writes, out of what the model has made.

Of each token that it reads a model makes a state: the normalised one, which its own head turns into
logits. A draft head merges the state of the last token that was read with what some layers below
have made of it, joins that and the embedding of the token that was chosen behind it, and makes the
state of that one, about as the model would. From there it goes on by itself. It turns states into
logits as the model does, for those tokens that are common.

Its attention looks at the keys and values that the model's last layer has cached, and behind them
at its own ones, of the tokens since. So it has no cache of its own, and prompts cost it nothing.
The idea of a layer over states and embeddings is EAGLE's (Li et al., 2024), that of reading lower
layers EAGLE-3's (Li et al., 2025).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadSizes:
    """K is the size of a state, N that of the FFN; H heads of q and Hkv of k and v have D columns;
    V tokens can be guessed. `lower`: the layers of the model, numbered from 0, whose outputs are
    read beside its state."""

    K: int
    N: int
    H: int
    Hkv: int
    D: int
    V: int
    eps: float  # of norms
    qkv_bias: bool = False
    out_bias: bool = False
    q_k_norms: bool = False  # over each head
    lower: tuple[int, ...] = ()


class DraftHead(nn.Module):
    """`tokens` int64 `[V]`, ascending: those that it can guess, by their ids in the model."""

    tokens: Tensor

    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.sizes = sizes
        K, N, D = sizes.K, sizes.N, sizes.D
        norm = nn.RMSNorm
        self.norms_lower = nn.ModuleList(norm(K, sizes.eps) for _ in sizes.lower)
        width = K * (1 + len(sizes.lower))
        self.merge = nn.Linear(width, K, bias=False) if sizes.lower else None
        self.norm_embedding, self.norm_state = norm(K, sizes.eps), norm(K, sizes.eps)
        self.join = nn.Linear(2 * K, K, bias=False)
        self.norm_attention, self.norm_ffn = norm(K, sizes.eps), norm(K, sizes.eps)
        self.q = nn.Linear(K, sizes.H * D, bias=sizes.qkv_bias)
        self.k = nn.Linear(K, sizes.Hkv * D, bias=sizes.qkv_bias)
        self.v = nn.Linear(K, sizes.Hkv * D, bias=sizes.qkv_bias)
        self.q_norm: nn.Module = norm(D, sizes.eps) if sizes.q_k_norms else nn.Identity()
        self.k_norm: nn.Module = norm(D, sizes.eps) if sizes.q_k_norms else nn.Identity()
        self.out = nn.Linear(sizes.H * D, K, bias=sizes.out_bias)
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)
        self.norm = norm(K, sizes.eps)
        self.register_buffer("tokens", torch.zeros(sizes.V, dtype=torch.int64))

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """States `[.., K]`, normalised, of tokens whose embeddings are `embedded` `[.., K]`;
        `states` are those of the tokens before: its own `[.., K]`, or what the model has made,
        `[.., (1 + n) K]` with n lower layers, the normalised state last.

        `angles`: cosines and sines `[.., D]` of their positions. `attend` takes q `[.., H, D]`, k
        and v `[.., Hkv, D]`, turned, and gives `[.., H, D]`.
        """
        if states.shape[-1] > self.sizes.K:
            states = self.merged(states)
        x = self.join(torch.cat((self.norm_embedding(embedded), self.norm_state(states)), -1))
        h = self.norm_attention(x)
        q, k, v = (of(h).unflatten(-1, (-1, self.sizes.D)) for of in (self.q, self.k, self.v))
        q, k = turned(self.q_norm(q), *angles), turned(self.k_norm(k), *angles)
        x = x + self.out(attend(q, k, v).flatten(-2))
        h = self.norm_ffn(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.norm(x)

    def merged(self, states: Tensor) -> Tensor:
        """`[.., K]` of what the model has made, `[.., (1 + n) K]`."""
        if self.merge is None:
            return states
        *lower, last = states.split(self.sizes.K, -1)
        normed = [norm(part) for norm, part in zip(self.norms_lower, lower, strict=True)]
        return self.merge(torch.cat((*normed, last), -1))


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` `[.., H, D]` at their positions, turned by halves; cosines and sines `[.., D]`."""
    lower, upper = heads.chunk(2, -1)
    halves = torch.cat((-upper, lower), -1)
    return heads * cos[..., None, :] + halves * sin[..., None, :]
