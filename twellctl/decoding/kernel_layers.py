"""How a model's layers lie for our own kernels (kernel_decoder.py): a copy of the modules for each
decoder, and of each layer what the kernels take.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bundle.twell_model import (
    by_rows_of_neurons,
    gated_ffns,
    plan_ways,
    put_over_twell,
    use_kernels,
    weights_of,
)
from twellctl.bundle.twell_rounded_linear import weight_of
from twellctl.bundle.twell_spec import STEP_QUAD
from twellctl.bundle.twell_weights import FFN, Weight, joined, lay_together
from twellctl.decoding import attention
from twellctl.decoding.int4_layers import CodedLayer, names_of_qkv
from twellctl.decoding.kernel_fit import head_dim
from twellctl.decoding.paged_cache import PagedCache
from twellctl.decoding.whole_step import DecoderLayer
from twellctl.here.own_kernels import own_kernels
from twellctl.models.families import (
    norm_weight,
    norms_of,
    rotary_of,
    scales_of,
    turned_by,
    window_of,
)
from twellctl.models.loading import shared_copy


def own_copy(model: PreTrainedModel, *, sparse: bool, kind: str) -> PreTrainedModel:
    """A copy of the modules that shares all parameters, but that each W_down has a place of its own
    in the layout of the form. Where a sparse form lays it anew, the model's lies there too."""
    copied = shared_copy(model)
    for given, own in zip(model.model.layers, copied.model.layers, strict=True):
        weight, down = given.mlp.down_proj.weight, own.mlp.down_proj
        with torch.inference_mode(weight.is_inference()):
            laid = weight.data
            if kind == "bf16":
                laid = by_rows_of_neurons(laid) if sparse else laid.contiguous()
            down.weight = nn.Parameter(laid, requires_grad=False)
            if sparse:
                weight.data = laid
        if sparse and kind != "bf16":
            if given.mlp.down_proj.turned is None:
                given.mlp.down_proj.turn()
            down.turned = given.mlp.down_proj.turned
    twell: Mapping[str, Any] | None = getattr(model.config, "twell", None)
    if sparse and twell and not _is_over_twell(copied):
        put_over_twell(copied, twell)
        use_kernels(copied, own_kernels())
        plan_ways(copied)
    return copied


def decoder_layer(
    model: PreTrainedModel, layer: nn.Module, keys: Tensor, values: Tensor
) -> DecoderLayer:
    """Of `layer`, one of `model`, whose `keys` and `values` `[pages, Hkv, PAGE, head_width]` are
    cached. `ValueError` for a layer that the kernels do not know."""
    own = layer.self_attn
    weights = _qkv(own), weight_of(own.o_proj).detached(), _ffn_of(layer.mlp)
    return layer_over(weights, model, layer, keys, values)


def coded_layers(
    model: PreTrainedModel, coded: Sequence[CodedLayer], cache: PagedCache
) -> list[DecoderLayer]:
    """All layers of `model`, which are `coded`."""
    of_all = zip(coded, model.model.layers, cache.keys, cache.values, strict=True)
    return [layer_over(codes.weights, model, *given) for codes, *given in of_all]


def layer_over(
    weights: tuple[Weight, Weight, FFN],
    model: PreTrainedModel,
    layer: nn.Module,
    keys: Tensor,
    values: Tensor,
) -> DecoderLayer:
    """As `decoder_layer`; `weights` to q, k and v, to o and of the FFN."""
    own, norms = layer.self_attn, norms_of(layer)
    if norms is None:
        raise ValueError("the layer has other parts than the decode kernels know")
    q_norm, k_norm = _q_and_k_norms(own)
    D = head_dim(model)
    of_heads = q_norm is not None and len(q_norm) == D
    rest = 0, attention.head_width(D) - D
    attend = attention.AttendLayer(
        keys,
        values,
        own.scaling,
        window_of(model, own.layer_idx),
        F.pad(q_norm, rest) if of_heads else None,
        F.pad(k_norm, rest) if of_heads else None,
        eps=model.config.rms_norm_eps,
        cap=scales_of(model).scores_cap,
    )
    of_all_heads = None if of_heads or q_norm is None or k_norm is None else (q_norm, k_norm)
    qkv, out, ffn = weights
    return DecoderLayer(norms, qkv, attend, out, ffn, of_all_heads)


def rotary_of_layers(model: PreTrainedModel, reach: int) -> list[attention.Rotary]:
    """Of each layer, for positions below `reach`; those of layers of a kind are the same."""
    kinds = [turned_by(model, layer) for layer in model.model.layers]
    D = head_dim(model)
    made: dict[str | None, attention.Rotary] = {}
    for kind in set(kinds):
        if kind is None:
            made[kind] = attention.Rotary.none(reach, D, model.device)
        else:
            made[kind] = attention.rotary_tables(rotary_of(model, kind), reach, D, model.device)
    return [made[kind] for kind in kinds]


def pad_rows(weight: nn.Parameter) -> None:
    """Lay `weight` `[V, K]` so that more rows follow in memory, up to a multiple of STEP_QUAD."""
    V, K = weight.shape
    rows = -(-V // STEP_QUAD) * STEP_QUAD
    end = (weight.storage_offset() + rows * K) * weight.itemsize
    if weight.untyped_storage().nbytes() < end:
        with torch.inference_mode(weight.is_inference()):
            weight.data = F.pad(weight.data, (0, 0, 0, rows - V))[:V]


def _qkv(own: nn.Module) -> Weight:
    layers = [getattr(own, name) for name in names_of_qkv(own)]
    lay_together(*layers)
    return joined(*(weight_of(layer).detached() for layer in layers))


def _q_and_k_norms(own: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The weights of the norms of q and k, over each head or over all heads; both or none."""
    if getattr(own, "q_norm", None) is None or getattr(own, "k_norm", None) is None:
        return None, None
    return norm_weight(own.q_norm), norm_weight(own.k_norm)


def _ffn_of(mlp: nn.Module) -> FFN:
    ffn = weights_of(mlp)
    gate, up, down = (weight.detached() for weight in ffn.weights)
    return FFN(gate, up, down, ffn.turned)


def _is_over_twell(model: PreTrainedModel) -> bool:
    return any(getattr(ffn, "twell_sources", "") for ffn in gated_ffns(model))
