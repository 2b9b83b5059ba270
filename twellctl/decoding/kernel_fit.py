"""Whether a model can go over the decode kernels here, and what it is to them.

Each `why_not` is None or a sentence.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from twellctl.bundle.twell_few import few_dense_kernels, few_kernels, takes_few, takes_few_dense
from twellctl.bundle.twell_launch import device_limits, kernels_for
from twellctl.bundle.twell_model import activation_of, gated_ffns, is_plain
from twellctl.bundle.twell_nvrtc import KernelError, what_is_missing
from twellctl.bundle.twell_reasons import takes_hopper_kernels
from twellctl.bundle.twell_rounded_linear import RoundedLinear, weight_of
from twellctl.bundle.twell_spec import KINDS, PAGE, few_entries
from twellctl.decoding.attention import head_width, plan_attend, why_not_attend
from twellctl.decoding.coded_linear import CODED, linears_of
from twellctl.decoding.few_ways import OWN_PRODUCTS
from twellctl.decoding.int4_layers import takes_int4
from twellctl.decoding.norms import why_no_norm
from twellctl.decoding.paged_cache import LayerShape
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.decoding.whole_step import StepSizes, why_no_whole_step
from twellctl.here.own_kernels import own_kernels
from twellctl.models import families

_ANY_INPUTS = {"mlp.down_proj", "self_attn.o_proj"}  # PyTorch's products take what ours do not
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_MOST_DENSE = 256  # rows of a step that is dense because its FFNs are not ReLU


@dataclass(frozen=True)
class Fit:
    """What a model that the decode kernels can drive is to them on its GPU."""

    sizes: StepSizes
    is_relu: bool  # all FFNs; those of another activation go densely
    is_silu: bool
    max_rows: int  # of a pass with one token a row
    at_once: int  # rows that the kernels of dense products take in one launch
    one_kernel: bool  # whether a pass over one token may be one launch
    screens: bool  # whether that may screen gates


def fit_of(model: PreTrainedModel) -> Fit:
    return Fit(
        step_sizes(model),
        is_relu(model),
        is_silu(model),
        most_rows(model),
        rows_at_once(model),
        why_not_one_kernel(model) is None,
        why_not_screened(model) is None,
    )


def why_not(model: PreTrainedModel) -> str | None:
    """None if the decode kernels can drive `model`, else what stands against it. Linear layers that
    are codes alone count as what they are once they are expanded."""
    name, config = type(model).__name__, model.config
    if (said := TorchDecoder.why_not(model)) is not None:
        return said
    if model.device.type != "cuda" or torch.version.cuda is None:
        return "the decode kernels need an NVIDIA GPU"
    rounded = [m.rounded for m in model.modules() if isinstance(m, RoundedLinear)]
    if any(getattr(weight.scales, "dtype", None) != torch.float32 for weight in rounded):
        return "the decode kernels take rounded weights with scales in float32"
    known = {id(part) for weight in rounded for part in (weight.values, weight.scales)}
    floats = (p for p in model.parameters() if p.is_floating_point() and id(p) not in known)
    dtypes = {parameter.dtype for parameter in floats}
    if other := dtypes - {torch.bfloat16}:
        return f"the decode kernels take bf16, not {str(other.pop()).removeprefix('torch.')}"
    if config.model_type not in families.FAMILIES:
        return f"the decode kernels do not know the family {config.model_type}"
    limits = device_limits(model.device.index)
    if limits.capability < (8, 0):
        return "the decode kernels need compute capability 8.0 or newer"
    if said := what_is_missing():
        return said
    if said := why_not_attend(
        config.num_attention_heads, config.num_key_value_heads, head_dim(model)
    ):
        return said
    if said := why_no_norm(config.hidden_size):
        return said
    if config.hidden_size % 64 or config.intermediate_size % 8:
        return f"{name}'s sizes are not multiples of 64 (hidden) and 8 (neurons)"
    if not most_rows(model):
        return "the decode kernels need more shared memory than this GPU has"
    return _why_not_layers(model) or _why_no_kernels(model)


def why_not_one_kernel(model: PreTrainedModel) -> str | None:
    """None if steps of one row are one launch, else why they are many."""
    if not (is_relu(model) or is_silu(model)):
        return "a step in one kernel has ReLU or SiLU"
    layers = enumerate(model.model.layers)
    if len({(families.window_of(model, i), families.turned_by(model, of)) for i, of in layers}) > 1:
        return "a step in one kernel has the same window and positions in all layers"
    if not _is_like_llama(model):
        return "a step in one kernel has Llama's norms and heads"
    if model.lm_head.bias is not None:
        return "a step in one kernel has no bias of the LM head"
    if not takes_hopper_kernels(model.device.index):
        return "a step in one kernel is for Hopper"
    return why_no_whole_step(step_sizes(model), device_limits(model.device.index))


def why_not_coded(model: PreTrainedModel) -> str | None:
    """None if its layers are codes alone, and steps of one row are one launch over them."""
    layers = model.model.layers
    if not all(isinstance(linear, CODED) for linear in linears_of(layers)):
        return "the linear layers are more than codes of 4 bits"
    if said := why_not(model) or why_not_one_kernel(model):
        return said
    sizes = replace(step_sizes(model), kind="int4")
    if takes_int4(layers, sizes, device_limits(model.device.index)):
        return None
    return "a step in one kernel takes codes of other groups, or other sizes"


def why_not_screened(model: PreTrainedModel) -> str | None:
    """None if steps of one row may screen gates, else why they read them whole."""
    if not is_relu(model):
        return "gates of ReLU are screened"
    if model.dtype != torch.bfloat16 or weights_kind(model) != "bf16":
        return "gates are screened in bf16"
    return why_not_one_kernel(model)


def most_rows(model: PreTrainedModel) -> int:
    """How many rows a step may have here; 0: none."""
    if (B := rows_at_once(model)) >= OWN_PRODUCTS and not is_relu(model):
        return _MOST_DENSE
    N, limits = model.config.intermediate_size, device_limits(model.device.index)
    taken = (M for M in _BATCHES if M <= B and takes_few(M, N, limits, weights_kind(model)))
    return max(taken, default=0)


def rows_at_once(model: PreTrainedModel) -> int:
    """How many rows the kernels of dense products take in one launch here; 0: none."""
    how = device_limits(model.device.index), weights_kind(model)
    return max((B for B in _BATCHES if takes_few_dense(B, *how)), default=0)


def is_relu(model: PreTrainedModel) -> bool:
    """Whether all FFNs are ReLU; those of another activation go densely."""
    return all(_is_relu(activation_of(ffn)) for ffn in gated_ffns(model))


def is_silu(model: PreTrainedModel) -> bool:
    """Whether all FFNs are SiLU."""
    return all(is_plain(activation_of(ffn), type(ACT2FN["silu"])) for ffn in gated_ffns(model))


def step_sizes(model: PreTrainedModel) -> StepSizes:
    config = model.config
    return StepSizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        head_dim(model),
        config.vocab_size,
        weights_kind(model),
    )


def weights_kind(model: PreTrainedModel) -> str:
    """The kind of weights of the layers (twell_spec.KINDS)."""
    return _kind_of(model.model.layers[0].self_attn.o_proj)


def head_dim(model: PreTrainedModel) -> int:
    return model.model.layers[0].self_attn.head_dim


def cached_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer caches, in heads as wide as the kernels take them."""
    config, width = model.config, head_width(head_dim(model))
    shape = LayerShape(config.num_key_value_heads, width, width, model.dtype)
    return [shape] * config.num_hidden_layers


