"""A step in one kernel, all layers and the head, of one token (kernels/decode/step.cuh) or of
several, a row each (kernels/decode/step_rows.cuh), for the models and GPUs that they take.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits, ceil_div
from twellctl.bundle.twell_spec import (
    MOST_OF_BLOCK,
    ROWS_BLOCK,
    ROWS_GROUPS,
    ROWS_K,
    ROWS_OCTETS,
    ROWS_PARTS,
    ROWS_SOURCES,
    ROWS_TASKS,
    ROWS_TOKENS,
    STEP_HEAD_DIMS,
    STEP_QUAD,
    STEP_WARPS,
    step_entry,
)
from twellctl.bundle.twell_weights import FFN
from twellctl.decoding.attention import AttendLayer

_THREADS = 32 * (STEP_WARPS + 1)  # a warp asks for weights


@dataclass(frozen=True)
class Linear:
    """`weight` `[N, K]`, `bias` `[N]` or None; of an e4m3 weight its `scale`, float32 `[N]`."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer as the kernels take it."""

    input_norm: Tensor
    qkv: Linear
    attend: AttendLayer
    out: Linear
    ffn_norm: Tensor
    ffn: FFN


@dataclass(frozen=True)
class StepSizes:
    """Hidden size, neurons, heads of q, their size, vocabulary; `end` E4M3_END for such weights."""

    K: int
    N: int
    H: int
    D: int
    V: int
    end: str = ""

    def entry(self, sparse: bool) -> str:
        return step_entry(self.K, self.D, sparse=sparse, end=self.end)

    @property
    def rows_entry(self) -> str:
        return f"step_rows_{self.K}_{self.D}"


