"""Weights in int4 as the kernel of a whole step takes them: the same codes and scales come back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bench import random_model
from twellctl.bench.random_model import make_model, open_shape, round_to_int4
from twellctl.bundle.twell_int4 import expand
from twellctl.bundle.twell_model import gated_ffns, weights_of
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_rounded_linear import weight_of
from twellctl.bundle.twell_weights import plain_weight
from twellctl.decoding.int4_layers import int4_layers
from twellctl.decoding.step_int4 import by_quads, down_by_neurons, from_neurons, from_quads
from twellctl.decoding.whole_step import DecoderLayer, StepSizes
from twellctl.models.families import Norms
from twellctl.models.linear_map import own_neurons

H200 = Limits(132, 232448, (9, 0))
SIZES = StepSizes(1536, 896, 12, 128, 512, "int4")


def drawn(N: int, K: int, group: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8)
    return codes, torch.randn(N, K // group).bfloat16()


@pytest.mark.parametrize(
    ("K", "stored", "group"), [(1536, 64, 64), (2048, 128, 64), (3584, 128, 128)]
)
def test_rows_come_back(K, stored, group):
    codes, scales = drawn(36, K, stored)
    again, of_groups = from_quads(by_quads(codes, scales, group), K, group)
    assert torch.equal(again, codes)
    assert torch.equal(of_groups, scales.repeat_interleave(stored // group, 1))


def test_down_comes_back():
    codes, scales = drawn(1536, 640, 64)
    again, of_groups = from_neurons(*down_by_neurons(codes, scales, 64))
    assert torch.equal(again, codes)
    assert torch.equal(of_groups, scales)


def test_where_a_code_lies():
    """As step_codes.cuh says: the even column above, blocks of 64 columns by the row."""
    codes = torch.zeros(4, 1536, dtype=torch.int8)
    codes[3, 64 * 5 + 6], codes[3, 64 * 5 + 7] = -8, 7
    laid = by_quads(codes, torch.ones(4, 24).bfloat16(), 64)
    rows = laid[0, : 4 * 768].view(4, 768)
    assert rows[3, (5 ^ 3) * 32 + 3].item() == 0x87
    assert rows.count_nonzero() == 1
    assert (laid[0, 4 * 768 :].view(torch.bfloat16) == 1).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> PreTrainedModel:
    """Of one layer, in int4, with a map."""
    path = tmp_path_factory.mktemp("int4") / "config.json"
    path.write_text(
        '{"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 896,'
        ' "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 512,'
        ' "num_hidden_layers": 1, "max_position_embeddings": 256, "hidden_act": "relu"}'
    )
    shape = open_shape(str(path), None, context=64)
    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "SET_TOKENS", 64)  # how much fires is not looked at
        made = make_model(shape, 0.2, dtype=torch.bfloat16, generator=generator, mapped=128)
    round_to_int4(made)
    return made


def layer_of(module: nn.Module) -> DecoderLayer:
    own = module.self_attn
    parts = own.q_proj, own.k_proj, own.v_proj
    qkv = plain_weight(*(torch.cat([getattr(p, of) for p in parts]) for of in ("weight", "bias")))
    norms = Norms(None, None, None, None)
    return DecoderLayer(norms, qkv, None, weight_of(own.o_proj), weights_of(module.mlp))


def test_the_layers_of_a_model(model):
    (module,) = model.model.layers
    given = layer_of(module)
    (layer,) = int4_layers([module], [given], SIZES, H200)
    for laid, plain in (
        (layer.qkv, given.qkv),
        (layer.out, given.out),
        (layer.ffn.gate, given.ffn.gate),
        (layer.ffn.up, given.ffn.up),
    ):
        assert torch.equal(expand(*from_quads(laid.values, 1536, 64)), plain.values)
        assert laid.bias is plain.bias
    down = from_neurons(layer.ffn.by_neurons, layer.ffn.down.scales)
    assert torch.equal(expand(*down), given.ffn.down.values)
    assert own_neurons(gated_ffns(model)[0]) == 768


def test_what_is_not_taken(model):
    (module,) = model.model.layers
    given = layer_of(module)
    assert int4_layers([module], [given], replace(SIZES, K=1024), H200) is None
    up = module.mlp.up_proj
    before = up.weight[0, 0].item()
    with torch.no_grad():
        up.weight[0, 0] += 1
        assert int4_layers([module], [given], SIZES, H200) is None
        up.weight[0, 0] = before
    assert int4_layers([module], [given], SIZES, H200) is not None
    del up.packed
    assert int4_layers([module], [given], SIZES, H200) is None