def _why_no_kernels(model: PreTrainedModel) -> str | None:
    """None if all that a step launches is compiled and loaded, else why it is not."""
    config, index = model.config, model.device.index
    limits = device_limits(index)
    heads = config.num_attention_heads, config.num_key_value_heads, head_dim(model)
    attention = plan_attend(1, *heads, PAGE, limits.num_sms).entry
    kind = weights_kind(model)
    few = set(few_entries("few_linear", limits.capability, "bf16"))  # the LM head's
    if is_relu(model) or is_silu(model):
        few.update(few_dense_kernels(limits, kind))
    if is_relu(model):
        few.update(few_kernels(limits, kind))
    others = ["embed_norm", "rms_norm", "add_norm", "choose", "store_keys", attention]
    if why_not_one_kernel(model) is None:
        sizes = step_sizes(model)
        others += [sizes.entry(form) for form in ("sparse", "dense")]
        if why_not_screened(model) is None:
            others.append(sizes.entry("screened"))
    try:
        kernels_for(own_kernels(), index).prepare((*others, *sorted(few)))
    except KernelError as error:
        return str(error)
    return None


def _why_not_layers(model: PreTrainedModel) -> str | None:
    name = type(model).__name__
    head, embeddings = model.lm_head, model.model.embed_tokens
    kind = type(embeddings) if families.scaled_embeddings(embeddings) else nn.Embedding
    if not (is_plain(head, nn.Linear) and is_plain(embeddings, kind)):
        return f"the embeddings or the LM head of {name} are not plain layers"
    for layer in model.model.layers:
        if families.norms_of(layer) is None:
            return f"the layers of {name} have other parts than the decode kernels know"
        if weights_kind(model) != "bf16" and not _is_relu(activation_of(layer.mlp)):
            return f"the FFNs of {name} are rounded to {weights_kind(model)} and not ReLU"
        q_k_v = (getattr(layer.self_attn, f"{of}_proj", None) for of in "qkv")
        if len({linear.bias is None for linear in q_k_v if linear is not None}) > 1:
            return f"some of q, k and v of {name} have a bias, some have none"
        for part, linear in layer.named_modules():
            if linear._forward_hooks or linear._forward_pre_hooks:
                return f"{part or 'a layer'} of {name} has hooks, which no step would call"
            if not hasattr(linear, "out_features"):
                continue
            is_rounded = is_plain(linear, RoundedLinear)
            if not (is_plain(linear, nn.Linear) or is_rounded or isinstance(linear, CODED)):
                what = type(linear).__name__
                return f"{part} of {name} is not a plain linear layer ({what})"
            if (kind := _kind_of(linear)) != weights_kind(model):
                return f"{part} of {name} is {kind}, other layers are {weights_kind(model)}"
            step = KINDS[kind].step
            if linear.in_features % step and (is_rounded or part not in _ANY_INPUTS):
                return f"{part} of {name} has {linear.in_features} inputs, no multiple of {step}"
    return None


def _kind_of(linear: nn.Module) -> str:
    return "bf16" if isinstance(linear, CODED) else weight_of(linear).kind


def _is_like_llama(model: PreTrainedModel) -> bool:
    norms = [families.norms_of(layer) for layer in model.model.layers]
    others = [
        of is None or of.after_attention is not None or of.after_ffn is not None for of in norms
    ]
    capped = families.scales_of(model).scores_cap is not None
    return not any(others) and not capped and families.num_turned(model) == {head_dim(model)}


def _is_relu(activation: nn.Module) -> bool:
    return is_plain(activation, nn.ReLU)
