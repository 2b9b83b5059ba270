"""A decoder over our own kernels, for Llama and its kin in bf16 on an NVIDIA GPU.

A step is a chain of launches, each of which may start before the one in front has ended
(kernels/ptx/pdl.cuh): the embedding, with the first norm; of each layer

    rms_norm -> few_linear (q, k, v) -> attend -> few_linear (o), onto x
    rms_norm -> the FFN for few tokens (twell_few.py), onto x

and rms_norm -> few_linear (the head). `choose` (step_end.py) follows them. The FFN goes by pairs,
by the union of what fires or densely (few_ways.py, down_copies.py); and a step of one row, or of
up to 16, may be one launch in the place of all that, if the model is such that it can be
(whole_step.py). Which of these forms is the fastest is measured in the first step of so many rows
(step_forms.py).

Prompts go through the model's own forward (HFDecoder), its FFNs over TwELL, into the same cache.
The model is made over for that: q, k and v lie together, and down by rows of neurons.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bundle.twell_few import (
    few_gated_kernels,
    few_kernels,
    few_linear,
    takes_few,
    takes_few_dense,
)
from twellctl.bundle.twell_launch import device_limits, kernels_for
from twellctl.bundle.twell_model import (
    activation_name,
    by_rows_of_neurons,
    gated_ffns,
    is_plain,
    put_over_twell,
    use_kernels,
)
from twellctl.bundle.twell_nvrtc import KernelError, what_is_missing
from twellctl.bundle.twell_reasons import takes_hopper_kernels
from twellctl.bundle.twell_ways import Problem, Way
from twellctl.bundle.twell_weights import FFN
from twellctl.decoding.attention import (
    AttendLayer,
    AttendPlan,
    attend,
    embed_norm,
    open_workspace,
    plan_attend,
    rms_norm,
    rotary_tables,
    why_no_norm,
    why_not_attend,
)
from twellctl.decoding.down_copies import DownCopies
from twellctl.decoding.few_ways import BY_COLUMNS, IN_PLACE, few_ways
from twellctl.decoding.hf_decoder import HFDecoder
from twellctl.decoding.pages import PAGE, pages_for
from twellctl.decoding.step_forms import Form, FormChoice
from twellctl.decoding.whole_step import (
    DecoderLayer,
    Linear,
    StepSizes,
    WholeStep,
    most_rows_at_once,
    why_no_whole_step,
)
from twellctl.here.own_kernels import own_kernels

_FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "seed_oss", "cwm")
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_WIDTHS = (16, 64, 128, 512)  # of block tables: 1, 4, 8 and 32 thousand positions
_BATCHES = (1, 2, 4, 8, 16, 32, 64)


class KernelDecoder:
    """A `Decoder` (decoder.py). `sparse` False is the dense form, over the same kind of kernels.

    The dense form tells no fired shares. It is to be made before the sparse one of the same model,
    whose prompts go over TwELL from then on.
    """

    capturable = True

    @staticmethod
    def why_not(model: PreTrainedModel) -> str | None:
        """None if `model` can be driven so, else what stands against it."""
        return _why_not(model)

    def __init__(self, model: PreTrainedModel, sparse: bool = True):
        self._model, self._sparse = model, sparse
        self.device = model.device
        self.kernels = kernels_for(own_kernels(), self.device.index)
        self._limits = device_limits(self.device.index)
        self.max_rows = _most_rows(model)
        if sparse:
            _put_over_twell(model)
        elif _is_over_twell(model):
            raise ValueError("this model runs over TwELL already: make its dense form before")
        self._plain = HFDecoder(model)
        self.vocab_size, self.context = self._plain.vocab_size, self._plain.context
        self.prefill_chunk, self.page_bytes = self._plain.prefill_chunk, self._plain.page_bytes
        self.neurons = self._plain.neurons if sparse else []
        self._hopper = takes_hopper_kernels(self.device.index)
        # as profiled, if they were; the dense form does not depend on them
        self._densities = [
            getattr(ffn, "twell_density", None) if sparse else 0.0 for ffn in gated_ffns(model)
        ]
        self._eps = model.config.rms_norm_eps
        self._plans: dict[tuple[int, int], AttendPlan] = {}

    def open_cache(self, num_pages: int) -> None:
        self._plain.open_cache(num_pages)
        body, cache = self._model.model, self._plain.cache
        # under the caller's inference mode weights would become such that cannot be trained
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [
                self._layer(layer, *pages)
                for layer, *pages in zip(body.layers, cache.keys, cache.values, strict=True)
            ]
        self._copies = DownCopies([layer.ffn for layer in self._layers], self.device)
        reach = min(self.context, (num_pages - 1) * PAGE)
        self._rotary = rotary_tables(body.rotary_emb, reach, self.device)
        # for any number of rows: some want more room than the most rows do
        rows, widths = range(1, self.max_rows + 1), self.widths(pages_for(reach))
        plans = [self._plan(B, W) for B in rows for W in widths]
        self._workspace = open_workspace(plans, self.device)
        self._whole_steps = self._make_whole_steps()
        config, num_layers = self._model.config, len(self._layers)
        of = f"{_step_sizes(self._model)} Hkv={config.num_key_value_heads} L={num_layers}"
        told = None not in self._densities
        self._choice = FormChoice(
            self.device,
            f"{of} {'sparse' if self._sparse else 'dense'} {own_kernels()[:12]}",
            config.intermediate_size,
            sum(self._densities) / num_layers if told else None,
        )

    def widths(self, max_pages: int) -> list[int]:
        return [*(width for width in _WIDTHS if width < max_pages), max_pages]

    def prefill(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        logits, fired = self._plain.prefill(tokens, positions, tables)
        return logits, fired[: len(self.neurons)]

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        forms = partial(self.forms, len(tokens))
        logits, counts = self._choice(forms, tokens, positions, tables)
        if not self._choice.takes(BY_COLUMNS.name):
            self._copies.drop()
        return logits, counts[: len(self.neurons)]

    def chosen(self, rows: int) -> str | None:
        """By which of its forms steps of `rows` rows went last; None: there was none."""
        return self._choice.chosen(rows)

    def forms(self, B: int) -> dict[str, Form]:
        """The forms of a step of `B` rows that are possible now. The first by rule.

        Each takes what `step` does, and counts all layers if the decoder is sparse. Results differ
        by the order of sums.
        """
        dense = BY_COLUMNS if not self._sparse or self._copies.fit() else IN_PLACE
        ways = {dense.name: [dense] * len(self._layers)}
        if self._sparse:
            ffn = self._layers[0].ffn
            problem = Problem(B, ffn.N, ffn.K, self._limits, self._hopper)
            ways = few_ways(problem, self._densities) | ways
        return {
            **{name: step for name, step in self._whole_steps.items() if step.most_rows >= B},
            **{name: partial(self._one_by_one, of_layers) for name, of_layers in ways.items()},
        }

    def _one_by_one(
        self, ways: list[Way], tokens: Tensor, positions: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A step, one kernel after the other; `ways`: of each layer's FFN."""
        B = len(tokens)
        plan = self._plan(B, tables.shape[1])
        counts = torch.empty(len(self._layers), B, dtype=torch.int32, device=self.device)
        table = self._model.get_input_embeddings().weight
        first_norm = self._layers[0].input_norm
        x, h = embed_norm(self.kernels, tokens, table, first_norm, self._eps, counts)
        for i, layer in enumerate(self._layers):
            if i:
                h = rms_norm(self.kernels, x, layer.input_norm, self._eps)
            qkv = self._linear(h, layer.qkv, ahead=self._sparse)
            h = attend(
                self.kernels,
                plan,
                layer.attend,
                qkv,
                positions,
                tables,
                self._rotary,
                self._workspace,
            )
            x = self._linear(h, layer.out, x)
            h = rms_norm(self.kernels, x, layer.ffn_norm, self._eps)
            copied = self._sparse and not ways[i].by_rows
            ffn = self._copies[i] if copied else layer.ffn
            how = {"residual": x, "counts": counts[i] if self._sparse else None, "overlap": True}
            x = ways[i].run(self.kernels, self._limits, h, ffn, **how)
        h = rms_norm(self.kernels, x, self._model.model.norm.weight, self._eps)
        head = self._model.lm_head
        # not rounded to bf16, which would make many tokens equally likely
        logits = few_linear(
            self.kernels, self._limits, h, head.weight, head.bias, wide=True, overlap=True
        )
        return logits, counts

    def _make_whole_steps(self) -> dict[str, WholeStep]:
        """For steps of one row, or of a few, if the model is such."""
        if why_not_one_kernel(self._model) is not None:
            return {}
        layers, body = self._layers, self._model.model
        if not self._sparse:  # larger batches read W_down by rows of K
            layers = [replace(layer, ffn=_by_neurons(layer.ffn)) for layer in layers]
        make = partial(
            WholeStep,
            self.kernels,
            self._limits,
            _step_sizes(self._model),
            layers,
            self._model.get_input_embeddings().weight,
            body.norm.weight,
            self._model.lm_head.weight,
            self._rotary,
            self._eps,
        )
        sparse = {"one kernel": make(sparse=True)} if self._sparse else {}
        return sparse | {"one dense kernel": make(sparse=False)}

    def _linear(
        self, x: Tensor, linear: Linear, residual: Tensor | None = None, *, ahead: bool = False
    ) -> Tensor:
        how = {"residual": residual, "ahead": ahead, "overlap": True}
        return few_linear(self.kernels, self._limits, x, linear.weight, linear.bias, **how)

    def _plan(self, B: int, width: int) -> AttendPlan:
        if (B, width) not in self._plans:
            config, D = self._model.config, _head_dim(self._model)
            heads = config.num_attention_heads, config.num_key_value_heads
            self._plans[B, width] = plan_attend(B, *heads, D, width * PAGE, self._limits.num_sms)
        return self._plans[B, width]

    def _layer(self, layer: nn.Module, keys: Tensor, values: Tensor) -> DecoderLayer:
        attention = layer.self_attn
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return DecoderLayer(
            layer.input_layernorm.weight,
            _qkv(attention),
            AttendLayer(
                keys,
                values,
                attention.scaling,
                _window(self._model, attention.layer_idx),
                None if q_norm is None else q_norm.weight,
                None if k_norm is None else k_norm.weight,
                self._eps,
            ),
            Linear(attention.o_proj.weight, attention.o_proj.bias),
            layer.post_attention_layernorm.weight,
            self._ffn_of(layer.mlp),
        )

    def _ffn_of(self, mlp: nn.Module) -> FFN:
        weight = mlp.down_proj.weight
        weight.data = by_rows_of_neurons(weight.data) if self._sparse else weight.data.contiguous()
        gate, up = _gate_and_up(mlp)
        return FFN(
            gate.weight,
            up.weight,
            weight.t() if self._sparse else weight,
            gate.bias,
            up.bias,
            mlp.down_proj.bias,
        )


