"""Whole models of random weights whose density is known beforehand, in the shape of a config.json.

The first channels of every embedding, one in 64, are 1 and nothing writes to them. Their columns of
each gate are set, layer by layer, to where the neuron fires for the density asked of some random
tokens. So every neuron of every layer fires equally often, for each token anew; and no column of a
gate stands out, which a copy in few bits would pay for.

What would make tokens alike is kept small at any width and depth: attention adds a fixed share to
the variance of a token, over all layers together, and it is sharp, so that tokens take from
different places. The LM head has weights of its own even where the config ties it to the
embeddings: else the likeliest token would be the last one again. A step reads as many bytes.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twellctl.bench.settings import LLAMA_LAYERS
from twellctl.bundle.twell_int4 import expand, keep_packed, pack
from twellctl.bundle.twell_model import gated_ffns, weights_of_gate_and_up
from twellctl.bundle.twell_spec import step_group
from twellctl.bundle.twell_synthetic import BIAS_STD, FULL
from twellctl.errors import TwellError
from twellctl.fitting.grid import Grid
from twellctl.models.checkpoint import open_config_file
from twellctl.models.checks import refuse_quantised, refuse_unsupported
from twellctl.models.loading import quiet_transformers, without_weights

BUILT_IN = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": LLAMA_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
}
PLAIN = {
    "hidden_act": "relu",
    "hidden_activation": "relu",  # as Gemma 2 and 3 call it
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
SHARPNESS = 2.0  # standard deviation of a head's scores
# what is added to a token's variance, which is 1: by attention in all layers, by each FFN
ATTENTION_SHARE, FFN_SHARE = 0.4, 0.002
SET_TOKENS, SET_LENGTH = 4096, 1024  # by which the gates are set
WORKSPACE = 4 << 30  # bytes that are kept free, to be sure
_DRAWN = {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
_DRAWN |= {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class Shape:
    """A model to make: its config, complete, and how many weights a layer and all else have."""

    name: str
    config: dict[str, Any]
    layer_weights: int
    other_weights: int

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def context(self) -> int:
        return self.config["max_position_embeddings"]

    @property
    def described(self) -> dict[str, Any]:
        """Of the JSON: what sets it apart from others of its sizes."""
        heads, kv_heads = (self.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
        return {"heads": heads, "kv_heads": kv_heads, "vocabulary": self.vocabulary}

    def require_memory(self, free: float, *, quantize: str | None = None) -> None:
        """`TwellError` unless `free` bytes hold it in bf16; it tells how many layers would fit.

        W_down may be held in a second layout, too; with `quantize` so are all weights, a byte each.
        """
        layer = 2 * (
            self.layer_weights + self.config["hidden_size"] * self.config["intermediate_size"]
        )
        layer += self.layer_weights if quantize else 0
        fixed = 2 * self.other_weights + WORKSPACE
        if fixed + self.layers * layer <= free:
            return
        fit = max(0, int((free - fixed) // layer))
        advice = f"give --layers {fit} or fewer" if fit else "take a smaller model"
        raise TwellError(
            f"{self.name} with {self.layers} layers needs "
            f"{(fixed + self.layers * layer) / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free on "
            f"this GPU: {advice}"
        )


def open_shape(config: str | None, layers: int | None, *, context: int, mapped: int = 0) -> Shape:
    """The shape that the config.json `config` describes, a file or a folder with one; as ReLU.

    None is a Llama of 1.5B. `layers` are taken in the place of the config's. The model's context is
    cut to `context` tokens, which tables and caches are made for. Its FFNs have `mapped` neurons
    more. `TwellError` names what is wrong.
    """
    name = "random Llama"
    given: dict[str, Any] = BUILT_IN
    if config is not None:
        name, given = config, open_config_file(config)[1]
        given.pop("twell", None)  # of other weights
        refuse_quantised(name, given)
        refuse_unsupported(name, given)
    given = given | PLAIN
    if layers is not None:
        given["num_hidden_layers"] = layers
        if given.get("layer_types"):
            given["layer_types"] = given["layer_types"][:layers]
    if mapped:
        given["intermediate_size"] += mapped
    complete, model = without_weights(name, given)
    complete["max_position_embeddings"] = min(complete["max_position_embeddings"], context)
    for weight in (n for n, p in model.named_parameters() if p.dim() > 1):
        if weight.split(".")[-2] not in _DRAWN:
            raise TwellError(
                f"{name} ({complete['model_type']}) has {weight}, which bench cannot draw: take a "
                "config of Llama, Mistral, Phi3, Qwen2 or Qwen3"
            )
    if len(gated_ffns(model)) != complete["num_hidden_layers"]:
        raise TwellError(f"{name} ({complete['model_type']}) has no gated FFN in each layer")
    of_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    in_all = sum(p.numel() for p in model.parameters())
    return Shape(name, complete, of_layer, in_all - complete["num_hidden_layers"] * of_layer)


@torch.no_grad()
def make_model(
    shape: Shape, density: float, *, dtype: torch.dtype, generator: torch.Generator, mapped: int = 0
) -> PreTrainedModel:
    """The stock model of that shape on the generator's device, drawn there, in eval mode.

    The last `mapped` neurons of each FFN share a gate, and always fire.
    Its likeliest token depends on all that came before as a hash does, so a text does not loop.
    """
    config = AutoConfig.for_model(**shape.config)
    with quiet_transformers(), generator.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    stds = _stds(model, density)
    for name, parameter in model.named_parameters():
        *_, layer, kind = name.split(".")
        if layer in stds:
            std = stds[layer] if kind == "weight" else BIAS_STD
            parameter.normal_(0, std, generator=generator)
        elif layer == "q_norm":
            parameter.fill_(SHARPNESS)
    _keep_channels(model)
    length = min(SET_LENGTH, shape.context)
    ids = torch.randint(
        shape.vocabulary,
        (max(1, SET_TOKENS // length), length),
        generator=generator,
        device=generator.device,
    )
    _set_gates(model, ids, density, mapped)
    return model


@torch.no_grad()
def round_to_int4(model: PreTrainedModel) -> None:
    """Round the linear layers of the decoder layers to the nearest, in groups of the size that
    `convert --bits 4` takes."""
    linears = [m for m in model.model.modules() if type(m) is nn.Linear]
    group_size = step_group(model.config.hidden_size)
    while any(linear.in_features % group_size for linear in linears):
        group_size //= 2
    grid = Grid(group_size, model.dtype)
    for linear in linears:
        rounded = grid.nearest(linear.weight.float())
        linear.weight.copy_(expand(rounded.codes, rounded.scales))
        keep_packed(linear, pack(rounded.codes), rounded.scales)


def _stds(model: PreTrainedModel, density: float) -> dict[str, float]:
    """By the name of a linear layer: the standard deviation of its weights."""
    config, attention = model.config, model.model.layers[0].self_attn
    K, N, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    unit = K**-0.5
    heads = attention.o_proj.in_features
    stds = dict.fromkeys(_DRAWN, unit) | {"embed_tokens": 1.0}
    # a token's scores have the product of both as their standard deviation
    stds |= {"q_proj": SHARPNESS * unit, "qkv_proj": SHARPNESS**0.5 * unit}
    values = SHARPNESS**0.5 if hasattr(attention, "qkv_proj") else 1.0
    stds["o_proj"] = (ATTENTION_SHARE / (layers * heads)) ** 0.5 / values
    stds["down_proj"] = (FFN_SHARE / (N * _relu_squared(density))) ** 0.5
    return stds


def _relu_squared(density: float) -> float:
    """The mean square of `relu(gate)` where gates are normal and fire at `density`."""
    if density >= 1:
        return FULL**2 + 1
    normal = NormalDist()
    shift = normal.inv_cdf(density)
    return (shift**2 + 1) * density + shift * normal.pdf(shift)


def _num_kept(hidden_size: int) -> int:
    """Channels that are 1."""
    return max(1, hidden_size // 64)


def _keep_channels(model: PreTrainedModel) -> None:
    """They are 1 for every token and stay so; the LM head does not hear of them."""
    num = _num_kept(model.config.hidden_size)
    model.model.embed_tokens.weight[:, :num] = 1
    model.lm_head.weight[:, :num] = 0
    for layer, ffn in zip(model.model.layers, gated_ffns(model), strict=True):
        for linear in (layer.self_attn.o_proj, ffn.down_proj):
            linear.weight[:num] = 0
            if linear.bias is not None:
                linear.bias[:num] = 0


def _set_gates(model: PreTrainedModel, ids: Tensor, density: float, mapped: int) -> None:
    """Let each neuron fire for `density` of the tokens `ids` `[B, S]`, the first layer first, and
    the last `mapped` for all of them."""

    def set_gate(ffn: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x, of_gate = inputs[0].flatten(0, -2), weights_of_gate_and_up(ffn)[0]
        weight, bias = of_gate.values, of_gate.bias
        columns = weight[:, : _num_kept(x.shape[1])]
        if density >= 1:
            columns.fill_(FULL / columns.shape[1])
            return
        columns.zero_()
        gate = F.linear(weight, x).float()  # [N, M]
        if bias is not None:
            gate += bias[:, None]
        # what they must be for a gate to be 0
        needed = -gate / x[:, : columns.shape[1]].float().sum(1)
        columns.copy_(needed.kthvalue(max(1, round(density * len(x)))).values[:, None])
        if mapped:
            weight[-mapped:] = 0
            columns[-mapped:] = FULL / columns.shape[1]
            if bias is not None:
                bias[-mapped:] = 0

    hooks = [ffn.register_forward_pre_hook(set_gate) for ffn in gated_ffns(model)]
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
