"""What models do around attention and FFNs that Llama does not, for kernels and draft heads."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# in transformers' order of parts: q, k, v, heads turned by halves, o; gate, up, down
FAMILIES = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "phi3",
    "seed_oss",
    "cwm",
    "granite",
    "gemma",
    "gemma2",
    "gemma3_text",
    "vaultgemma",
    "smollm3",
    "olmo2",
    "olmo3",
    "exaone4",
)

_LLAMA = "input_layernorm", None, "post_attention_layernorm", None
_GEMMA = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_OLMO = None, "post_attention_layernorm", None, "post_feedforward_layernorm"
_VAULT = "input_layernorm", None, "pre_feedforward_layernorm", None


@dataclass(frozen=True)
class Norms:
    """The norms of a layer, as weights that are multiplied with: before and after attention and
    FFN; None where there is none."""

    attention: Tensor | None
    after_attention: Tensor | None
    ffn: Tensor | None
    after_ffn: Tensor | None


def norms_of(layer: nn.Module) -> Norms | None:
    """None if the parts of the layer are others than the kernels know."""
    parts = {part for part, module in layer.named_children() if type(module) is not nn.Dropout}
    for names in (_LLAMA, _GEMMA, _OLMO, _VAULT):
        if parts == {"self_attn", "mlp", *names} - {None}:
            return Norms(*(name and norm_weight(getattr(layer, name)) for name in names))
    return None


def norm_weight(norm: nn.Module) -> Tensor:
    """What a norm multiplies by: of Gemma its weight and 1."""
    weight = norm.weight.detach()
    if "Gemma" in type(norm).__name__:
        return (1 + weight.float()).to(weight.dtype)
    return weight


@dataclass(frozen=True)
class Scales:
    """Numbers that a model multiplies by, and those that cap what it computes."""

    eps: float  # of norms
    embeddings: float = 1.0
    scores_cap: float | None = None
    logits: float = 1.0
    logits_cap: float | None = None

    def of_model(self, logits: Tensor) -> Tensor:
        """`logits` as the model has them, in place."""
        if self.logits != 1:
            logits.mul_(self.logits)
        if self.logits_cap is not None:
            logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits


def scales_of(model: PreTrainedModel) -> Scales:
    """The numbers of `model`.

    Granite multiplies what its blocks compute by a number before it adds that to the residual
    stream. Here the stream is divided by this number instead: then blocks need no factor, and norms
    give the same if eps is divided by its square.
    """
    config = model.config
    residual = getattr(config, "residual_multiplier", 1.0)
    embeddings = getattr(config, "embedding_multiplier", 1.0)
    if "gemma" in config.model_type:
        embeddings = torch.tensor(config.hidden_size**0.5, dtype=model.dtype).item()
    # transformers has no other attention that caps scores
    caps = config._attn_implementation == "eager"
    return Scales(
        config.rms_norm_eps / residual**2,
        embeddings / residual,
        getattr(config, "attn_logit_softcapping", None) if caps else None,
        1 / getattr(config, "logits_scaling", 1.0),
        getattr(config, "final_logit_softcapping", None),
    )


def scaled_embeddings(embeddings: nn.Module) -> bool:
    """Whether they are Gemma's, with a forward that multiplies."""
    return type(embeddings).__name__.endswith("TextScaledWordEmbedding")


def turned_by(model: PreTrainedModel, layer: nn.Module) -> str | None:
    """The kind of positions of a layer; None: its heads are not turned."""
    attention, config = layer.self_attn, model.config
    kinds = getattr(config, "layer_types", None)
    kind = kinds[attention.layer_idx] if kinds else "full_attention"
    whole = config.model_type == "exaone4" and config.sliding_window and kind == "full_attention"
    return None if whole or not getattr(attention, "use_rope", True) else kind


def num_turned(model: PreTrainedModel) -> set[int]:
    """How many columns of a head are turned, in layers where any are."""
    device = next(model.model.rotary_emb.buffers()).device
    like, positions = torch.empty(1, device=device), torch.zeros(1, 1, device=device)
    kinds = {turned_by(model, layer) for layer in model.model.layers}
    rotaries = [rotary_of(model, kind) for kind in kinds if kind is not None]
    return {rotary(like, positions)[0].shape[-1] for rotary in rotaries}


def window_of(model: PreTrainedModel, layer_idx: int) -> int | None:
    """How many tokens a layer sees, its own among them; None: all before it."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds and kinds[layer_idx] != "sliding_attention":
        return None
    if getattr(model.config, "use_sliding_window", True):
        return getattr(model.config, "sliding_window", None)
    return None


def rotary_of(model: PreTrainedModel, kind: str) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The rotary embedding of such layers, of (anything, positions)."""
    rotary = model.model.rotary_emb
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    return partial(rotary, layer_type=kind) if by_kind else rotary