def why_no_whole_step(sizes: StepSizes, limits: Limits) -> str | None:
    """None if `step` takes such a model on a Hopper GPU of these limits, else a sentence."""
    K, num_sms = sizes.K, limits.num_sms
    if K not in MOST_OF_BLOCK or sizes.D not in STEP_HEAD_DIMS or sizes.H * sizes.D != K:
        said = f"{sizes.H} heads of {sizes.D} and a hidden size of {K}"
        taken = ", ".join(map(str, MOST_OF_BLOCK))
        return f"the kernel of a whole step takes {taken} in heads of 64 or 128, not {said}"
    own_quads, most_rows = MOST_OF_BLOCK[K]
    if ceil_div(K // STEP_QUAD, num_sms) > own_quads or num_sms < sizes.H:
        return f"{num_sms} multiprocessors are too few for a step in one kernel"
    if ceil_div(sizes.N // STEP_QUAD, num_sms) * STEP_QUAD > most_rows or sizes.N % STEP_QUAD:
        return f"{sizes.N} neurons are more than a step in one kernel takes, or no multiple of 4"
    if sizes.V % STEP_QUAD:
        return f"a vocabulary of {sizes.V} is no multiple of 4"
    return None


def most_rows_at_once(sizes: StepSizes, limits: Limits, *, sparse: bool) -> int:
    """How many rows a step in one kernel may have, for a model that `step` takes."""
    blocks = limits.num_sms
    least, most = ROWS_PARTS * ROWS_GROUPS, ROWS_PARTS * ROWS_SOURCES
    if not sparse or sizes.end or sizes.K != ROWS_K or not least <= blocks <= most:
        return 1
    if sizes.N % 8 or sizes.V % 8 or ceil_div(sizes.N // 8, blocks) > ROWS_OCTETS:
        return 1
    return min(ROWS_TOKENS, 64 * ROWS_TASKS // sizes.D * blocks // sizes.H)


class WholeStep:
    """For steps of up to `most_rows` rows that follow one another. It reads the weights where they
    lie.

    `layers` have W_down by rows of neurons, and the same window; `rotary` is cos and sin
    `[positions, D]`.
    """

    def __init__(
        self,
        kernels: KernelSet,
        limits: Limits,
        sizes: StepSizes,
        layers: Sequence[DecoderLayer],
        embeddings: Tensor,
        last_norm: Tensor,
        head: Tensor,
        rotary: tuple[Tensor, Tensor],
        eps: float,
        *,
        sparse: bool,
    ):
        self._kernels, self._limits, self._sizes = kernels, limits, sizes
        self._entry = sizes.entry(sparse)
        self._layers = layers  # the table holds pointers to them
        self._kv_heads, self._scale = layers[0].attend.keys.shape[1], layers[0].attend.scale
        self._weights = embeddings, last_norm, head, *rotary
        self._eps = eps
        K, D, blocks, device = sizes.K, sizes.D, limits.num_sms, head.device
        self._table = torch.tensor([_words_of(layer) for layer in layers], device=device)
        words = 6 * K + blocks * (K + 4 * D)
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.most_rows = most_rows_at_once(sizes, limits, sparse=sparse)
        self._of_rows: dict[int, tuple[Tensor, Tensor]] = {}  # words and epoch, by rows

    def __call__(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Logits float32 `[B, V]`, and how many neurons of each layer fired, int32 `[L, B]`.

        int32 tokens and positions `[B]`, tables `[B, W]`, as `Decoder.step` takes them. The
        first step of so many rows must not be one of a capture.
        """
        sizes, device, B = self._sizes, tokens.device, len(tokens)
        counts = torch.empty(len(self._layers), B, dtype=torch.int32, device=device)
        logits = torch.empty(B, sizes.V, dtype=torch.float32, device=device)
        inputs: tuple[Tensor | int, ...] = tokens, positions, tables
        if B > 1:
            inputs += B, tables.stride(0)
        self._kernels.launch(
            self._entry if B == 1 else sizes.rows_entry,
            (self._limits.num_sms,),
            _THREADS if B == 1 else ROWS_BLOCK,
            (
                *(self._table, len(self._layers), sizes.N, sizes.V, sizes.H, self._kv_heads),
                *(*inputs, *self._weights),
                *(float(self._eps), float(self._scale)),
                *(*self._words_for(B), counts, logits),
            ),
            self._limits.smem_bytes,
            together=True,
        )
        return logits, counts

    def _words_for(self, B: int) -> tuple[Tensor, Tensor]:
        """By which blocks hand each other results, and how often they were used."""
        if B == 1:
            return self._words, self._epoch
        if B not in self._of_rows:
            if self._epoch.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"run a step of {B} rows once before the capture")
            sizes, blocks = self._sizes, self._limits.num_sms
            K, columns = sizes.K, (sizes.H + 2 * self._kv_heads) * sizes.D
            # x three times, q, k and v, two bf16 a word; what fired; hidden; parts of y
            turn = ROWS_TOKENS * (3 * K + columns) // 2
            turn += blocks * (8 + 8 * ROWS_OCTETS * ROWS_TOKENS // 2) + ROWS_PARTS * ROWS_TOKENS * K
            words = torch.full((4 * turn,), -1, dtype=torch.int32, device=self._epoch.device)
            self._of_rows[B] = words, torch.zeros_like(self._epoch)
        return self._of_rows[B]


def _words_of(layer: DecoderLayer) -> list[int]:
    """kernels/decode/step_shared.cuh: LayerOf, and of e4m3 weights ScaledLayer."""
    ffn, attend = layer.ffn, layer.attend
    if not (ffn.w_gate.is_contiguous() and ffn.w_up.is_contiguous() and ffn.w_down.is_contiguous()):
        raise ValueError("the kernel of a whole step takes weights by rows of neurons")
    tensors = (
        *(layer.input_norm, layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias),
        *(layer.ffn_norm, ffn.w_gate, ffn.w_up, ffn.w_down, ffn.b_gate, ffn.b_up, ffn.b_down),
        *(attend.keys, attend.values, attend.q_norm, attend.k_norm),
    )
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    scales = (layer.qkv.scale, layer.out.scale, ffn.s_gate, ffn.s_up, ffn.s_down)
    told = [scale.data_ptr() for scale in scales if scale is not None]
    return [*pointers, attend.window or 0, *told]
