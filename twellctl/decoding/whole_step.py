"""A step of one token in one kernel, all layers and the head (kernels/decode/step.cuh), for the
models and GPUs that it takes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle import twell_spec as spec
from twellctl.bundle.twell_few import few_linear
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits, ceil_div
from twellctl.bundle.twell_weights import FFN, Weight, plain_weight
from twellctl.decoding.attention import AttendLayer, Rotary
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.rough_head import Estimate, RoughHead, refine
from twellctl.decoding.screened import Screen
from twellctl.models.families import Norms, Scales

_THREADS = 32 * (spec.STEP_WARPS + 1)  # a warp asks for weights
ONE_SPARSE, ONE_DENSE, ONE_SCREENED = ONE_KERNEL = (
    "one kernel",
    "one dense kernel",
    "one screened kernel",
)


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer as the kernels take it."""

    norms: Norms
    qkv: Weight
    attend: AttendLayer
    out: Weight
    ffn: FFN
    q_k_norms: tuple[Tensor, Tensor] | None = None  # over all heads of each together


@dataclass(frozen=True)
class StepSizes:
    """Hidden size, neurons, heads of q, their size, vocabulary; the kind of weights."""

    K: int
    N: int
    H: int
    D: int
    V: int
    kind: str = "bf16"

    def entry(self, form: str) -> str:
        """Of one of STEP_FORMS."""
        return spec.step_entry(self.K, self.D, form, self.kind)


