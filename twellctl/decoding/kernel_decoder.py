"""A decoder over our own kernels, for Llama and its kin (models/families.py) on an NVIDIA GPU: in
bf16, or with linear layers whose weights are rounded (twell_weights.py).

A step is a chain of launches, each of which may start before the one in front has ended
(kernels/ptx/pdl.cuh): the embedding, with the first norm; of each layer

    rms_norm -> few_linear (q, k, v) -> attend -> few_linear (o), onto x
    rms_norm -> the FFN for few tokens (twell_few.py), onto x

and rms_norm -> few_linear (the head). Where what a block adds is normalised, too, add_norm takes
the place of rms_norm. `choose` (step_end.py) follows. A pass over a few tokens of each row is the
same chain with more rows; store_keys (attention.py) then comes before attend. With more than 32
rows PyTorch's products replace few_linear of the attention and of dense FFNs (few_ways.py). Over
rounded weights they round their inputs, too, which stay bf16 with fewer rows.

The FFN is computed by pairs, over the union of what fires, or densely (few_ways.py). A pass over
one token may be one launch instead of the chain, for some models (whole_step.py); over int4 another
launch follows it (rough_head.py). Which of these
ways is the fastest for each number of tokens is measured when the decoder is attached
(step_plan.py), and `plan` tells it. An activation other than ReLU leaves nothing out: then the FFN
is dense, a step may have up to 256 rows, and the head takes at most 64 a launch.

Prompts go through the model's own linear layers and FFNs into the same cache (prompt_pass.py). They
use a copy of the modules that shares the parameters; in the sparse form its ReLU FFNs run over
TwELL.

A decoder changes nothing in the model that it is given but where weights lie in memory: q, k and v
become parts of one tensor, W_down of a sparse form lies by rows of neurons, and memory may hold
more rows after those of the head. Names, shapes and values stay. Only W_down is read in two
layouts: where a sparse and a dense decoder run over one model, each has it in its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle import twell_dense
from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_launch import device_limits, kernels_for
from twellctl.bundle.twell_model import (
    activation_of,
    gated_ffns,
    weights_of,
)
from twellctl.bundle.twell_rounded_linear import weight_of
from twellctl.bundle.twell_spec import PAGE
from twellctl.bundle.twell_ways import Problem, Way
from twellctl.decoding import attention, kernel_fit
from twellctl.decoding.decoder import Wanted, buckets
from twellctl.decoding.engine import SCREENED, WHOLE
from twellctl.decoding.few_ways import DENSE, few_ways, wide_logits, with_activation
from twellctl.decoding.fired_counts import FiredCounts
from twellctl.decoding.int4_layers import int4_layers, takes_int4
from twellctl.decoding.kernel_head import KernelHead
from twellctl.decoding.kernel_layers import decoder_layer, own_copy, pad_rows, rotary_of_layers
from twellctl.decoding.layer_pass import LayerPass
from twellctl.decoding.norms import embed_norm
from twellctl.decoding.paged_cache import LayerShape, PagedCache
from twellctl.decoding.pages import pages_for
from twellctl.decoding.prompt_pass import PromptPass
from twellctl.decoding.rough_head import RoughHead
from twellctl.decoding.screening import open_screens
from twellctl.decoding.stable import STABLE_ROWS
from twellctl.decoding.step_plan import Pass, plan_steps
from twellctl.decoding.torch_decoder import PREFILL_CHUNK
from twellctl.decoding.whole_step import (
    DecoderLayer,
    StepSizes,
    WholeStep,
    forms_of_step,
    takes_mapped,
)
from twellctl.heads.head import DraftHead
from twellctl.here.own_kernels import own_kernels
from twellctl.models.defaults import LONGEST, context_of
from twellctl.models.families import norm_weight, scales_of
from twellctl.models.linear_map import own_neurons

_WIDTHS = (16, 64, 128, 512)  # of block tables: 1, 4, 8 and 32 thousand positions


class KernelDecoder:
    """A `Decoder` (decoder.py). `sparse` False is the dense form, over the same kind of kernels.

    A model whose FFNs are not ReLU has that form alone. The dense form does not count what fires.
    Several decoders may run over one model and one cache. `stable`: dense, as stable.py has it.
    """

    capturable, prefill_chunk = True, PREFILL_CHUNK
    why_not = staticmethod(kernel_fit.why_not)

    def __init__(
        self,
        model: PreTrainedModel,
        sparse: bool = True,
        gates: str = WHOLE,
        *,
        stable: bool = False,
    ):
        self._fit = fit = kernel_fit.fit_of(model)
        self.stable, self._sparse = stable, sparse and fit.is_relu and not stable
        sparse = self._sparse
        self._model = own_copy(model, sparse=sparse, kind=fit.sizes.kind)
        self.device = model.device
        self.max_rows = min(fit.max_rows, STABLE_ROWS) if stable else fit.max_rows
        self.kernels = kernels_for(own_kernels(), self.device.index)
        self._limits = device_limits(self.device.index)
        screens = sparse and gates == SCREENED and self._may_screen()
        self.screens = open_screens(self._model) if screens else None
        self.vocab_size, self.context = fit.sizes.V, context_of(model.config.to_dict()) or LONGEST
        self.shapes: Sequence[LayerShape] = kernel_fit.cached_shapes(model)
        ffns = gated_ffns(model) if sparse else []
        self.neurons: Sequence[int] = [weights_of(ffn).N for ffn in ffns]
        self.mapped = mapped_neurons(model.config) if sparse else 0
        self._density = _mean_density(self._model) if sparse else 0.0
        self._scales = scales_of(model)
        self._attend_plans: dict[tuple[int, int, int], attention.AttendPlan] = {}
        self._states: Tensor | None = None
        self._lower: Sequence[int] = ()

    def attach(self, cache: PagedCache) -> None:
        cache.check(self.shapes, by_tokens=False)
        body = self._model.model
        # under the caller's inference mode weights would become such that cannot be trained
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [
                decoder_layer(self._model, layer, *pages)
                for layer, *pages in zip(body.layers, cache.keys, cache.values, strict=True)
            ]
            self._in_int4 = self._int4_layers()
            if self._fit.one_kernel and not self.stable and not self._in_int4:
                pad_rows(self._model.lm_head.weight)  # which that kernel reads
            self._head = weight_of(self._model.lm_head).detached()
            self._embeddings = self._model.get_input_embeddings().weight.detach()
            self._last_norm = norm_weight(body.norm)
        reach = min(self.context, (cache.num_pages - 1) * PAGE)
        self._max_pages = pages_for(reach)
        self._rotary = rotary_of_layers(self._model, reach)
        self._workspace = attention.open_workspace(self._all_plans(reach), self.device)
        self._prompts = PromptPass(
            self.kernels,
            self._model,
            self._layers,
            [partial(twell_dense.linear, weight=layer.qkv) for layer in self._layers],
            self._rotary,
            self._logits,
            FiredCounts(self._model, len(self._layers)) if self._sparse else None,
            self._tell,
        )
        self.whole_steps = self._make_whole_steps()
        self.plan = self._make_plan()

    def keep_states(self, most: int, lower: Sequence[int]) -> Tensor:
        """As head_drafter.py has it; called before a pass is captured."""
        size = most, (1 + len(lower)) * self._embeddings.shape[1]
        self._states = torch.zeros(size, dtype=self._embeddings.dtype, device=self.device)
        self._lower = lower
        return self._states

    def _tell(self, states: Tensor, layer: int | None = None, wanted: Tensor | None = None) -> None:
        """Keep `states` `[n, K]`: the output of `layer`; None: the normalised ones behind the last.
        `wanted`: the places of those that get logits; None: all."""
        if self._states is None or (layer is not None and layer not in self._lower):
            return
        K = states.shape[1]
        place = len(self._lower) if layer is None else self._lower.index(layer)
        told = (states if wanted is None else states[wanted])[: len(self._states)]
        self._states[: len(told), place * K : (place + 1) * K] = told

    def open_head(self, head: DraftHead) -> KernelHead:
        """For passes of `head` over what the last layer caches."""
        eps = head.sizes.eps  # `over` keeps no weights on the host

        def over(positions: Tensor, tables: Tensor) -> LayerPass:
            tables = self._of_a_width(tables)
            plan = self._attend_plan(1, 1, tables.shape[1])
            given = self.kernels, self._limits, plan, positions, tables
            return LayerPass(*given, self._rotary[-1], self._workspace, eps)

        of_model = self._embeddings, self._head.values, self._layers[-1].attend, self._rotary[-1]
        return KernelHead(head, self.kernels, self._limits, *of_model, over)

    def widths(self, max_pages: int) -> list[int]:
        return [*(width for width in _WIDTHS if width < max_pages), max_pages]

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int = 1,
        wanted: Wanted = Wanted.EXACT,
    ) -> tuple[Tensor, Tensor]:
        """Few tokens that all get logits go over the decode kernels, others as a prompt."""
        B, Q = tokens.shape
        if last < Q or Q > attention.MOST_QUERIES or self.max_rows < B * Q:
            return self._prompts.run(tokens, positions, tables, last)
        tokens, positions, tables = (part.to(self.device) for part in (tokens, positions, tables))
        tables = self._of_a_width(tables)
        way = self.ways(B * Q, wanted)[self.plan.name(B * Q)]
        logits, counts = way(tokens, positions, _for_each_token(tables, Q))
        return logits.unflatten(0, (B, Q)), counts[: len(self.neurons)].unflatten(1, (B, Q))

    def _of_a_width(self, tables: Tensor) -> Tensor:
        """`tables` `[B, W]`, filled up to one of `widths`: attention is planned for those alone."""
        widths = self.widths(self._max_pages)
        W = next(width for width in widths if width >= tables.shape[1])
        return tables if tables.shape[1] == W else F.pad(tables, (0, W - tables.shape[1]))

    def ways(self, num_tokens: int, wanted: Wanted = Wanted.EXACT) -> dict[str, Pass]:
        """The ways that a pass over that many tokens may go. The first by rule.

        Each takes tokens and positions `[B, Q]` and tables `[B Q, W]`, and gives logits `[B Q, V]`
        and how many neurons of all layers fired, int32 `[L, B Q]`, if the decoder is sparse.
        Results differ by the order of sums, and where logits are `wanted` that need not be exact.
        """
        steps = self.whole_steps if num_tokens == 1 else {}
        of_one_row = {name: partial(step, wanted=wanted) for name, step in steps.items()}
        if not self._fit.is_relu:
            all_of_it = partial(self._one_by_one, self._with_activations)
            return {**of_one_row, DENSE.name: all_of_it}
        ways = [DENSE]
        if self._sparse:
            ffn = self._layers[0].ffn
            problem = Problem(num_tokens, ffn.N, ffn.K, self._limits, kind=self._fit.sizes.kind)
            ways = [*few_ways(problem, self._density), DENSE]
        of_all = {way.name: [way] * len(self._layers) for way in ways}
        return {
            **of_one_row,
            **{name: partial(self._one_by_one, of_layers) for name, of_layers in of_all.items()},
        }

    def _one_by_one(
        self, ways: list[Way], tokens: Tensor, positions: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A pass, one kernel after the other; `ways`: of each layer's FFN."""
        (B, Q), W = tokens.shape, tables.shape[1]
        tokens, positions = tokens.reshape(-1), positions.reshape(-1)
        plan = self._attend_plan(B, Q, W)
        counts = torch.empty(len(self._layers), B * Q, dtype=torch.int32, device=self.device)
        norms = [layer.norms.attention for layer in self._layers] + [self._last_norm]
        eps = self._scales.eps
        given = (self.kernels, tokens, self._embeddings, norms[0], eps, counts)
        x, h = embed_norm(*given, scale=self._scales.embeddings)
        over = partial(LayerPass, self.kernels, self._limits, plan, positions, tables)
        for i, layer in enumerate(self._layers):
            through = over(self._rotary[i], self._workspace, eps)
            of_layer = counts[i] if self._sparse else None
            x, h = through(layer, ways[i], x, h, norms[i + 1], of_layer)
            self._tell(x, i)
        return self._logits(h), counts

    def _logits(self, h: Tensor) -> Tensor:
        """Of the model, of normalised states."""
        self._tell(h)
        at_once = self._fit.at_once
        logits = wide_logits(self.kernels, self._limits, h, self._head, at_once)
        return self._scales.of_model(logits)

    def _make_whole_steps(self) -> dict[str, WholeStep]:
        """For steps of one row, if the model is such."""
        if not self._fit.one_kernel or self.stable:
            return {}
        sizes, layers = self._step_sizes, self._in_int4 or self._layers
        if not self._sparse and not self._in_int4:  # larger batches read W_down by rows of K
            ffns = [replace(one.ffn, turned=one.ffn.by_neurons.contiguous()) for one in layers]
            layers = [replace(one, ffn=ffn) for one, ffn in zip(layers, ffns, strict=True)]
        make = partial(
            WholeStep,
            self.kernels,
            self._limits,
            sizes,
            layers,
            self._embeddings,
            self._last_norm,
            self._head.values,
            self._rotary[0],
            self._scales,
            rough=RoughHead.of(self._head.values) if self._in_int4 else None,
        )
        if self._in_int4:  # else that would be done in a capture, if plans are known
            taken = ["sparse", "dense"] if self._sparse else ["dense"]
            self.kernels.prepare([*(sizes.entry(form) for form in taken), "refine"])
        return forms_of_step(
            make,
            sizes,
            self._limits,
            sparse=self._sparse,
            num_own=self._own_neurons if self._sparse else 0,
            is_silu=self._fit.is_silu,
            screens=self.screens.layers if self.screens else None,
        )

    def _int4_layers(self) -> list[DecoderLayer] | None:
        """For steps of one row, if the model was expanded from int4; weights are laid anew once."""
        if not self._may_take_int4:
            return None
        sizes, modules = replace(self._fit.sizes, kind="int4"), self._model.model.layers
        return int4_layers(modules, self._layers, sizes, self._limits)

    @cached_property
    def _may_take_int4(self) -> bool:
        if not self._fit.one_kernel or self.stable:
            return False
        sizes = replace(self._fit.sizes, kind="int4")
        return takes_int4(self._model.model.layers, sizes, self._limits)

    @property
    def most_rough(self) -> int:
        """Of a pass that may go in one kernel over int4."""
        return 1 if self._in_int4 else 0

    @property
    def step_kind(self) -> str:
        """The kind of weights that steps in one kernel read (twell_spec.STEP_KINDS)."""
        return self._step_sizes.kind

    @property
    def _step_sizes(self) -> StepSizes:
        """Those of steps in one kernel."""
        return replace(self._fit.sizes, kind="int4") if self._in_int4 else self._fit.sizes

    @cached_property
    def _with_activations(self) -> list[Way]:
        """Of layers with another activation than ReLU, which leaves nothing out."""
        return [
            with_activation(activation_of(ffn), is_silu=self._fit.is_silu)
            for ffn in gated_ffns(self._model)
        ]

    @cached_property
    def _own_neurons(self) -> int:
        return max(own_neurons(ffn) for ffn in gated_ffns(self._model))

    def _may_screen(self) -> bool:
        if not self._fit.screens:
            return False
        if self._may_take_int4:  # whose gate is its own screen
            return False
        return takes_mapped(self._fit.sizes, self._own_neurons, "screened", self._limits)

    def _attend_plan(self, B: int, Q: int, width: int) -> attention.AttendPlan:
        if (B, Q, width) not in self._attend_plans:
            sizes, kv_heads = self._fit.sizes, self._model.config.num_key_value_heads
            how = (B, sizes.H, kv_heads, sizes.D, width * PAGE, self._limits.num_sms, Q)
            plan = attention.plan_attend
            if self.stable:  # by the context, not the cache: the next start may have another
                plan = partial(attention.plan_alike, longest=self.context)
            self._attend_plans[B, Q, width] = plan(*how)
        return self._attend_plans[B, Q, width]

    def _all_plans(self, reach: int) -> Iterator[attention.AttendPlan]:
        """Of any number of rows and tokens: some want more room than the most of them do."""
        for B in range(1, self.max_rows + 1):
            for queries in range(1, min(attention.MOST_QUERIES, self.max_rows // B) + 1):
                for width in self.widths(pages_for(reach)):
                    yield self._attend_plan(B, queries, width)

    def _make_plan(self) -> WayPlan:
        kv_heads = self._model.config.num_key_value_heads
        of = f"{self._step_sizes} Hkv={kv_heads} L={len(self._layers)}"
        with torch.inference_mode():
            return plan_steps(
                self.ways,
                buckets(self.max_rows),
                self.device,
                self.vocab_size,
                self.widths(self._max_pages)[0],
                key=f"{of} {'sparse' if self._sparse else 'dense'} {own_kernels()[:12]}",
                neurons=self._fit.sizes.N,
                density=self._density,
            )


def _mean_density(model: PreTrainedModel) -> float | None:
    """As profiled; None if it was not."""
    known = [getattr(ffn, "twell_density", None) for ffn in gated_ffns(model)]
    densities = [density for density in known if density is not None]
    return sum(densities) / len(densities) if len(densities) == len(known) else None


def _for_each_token(tables: Tensor, Q: int) -> Tensor:
    """Tables `[B, W]` of rows, to `[B Q, W]` of the tokens of each."""
    if Q == 1:
        return tables
    B, W = tables.shape
    return tables[:, None].expand(B, Q, W).reshape(B * Q, W)