def _by_neurons(ffn: FFN) -> FFN:
    return replace(ffn, w_down=ffn.w_down.t().contiguous())


def why_not_one_kernel(model: PreTrainedModel) -> str | None:
    """None if steps of one row are one launch, else why they are many."""
    layers = range(model.config.num_hidden_layers)
    if len({_window(model, i) for i in layers}) > 1:
        return "a step in one kernel has the same window in all layers"
    if model.lm_head.bias is not None:
        return "a step in one kernel has no bias of the LM head"
    if not takes_hopper_kernels(model.device.index):
        return "a step in one kernel is for Hopper, and not with TWELL_PORTABLE=1"
    return why_no_whole_step(_step_sizes(model), device_limits(model.device.index))


def _step_sizes(model: PreTrainedModel) -> StepSizes:
    config = model.config
    return StepSizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        _head_dim(model),
        config.vocab_size,
    )


def _qkv(attention: nn.Module) -> Linear:
    if hasattr(attention, "qkv_proj"):
        return Linear(attention.qkv_proj.weight, attention.qkv_proj.bias)
    return _put_together([attention.q_proj, attention.k_proj, attention.v_proj])


def _gate_and_up(mlp: nn.Module) -> tuple[Linear, Linear]:
    if not hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_proj, mlp.up_proj
        return Linear(gate.weight, gate.bias), Linear(up.weight, up.bias)
    fused = mlp.gate_up_proj
    biases = (None, None) if fused.bias is None else fused.bias.chunk(2)
    gate, up = (Linear(*of) for of in zip(fused.weight.chunk(2), biases, strict=True))
    return gate, up