def why_no_whole_step(sizes: StepSizes, limits: Limits) -> str | None:
    """None if `step` takes such a model on a Hopper GPU of these limits, else a sentence."""
    K, num_sms = sizes.K, limits.num_sms
    if sizes.entry("sparse") not in spec.ENTRY_FILES or sizes.H * sizes.D != K:
        said = f"{sizes.H} heads of {sizes.D} and a hidden size of {K}"
        taken = "; ".join(_sizes_taken(sizes.kind))
        return f"the kernel of a whole step takes {taken}, not {said}"
    quad, (own_quads, most_rows) = spec.STEP_QUAD, spec.MOST_OF_BLOCK[K]
    if ceil_div(K // quad, num_sms) > own_quads or num_sms < sizes.H:
        return f"{num_sms} multiprocessors are too few for a step in one kernel"
    if ceil_div(sizes.N // quad, num_sms) * quad > most_rows or sizes.N % quad:
        return f"{sizes.N} neurons are more than a step in one kernel takes, or no multiple of 4"
    return None


def _sizes_taken(kind: str) -> Iterator[str]:
    """Hidden sizes and heads that the kernel takes over weights of `kind`, in words."""
    for K, dims in spec.STEP_HEAD_DIMS.items():
        taken = [str(D) for D in dims if spec.step_entry(K, D, "sparse", kind) in spec.ENTRY_FILES]
        yield f"{K} in heads of {' or '.join(taken)}"


def takes_mapped(sizes: StepSizes, num_own: int, form: str, limits: Limits) -> bool:
    """Whether a block of this form has room for its part of the `num_own` neurons with gates of
    their own and of the others, which share a gate; of sizes that `step` takes."""
    quad = spec.STEP_QUAD
    rows = spec.FEW_ROWS if form == "screened" else quad
    blocks, most_rows = ceil_div(num_own, rows), spec.MOST_OF_BLOCK[sizes.K][1]
    own = rows * ceil_div(blocks, limits.num_sms)
    mapped = ceil_div(max(0, sizes.N - rows * blocks) // quad, limits.num_sms) * quad
    return own <= most_rows and quad + mapped <= spec.STEP_MOST_MAPPED


class WholeStep:
    """For steps of one row that follow one another. It reads the weights where they lie.

    `layers` have W_down by rows of neurons, Llama's norms and the same window; `rotary` turns whole
    heads; in memory more rows follow those of `head`, up to a multiple of STEP_QUAD, but where
    `states` alone is called, which reads no head.

    Over int4 the kernel reads the head in 8 bits, `rough`, or none at all: exact logits are a
    product of their own (few_linear), and where the choice alone must be exact, so are the logits
    that may be the largest (rough_head.py). Without `rough` all logits are exact.
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
        rotary: Rotary,
        scales: Scales,
        *,
        form: str,
        num_own: int,
        rough: RoughHead | None = None,
        screens: Sequence[Screen] | None = None,
        is_silu: bool = False,
    ):
        """`form`: one of STEP_FORMS; the first `num_own` neurons have gates of their own; `screens`
        of all layers for "screened"; `is_silu`: the dense form has SiLU in the place of ReLU;
        `rough` over int4 alone."""
        if rough is not None and sizes.kind != "int4":
            raise ValueError("the kernel of a whole step reads the head in 8 bits over int4 alone")
        self._kernels, self._limits, self._sizes = kernels, limits, sizes
        self._entry, self._is_silu = sizes.entry(form), is_silu
        self._layers, self._screens = layers, screens  # the table holds pointers to them
        self._kv_heads, self._scale = layers[0].attend.keys.shape[1], layers[0].attend.scale
        self._embeddings, self._last_norm, self._head = embeddings, last_norm, head
        self._rough = rough
        self._rotary, self._scales = rotary, scales
        K, D, blocks, device = sizes.K, sizes.D, limits.num_sms, head.device
        of_layers: list[Screen | None] = [*screens] if screens else [None] * len(layers)
        words = [_words_of(*both, num_own) for both in zip(layers, of_layers, strict=True)]
        self._table = torch.tensor(words, device=device)
        # through which blocks hand results to each other, and how often they were used
        self._words = torch.zeros(6 * K + blocks * (K + 4 * D), dtype=torch.int32, device=device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._first = torch.zeros(1, dtype=torch.int32, device=device)  # of a table of one row

    def new_stamps(self) -> Tensor:
        """Zeros for the clocks of a step, int64 `[L, len(STEP_STAGES), blocks]`."""
        size = len(self._layers), spec.NUM_STEP_STAGES, self._limits.num_sms
        return torch.zeros(size, dtype=torch.int64, device=self._head.device)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        wanted: Wanted = Wanted.EXACT,
        stamps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits float32 `[1, V]`, and how many neurons of each layer fired, int32 `[L, 1]`.

        int32 tokens and positions `[1, 1]`, tables `[1, W]`, as of `Decoder.run`. `stamps`, of
        `new_stamps`, gets each block's clock behind each stage that it has part in.
        """
        embeddings, V = self._embeddings, ceil_div(self._sizes.V, spec.STEP_QUAD) * spec.STEP_QUAD
        if (scale := self._scales.embeddings) != 1:
            embeddings, tokens = F.embedding(tokens, embeddings) * scale, self._first
        if self._is_exact(wanted):
            V = 0  # see _logits
        made, counts = self._launch(tokens, embeddings, positions, tables, V, stamps)
        return self._scales.of_model(self._logits(made, wanted)), counts

    def states(self, x: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """The normalised state bf16 `[1, K]` that the layers make of `x` `[1, K]`, which they take
        in the place of an embedding; positions and tables as above. The head is not read."""
        made, _ = self._launch(self._first, x, positions, tables, 0, None)
        return made.x

    def _launch(
        self,
        tokens: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        tables: Tensor,
        V: int,
        stamps: Tensor | None,
    ) -> tuple[Estimate, Tensor]:
        """What the kernel says of `V` rows of the head, and counts as above."""
        sizes, device, rough = self._sizes, tokens.device, self._rough
        counts = torch.empty(len(self._layers), 1, dtype=torch.int32, device=device)
        made = Estimate.empty(V, sizes.K, self._limits.num_sms, device)
        self._kernels.launch(
            self._entry,
            (self._limits.num_sms,),
            _THREADS,
            {
                "layers": self._table,
                "num_layers": len(self._layers),
                "N": sizes.N,
                "V": V,
                "H": sizes.H,
                "Hkv": self._kv_heads,
                "tokens": tokens,
                "positions": positions,
                "tables": tables,
                "embeddings": embeddings,
                "last_norm": self._last_norm,
                "head": self._head if rough is None else rough.codes,
                "head_scales": None if rough is None else rough.scales,
                "cos": self._rotary.cos,
                "sin": self._rotary.sin,
                "eps": self._scales.eps,
                "scale": self._scale,
                "is_silu": int(self._is_silu),
                "words": self._words,
                "epoch": self._epoch,
                "counts": counts,
                "logits": made.logits,
                "most": made.most,
                "least": made.least,
                "x": made.x,
                "stamps": stamps,
            },
            self._limits.smem_bytes,
            together=True,
        )
        return made, counts

    def _is_exact(self, wanted: Wanted) -> bool:
        """Whether the logits are a product behind the kernel."""
        return self._sizes.kind == "int4" and (self._rough is None or wanted is Wanted.EXACT)

    def _logits(self, made: Estimate, wanted: Wanted) -> Tensor:
        """`[1, V]`, behind the kernel, which has `made` all but exact ones over int4."""
        if self._is_exact(wanted):
            given = self._kernels, self._limits, made.x, plain_weight(self._head)
            return few_linear(*given, wide=True, overlap=True)
        if self._rough is not None and wanted is Wanted.CHOICE:
            refine(self._kernels, self._head, made)
        return made.logits[:, : self._sizes.V]


def forms_of_step(
    make: Callable[..., WholeStep],
    sizes: StepSizes,
    limits: Limits,
    *,
    sparse: bool,
    num_own: int,
    is_silu: bool,
    screens: Sequence[Screen] | None = None,
) -> dict[str, WholeStep]:
    """By name, the first by rule; `make`: a `WholeStep` but for its form. `num_own` neurons have
    gates of their own, if the model is `sparse`."""
    dense = {ONE_DENSE: make(form="dense", num_own=sizes.N, is_silu=is_silu)}
    if not sparse:
        return dense
    takes = takes_mapped(sizes, num_own, "sparse", limits)
    forms = {ONE_SPARSE: make(form="sparse", num_own=num_own if takes else sizes.N)}
    if screens is not None:
        forms[ONE_SCREENED] = make(form="screened", num_own=num_own, screens=screens)
    return forms | dense


def _words_of(layer: DecoderLayer, screen: Screen | None, num_own: int) -> list[int]:
    """kernels/decode/step_shared.cuh: LayerOf, and of rounded weights ScaledLayer. Of weights in
    int4, laid by step_int4.py, down alone has scales here."""
    ffn, attend, norms = layer.ffn, layer.attend, layer.norms
    rows = ffn.gate.values, ffn.up.values, ffn.by_neurons
    if not all(weight.is_contiguous() for weight in rows):
        raise ValueError("the kernel of a whole step takes weights by rows of neurons")
    tensors = (
        norms.attention,
        layer.qkv.values,
        layer.qkv.bias,
        layer.out.values,
        layer.out.bias,
        norms.ffn,
        *rows,
        *(weight.bias for weight in ffn.weights),
        attend.keys,
        attend.values,
        attend.q_norm,
        attend.k_norm,
    )
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    weights = (layer.qkv, layer.out, *ffn.weights)
    scales = [weight.scales.data_ptr() for weight in weights if weight.scales is not None]
    screened = [0, 0] if screen is None else [screen.copy.data_ptr(), screen.limits.data_ptr()]
    whole = [*pointers, *screened, num_own << 32 | (attend.window or 0), *scales]
    return [*whole, *[0] * (len(whole) % 2)]  # layers begin at multiples of 16 bytes
