"""A decoder of one sequence at a time over codes of 4 bits alone, on Hopper.

Its steps are one kernel, which reads codes (whole_step.py). Prompts, and what else has several
tokens, go through the model's linear layers (prompt_pass.py), which expand their weights one after
the other (coded_linear.py): no copy of the model in bf16 is in memory. For several sequences at
once there is KernelDecoder, over a model whose layers are expanded.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_launch import device_limits, kernels_for
from twellctl.bundle.twell_rounded_linear import weight_of
from twellctl.bundle.twell_spec import PAGE, step_group
from twellctl.decoding import kernel_fit
from twellctl.decoding.coded_linear import all_rows
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.few_ways import wide_logits
from twellctl.decoding.fired_counts import FiredCounts
from twellctl.decoding.int4_layers import CodedLayer, coded_layer
from twellctl.decoding.kernel_layers import coded_layers, rotary_of_layers
from twellctl.decoding.paged_cache import LayerShape, PagedCache
from twellctl.decoding.pages import pages_for
from twellctl.decoding.prompt_pass import PromptPass
from twellctl.decoding.rough_head import RoughHead
from twellctl.decoding.step_plan import Pass, plan_steps
from twellctl.decoding.torch_decoder import PREFILL_CHUNK
from twellctl.decoding.whole_step import StepSizes, WholeStep, forms_of_step
from twellctl.here.own_kernels import own_kernels
from twellctl.models.defaults import LONGEST, context_of
from twellctl.models.families import norm_weight, scales_of
from twellctl.models.linear_map import num_mapped


class CodedDecoder:
    """A `Decoder` (decoder.py) of a model that was loaded packed. It lays the codes of the model
    anew, in the place of those that were loaded. Steps choose by the head in 8 bits, which is there
    beside the one in bf16 (rough_head.py).
    """

    capturable, stable = True, False
    # to expand all layers takes as long whatever the number of tokens: 0.7 ms of 1.5B, by bytes
    prefill_chunk = 4 * PREFILL_CHUNK
    max_rows: int | None = 1
    step_kind, most_rough = "int4", 1
    why_not = staticmethod(kernel_fit.why_not_coded)

    def __init__(self, model: PreTrainedModel):
        self._is_silu, self._sparse = kernel_fit.is_silu(model), kernel_fit.is_relu(model)
        self._model, self.device = model, model.device
        self.kernels = kernels_for(own_kernels(), self.device.index)
        self._limits = device_limits(self.device.index)
        self._sizes: StepSizes = replace(kernel_fit.step_sizes(model), kind="int4")
        self._coded = _lay_codes(model, step_group(self._sizes.K))
        self._at_once = kernel_fit.rows_at_once(model)
        self.vocab_size = self._sizes.V
        self.context = context_of(model.config.to_dict()) or LONGEST
        self.shapes: Sequence[LayerShape] = kernel_fit.cached_shapes(model)
        self.neurons: Sequence[int] = [self._sizes.N] * len(self._coded) if self._sparse else []
        self.mapped = mapped_neurons(model.config) if self._sparse else 0

    def attach(self, cache: PagedCache) -> None:
        cache.check(self.shapes, by_tokens=False)
        reach = min(self.context, (cache.num_pages - 1) * PAGE)
        self._max_pages = pages_for(reach)
        layers = coded_layers(self._model, self._coded, cache)
        rotary = rotary_of_layers(self._model, reach)
        self._head = weight_of(self._model.lm_head).detached()
        self._scales = scales_of(self._model)
        counts = FiredCounts(self._model, len(layers)) if self._sparse else None
        qkv = [all_rows(coded.qkv) for coded in self._coded]
        given = self.kernels, self._model, layers, qkv, rotary
        self._prompts = PromptPass(*given, self._logits, counts)
        make = partial(
            WholeStep,
            self.kernels,
            self._limits,
            self._sizes,
            layers,
            self._model.get_input_embeddings().weight.detach(),
            norm_weight(self._model.model.norm),
            self._head.values,
            rotary[0],
            self._scales,
            rough=RoughHead.of(self._head.values),
        )
        forms = ["sparse", "dense"] if self._sparse else ["dense"]
        others = ["refine", "expand_quads", "expand_neurons"]
        self.kernels.prepare([*map(self._sizes.entry, forms), *others])
        self._steps = forms_of_step(
            make,
            self._sizes,
            self._limits,
            sparse=self._sparse,
            num_own=self._num_own,
            is_silu=self._is_silu,
        )
        self.plan = self._make_plan()

    def widths(self, max_pages: int) -> list[int]:
        return [max_pages]

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int = 1,
        wanted: Wanted = Wanted.EXACT,
    ) -> tuple[Tensor, Tensor]:
        """One token that gets logits goes in one kernel, others as a prompt."""
        if tokens.numel() > 1 or not last:
            return self._prompts.run(tokens, positions, tables, last)
        tokens, positions, tables = (part.to(self.device) for part in (tokens, positions, tables))
        step = self._steps[self.plan.name(1)]
        logits, counts = step(tokens, positions, tables, wanted)
        return logits[None], counts[: len(self.neurons), None]

    def ways(self, num_tokens: int, wanted: Wanted = Wanted.EXACT) -> dict[str, Pass]:
        """Those of a pass over one token, the first by rule (as of KernelDecoder)."""
        return {name: partial(step, wanted=wanted) for name, step in self._steps.items()}

    def _logits(self, h: Tensor) -> Tensor:
        """Of the model, of normalised states."""
        logits = wide_logits(self.kernels, self._limits, h, self._head, self._at_once)
        return self._scales.of_model(logits)

    @property
    def _num_own(self) -> int:
        """Neurons with gates of their own, the same in all layers; 0: there is one form alone."""
        if not self._sparse:
            return 0
        N, most = self._sizes.N, 0
        for coded in self._coded:
            gate = coded.gate_up[0]
            bias = [] if gate.bias is None else [gate.bias[:N]]
            most = max(most, N - num_mapped(gate.expand()[:N], *bias))
        return most

    def _make_plan(self) -> WayPlan:
        of = f"{self._sizes} Hkv={self._model.config.num_key_value_heads} L={len(self._coded)}"
        with torch.inference_mode():
            return plan_steps(
                self.ways,
                [1],
                self.device,
                self.vocab_size,
                self._max_pages,
                key=f"{of} codes alone {own_kernels()[:12]}",
                neurons=self._sizes.N,
                density=None if self._sparse else 0.0,
            )


def _lay_codes(model: PreTrainedModel, group: int) -> list[CodedLayer]:
    """Let the linear layers of `model` be `CodedLinear`, a decoder layer after the other.
    `ValueError` if one has no codes."""
    made = []
    for module in model.model.layers:
        if (coded := coded_layer(module, group)) is None:
            raise ValueError("a linear layer has no codes")
        coded.put_into(module)
        made.append(coded)
    return made