def _put_together(linears: list[nn.Linear]) -> Linear:
    """The weights of several layers in one, of which they become parts."""
    parts = [linear.out_features for linear in linears]
    whole = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, whole.split(parts), strict=True):
        linear.weight.data = part
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return Linear(whole, bias)


def _put_over_twell(model: PreTrainedModel) -> None:
    """Let prompts go through TwELL's kernels, where the checkpoint says how."""
    twell: Mapping[str, Any] | None = getattr(model.config, "twell", None)
    if twell and not _is_over_twell(model):
        put_over_twell(model, twell)
        use_kernels(model, own_kernels())


def _is_over_twell(model: PreTrainedModel) -> bool:
    return any(getattr(ffn, "twell_sources", "") for ffn in gated_ffns(model))


def _head_dim(model: PreTrainedModel) -> int:
    return model.model.layers[0].self_attn.head_dim


def _window(model: PreTrainedModel, layer_idx: int) -> int | None:
    kinds = getattr(model.config, "layer_types", None)
    if kinds and kinds[layer_idx] != "sliding_attention":
        return None
    if getattr(model.config, "use_sliding_window", True):
        return getattr(model.config, "sliding_window", None)
    return None


def _why_not(model: PreTrainedModel) -> str | None:
    name, config = type(model).__name__, model.config
    if (said := HFDecoder.why_not(model)) is not None:
        return said
    if model.device.type != "cuda" or torch.version.cuda is None:
        return "the decode kernels need an NVIDIA GPU"
    if other := {parameter.dtype for parameter in model.parameters()} - {torch.bfloat16}:
        return f"the decode kernels take bf16, not {str(other.pop()).removeprefix('torch.')}"
    if config.model_type not in _FAMILIES:
        return f"the decode kernels know {', '.join(_FAMILIES)}, not {config.model_type}"
    limits = device_limits(model.device.index)
    if limits.capability < (8, 0):
        return "the decode kernels need compute capability 8.0 or newer"
    if said := what_is_missing():
        return said
    if said := why_not_attend(
        config.num_attention_heads, config.num_key_value_heads, _head_dim(model)
    ):
        return said
    if (size := 2 * model.model.rotary_emb.inv_freq.numel()) != _head_dim(model):
        said = f"{name} {size} of {_head_dim(model)} columns"
        return f"the attention kernel turns whole heads by their positions, {said}"
    if said := why_no_norm(config.hidden_size):
        return said
    if config.hidden_size % 64 or config.intermediate_size % 8 or config.vocab_size % 8:
        return f"{name}'s sizes are not multiples of 64 (hidden) and 8 (neurons, vocabulary)"
    if not _most_rows(model):
        return "the decode kernels need more shared memory than this GPU has"
    return _why_not_layers(model) or _why_no_kernels(model)


