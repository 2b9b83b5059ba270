"""The last layer of a model: whether a draft head can be like it, and the head that begins so."""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from twellctl.bundle.twell_model import activation_of, is_plain
from twellctl.heads.head import DraftHead, HeadSizes
from twellctl.models import families
from twellctl.models.defaults import LONGEST, context_of

_SPREAD = 0.02 / math.sqrt(2)  # of what `join` begins with beside the state
_Q_K_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {"norm_attention": "input_layernorm", "norm_ffn": "post_attention_layernorm"}


def why_no_head(model: PreTrainedModel) -> str | None:
    """None if a draft head can draft for `model`, whose weights may be on no device; else a
    sentence."""
    name, config = type(model).__name__, model.config
    if config.model_type not in families.FAMILIES:
        return f"draft heads do not know the family {config.model_type}"
    layer = model.model.layers[-1]
    norms = families.norms_of(layer)
    if norms is None or norms.ffn is None or norms.attention is None:
        return f"the layers of {name} have other parts than Llama's"
    if norms.after_attention is not None or norms.after_ffn is not None:
        return f"the layers of {name} have norms behind attention and FFN"
    attention = layer.self_attn
    scale = getattr(attention, "scaling", attention.head_dim**-0.5)
    has_scales = families.scales_of(model) != families.Scales(config.rms_norm_eps)
    if has_scales or not math.isclose(scale, attention.head_dim**-0.5, rel_tol=1e-6):
        return f"{name} scales or caps what it computes"
    if not is_plain(model.lm_head, nn.Linear) or model.lm_head.bias is not None:
        return f"the LM head of {name} is more than a matrix"
    if not is_plain(model.get_input_embeddings(), nn.Embedding):
        return f"the embeddings of {name} are not plain ones"
    if families.turned_by(model, layer) is None:
        return f"the last layer of {name} has no rotary positions"
    if families.num_turned(model) != {attention.head_dim}:
        return f"{name} turns parts of its heads alone"
    window = families.window_of(model, attention.layer_idx)
    context = context_of(config.to_dict()) or LONGEST
    if window is not None and window < context:
        return f"the last layer of {name} sees {window} tokens of {context}"
    return _why_no_linears(name, layer)


def _why_no_linears(name: str, layer: nn.Module) -> str | None:
    parts = dict(layer.named_modules())
    for part in _LINEARS.values():
        if part not in parts or not is_plain(parts[part], nn.Linear):
            return f"the last layer of {name} has no plain linear layer {part}"
    if any(parts[_LINEARS[part]].bias is not None for part in ("gate", "up", "down")):
        return f"the FFNs of {name} have biases"
    if len({parts[_LINEARS[part]].bias is None for part in "qkv"}) > 1:
        return f"some of q, k and v of {name} have a bias, some have none"
    if not is_plain(activation_of(layer.mlp), type(ACT2FN["silu"])):
        return f"the FFNs of {name} are not SiLU"
    D = layer.self_attn.head_dim
    over_heads = [parts.get(part) for part in _Q_K_NORMS.values()]
    if any(over_heads) and not all(norm and norm.weight.shape == (D,) for norm in over_heads):
        return f"the norms of q and k of {name} are not over each head"
    return None


def sizes_of(model: PreTrainedModel, num_tokens: int) -> HeadSizes:
    """Of a head for `model`, for which there can be one, that can guess so many tokens."""
    layer, config = model.model.layers[-1], model.config
    attention, D = layer.self_attn, layer.self_attn.head_dim
    return HeadSizes(
        K=config.hidden_size,
        N=layer.mlp.gate_proj.out_features,
        H=attention.q_proj.out_features // D,
        Hkv=attention.k_proj.out_features // D,
        D=D,
        V=num_tokens,
        eps=config.rms_norm_eps,
        qkv_bias=attention.q_proj.bias is not None,
        out_bias=attention.o_proj.bias is not None,
        q_k_norms=hasattr(attention, "q_norm"),
        lower=lower_layers(len(model.model.layers)),
    )


def lower_layers(num_layers: int) -> tuple[int, ...]:
    """Those that a head reads beside the state, of a model with so many: near the first one, in the
    middle, near the last one."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)}))


@torch.no_grad()
def begun_head(model: PreTrainedModel, tokens: Tensor, seed: int) -> DraftHead:
    """A head that guesses `tokens` `[V]`, ascending: float32, on the model's device.

    It is the model's last layer, which reads the state before, next to nothing of the embedding and
    nothing of lower layers.
    """
    head = DraftHead(sizes_of(model, len(tokens))).to(model.device)
    same = _LINEARS | _NORMS | (_Q_K_NORMS if head.sizes.q_k_norms else {})
    layer = model.model.layers[-1]
    for own, part in same.items():
        head.get_submodule(own).load_state_dict(layer.get_submodule(part).state_dict())
    head.norm.load_state_dict(model.model.norm.state_dict())
    drawn = torch.empty(head.join.weight.shape)
    drawn.normal_(0, _SPREAD, generator=torch.Generator().manual_seed(seed))
    drawn[:, head.sizes.K :] += torch.eye(head.sizes.K)
    head.join.weight.copy_(drawn)
    if head.sizes.lower:
        head.merge.weight.zero_()
        head.merge.weight[:, -head.sizes.K :] += torch.eye(head.sizes.K, device=model.device)
    head.tokens.copy_(tokens)
    return head
