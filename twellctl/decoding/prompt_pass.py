"""A pass over prompts, for models that the decode kernels know (kernel_fit.py).

transformers' own forward takes some 60 operations a layer, and the host needs longer to start them
than a GPU needs for a prompt of two thousand tokens. Here a layer takes half as many: norms and
`store_keys` are kernels of ours, and linear layers and FFNs are the model's own modules.

    embed_norm; of each layer
    q, k, v -> store_keys -> flash attention over what is cached of each row -> o, onto x
    rms_norm -> the FFN, onto x

Several prompts lie behind one another; a chunk of one alone is a CUDA graph (prompt_graphs.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle.twell_launch import KernelSet
from twellctl.decoding.attention import Heads, Rotary, head_width, store_keys
from twellctl.decoding.fired_counts import FiredCounts
from twellctl.decoding.kernel_fit import head_dim
from twellctl.decoding.norms import added, embed_norm, normalise_q_and_k
from twellctl.decoding.prompt_graphs import PromptGraphs, sizes_of
from twellctl.decoding.prompts import Prompts
from twellctl.decoding.run_attention import attend_runs
from twellctl.decoding.whole_step import DecoderLayer
from twellctl.models.families import norm_weight, scales_of


class PromptPass:
    """Over the decoder layers of `model`, which are `layers` over a cache.

    `qkv`: of each layer, the product of states `[T, K]` and its weight to q, k and v. `logits`
    takes normalised states `[n, K]`. `counts`: what of the FFNs is to be counted, if anything.
    `tell` is told what each layer has made, `[T, K]`, its number, and of which tokens logits are
    wanted.
    """

    def __init__(
        self,
        kernels: KernelSet,
        model: PreTrainedModel,
        layers: Sequence[DecoderLayer],
        qkv: Sequence[Callable[[Tensor], Tensor]],
        rotary: Sequence[Rotary],
        logits: Callable[[Tensor], Tensor],
        counts: FiredCounts | None,
        tell: Callable[[Tensor, int, Tensor], None] | None = None,
    ):
        self._kernels, self._logits, self._counts, self._tell = kernels, logits, counts, tell
        self._layers = [*zip(model.model.layers, layers, qkv, rotary, strict=True)]
        self._embeddings = model.get_input_embeddings().weight.detach()
        self._scales = scales_of(model)
        self._last_norm = norm_weight(model.model.norm)
        config = model.config
        self._heads = Heads(config.num_attention_heads, config.num_key_value_heads, head_dim(model))
        capped = any(layer.attend.cap for layer in layers)  # attention then waits for the device
        self._graphs = PromptGraphs(self._run, self._embeddings.device, captures=not capped)

    def run(
        self, tokens: Tensor, positions: Tensor, tables: Tensor, last: int
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder.run` (decoder.py). Inputs on the device are waited for."""
        tokens, positions, tables = (part.cpu() for part in (tokens, positions, tables))
        if (sizes := sizes_of(positions, last)) is not None:
            return self._graphs.run(sizes, tokens, positions, tables)
        return self._run(Prompts.of(tokens, positions, tables, last, self._embeddings.device))

    def _run(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Logits `[B, last, V]` and what fired, `[L, B, last]`. No host reads."""
        B, last, device = prompts.num_rows, prompts.last, self._embeddings.device
        counted: AbstractContextManager[None] = nullcontext()
        if self._counts is not None:
            counted = self._counts.counted(B, last, prompts.wanted)
        with counted:
            h = self._states(prompts)
        if self._counts is None:
            fired = torch.empty((0, B, last), dtype=torch.int32, device=device)
        else:
            fired = self._counts.found(B, last, device)
        if not last:
            return h.new_empty(B, 0, len(self._embeddings)), fired
        return self._logits(h[prompts.wanted]).unflatten(0, (B, last)), fired

    def _states(self, prompts: Prompts) -> Tensor:
        """Behind all layers, normalised, `[T, K]`."""
        norms = [layer.norms.attention for _, layer, *_ in self._layers] + [self._last_norm]
        given = self._kernels, prompts.tokens, self._embeddings, norms[0], self._scales.eps
        x, h = embed_norm(*given, scale=self._scales.embeddings)
        angles = _Angles(prompts.positions)
        layers = zip(self._layers, norms[1:], strict=True)
        for number, ((module, layer, qkv, rotary), norm) in enumerate(layers):
            y = self._attended(qkv(h), prompts, layer, rotary, angles)
            y = module.self_attn.o_proj(y)
            x, h = self._added(x, y, layer.norms.after_attention, layer.norms.ffn)
            x, h = self._added(x, module.mlp(h), layer.norms.after_ffn, norm)
            if self._tell is not None and prompts.last:
                self._tell(x, number, prompts.wanted)
        return h

    def _added(
        self, x: Tensor, y: Tensor, own_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return added(self._kernels, x, partial(_onto, y), own_norm, norm, self._scales.eps)

    def _attended(
        self,
        qkv: Tensor,
        prompts: Prompts,
        layer: DecoderLayer,
        rotary: Rotary,
        angles: "_Angles",
    ) -> Tensor:
        """`[T, (H + 2 Hkv) D]` to `[T, H D]`."""
        attend, (H, _, D) = layer.attend, self._heads
        if layer.q_k_norms is not None:
            normalise_q_and_k(self._kernels, qkv, *layer.q_k_norms, self._scales.eps)
        where = prompts.positions, prompts.tables, rotary
        store_keys(self._kernels, self._heads, attend, qkv, *where)
        q = qkv[:, : H * D].unflatten(1, (H, D))
        if attend.q_norm is not None:
            q = F.rms_norm(q.float(), (D,), eps=attend.eps).to(q.dtype) * attend.q_norm[:D]
        if head_width(D) > D:
            q = F.pad(q, (0, head_width(D) - D))
        q = angles.turn(q, rotary)
        keys, values = (
            pages[prompts.pages].transpose(1, 2).flatten(0, 1)
            for pages in (attend.keys, attend.values)
        )
        how = attend.scale, attend.window, attend.cap
        y = attend_runs(q, keys, values, prompts.runs, *how)
        return y[..., :D].flatten(1)


class _Angles:
    """By which a pass turns heads at its `positions` `[T]`, of each kind of layers once."""

    def __init__(self, positions: Tensor):
        self._positions = positions
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def turn(self, heads: Tensor, rotary: Rotary) -> Tensor:
        """`[T, H, head_width(D)]`, rounded as transformers rounds."""
        if id(rotary) not in self._known:
            tables = rotary.cos[self._positions][:, None], rotary.sin[self._positions][:, None]
            self._known[id(rotary)] = tables
        cos, sin = self._known[id(rotary)]
        half = rotary.turned // 2
        lower, upper = heads[..., :half], heads[..., half : 2 * half]
        halves = torch.cat((-upper, lower, heads[..., 2 * half :]), -1)
        return heads * cos + halves * sin


def _onto(y: Tensor, residual: Tensor | None) -> Tensor:
    return y if residual is None else residual + y