def _most_rows(model: PreTrainedModel) -> int:
    """How many rows the kernels take in one step here; 0: none."""
    N, limits = model.config.intermediate_size, device_limits(model.device.index)
    taken = (B for B in _BATCHES if takes_few(B, N, limits) and takes_few_dense(B, limits))
    return max(taken, default=0)


def _why_no_kernels(model: PreTrainedModel) -> str | None:
    """None if all that a step launches is compiled and loaded, else why it is not."""
    config, index = model.config, model.device.index
    limits = device_limits(index)
    heads = config.num_attention_heads, config.num_key_value_heads, _head_dim(model)
    attention = plan_attend(1, *heads, PAGE, limits.num_sms).entry
    tokens = range(1, _most_rows(model) + 1)
    few = {name for M in tokens for name in (*few_kernels(M, limits), *few_gated_kernels(M))}
    others = ["embed_norm", "rms_norm", "choose", attention]
    if why_not_one_kernel(model) is None:
        sizes = _step_sizes(model)
        others += [sizes.entry(sparse) for sparse in (True, False)]
        if most_rows_at_once(sizes, limits, sparse=True) > 1:
            others.append(sizes.rows_entry)
    try:
        kernels_for(own_kernels(), index).prepare((*others, *sorted(few)))
    except KernelError as error:
        return str(error)
    return None


def _why_not_layers(model: PreTrainedModel) -> str | None:
    name = type(model).__name__
    head, embeddings = model.lm_head, model.model.embed_tokens
    if not (is_plain(head, nn.Linear) and is_plain(embeddings, nn.Embedding)):
        return f"the embeddings or the LM head of {name} are not plain layers"
    for layer in model.model.layers:
        parts = {part for part, module in layer.named_children() if type(module) is not nn.Dropout}
        if parts != _LAYER_PARTS:
            return f"the layers of {name} have other parts than the decode kernels know"
        if not _is_relu(getattr(layer.mlp, activation_name(layer.mlp))):
            return f"the FFNs of {name} are not ReLU"
        for part, linear in layer.named_modules():
            if linear._forward_hooks or linear._forward_pre_hooks:
                return f"{part or 'a layer'} of {name} has hooks, which no step would call"
            if not hasattr(linear, "out_features"):
                continue
            if not is_plain(linear, nn.Linear):
                what = type(linear).__name__
                return f"{part} of {name} is not a plain linear layer ({what})"
            if linear.in_features % 64 and part != "mlp.down_proj":
                return f"{part} of {name} has {linear.in_features} inputs, no multiple of 64"
    return None


def _is_relu(activation: nn.Module) -> bool:
    probe = torch.tensor([-1.0, 0.0, 2.0, 100.0])
    return torch.equal(activation(probe), torch.relu(probe))
