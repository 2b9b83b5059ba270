"""When a step is one kernel, and how that is launched, without a GPU."""

from dataclasses import replace

import pytest
import torch
from compiled import compile_claims
from ffns import ffn_by_neurons
from launched import Launches, assert_taken, bf16
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import (
    ENTRY_FILES,
    PAGE,
    REFINE,
    STEP_KINDS,
    few_entries,
    step_entry,
)
from twellctl.bundle.twell_weights import FFN, Weight, plain_weight
from twellctl.decoding import attention, norms
from twellctl.decoding.attention import AttendLayer, Rotary
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.families import Norms, Scales
from twellctl.decoding.rough_head import RoughHead
from twellctl.decoding.screened import Screen
from twellctl.decoding.step_int4 import by_quads, down_by_neurons
from twellctl.decoding.whole_step import (
    DecoderLayer,
    StepSizes,
    WholeStep,
    why_no_whole_step,
)

H200 = Limits(132, 232448, (9, 0))
SMALL = StepSizes(2048, 5632, 32, 64, 49152)
SCALES = Scales(1e-5)


class OneLaunch:
    """Stands for a KernelSet: keeps the launch of a step, and the names of those behind it."""

    def launch(self, *call, **how):
        if call[0].startswith("step_"):
            self.call, self.how, self.behind = call, how, []
        else:
            assert how == {"overlap": True}
            assert_taken(call[0], call[3])
            self.behind.append(call)


def fp8_layer(window: int | None) -> DecoderLayer:
    """As `make_layer`, over e4m3 weights."""

    def e4m3(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float8_e4m3fn)

    layer, N = make_layer(window), 64
    qkv = Weight("e4m3", e4m3(3072, 2048), torch.ones(3072, 1), bf16(3072))
    out = Weight("e4m3", e4m3(2048, 2048), torch.ones(2048, 1))
    scales = torch.ones(N), torch.ones(N), torch.ones(2048)
    biases = None, bf16(N), None
    ffn = ffn_by_neurons(*(e4m3(N, 2048) for _ in range(3)), *biases, *scales)
    return replace(layer, qkv=qkv, out=out, ffn=ffn)


def int4_layer(window: int | None) -> DecoderLayer:
    """As `make_layer`, over weights as step_int4.py lays them."""
    layer, N, group = make_layer(window), 64, 64

    def laid(*shape: int) -> Tensor:
        scales = torch.ones(shape[0], shape[1] // group).bfloat16()
        return by_quads(torch.zeros(shape, dtype=torch.int8), scales, group)

    turned, scales = down_by_neurons(
        torch.zeros(2048, N, dtype=torch.int8), torch.ones(2048, 1).bfloat16(), group
    )
    gate, up = (Weight("int4", laid(N, 2048), bias=bias) for bias in (None, bf16(N)))
    return replace(
        layer,
        qkv=Weight("int4", laid(3072, 2048), bias=bf16(3072)),
        out=Weight("int4", laid(2048, 2048)),
        ffn=FFN(gate, up, Weight("int4", turned, scales), turned),
    )


def make_layer(window: int | None) -> DecoderLayer:
    ffn = ffn_by_neurons(bf16(64, 2048), bf16(64, 2048), bf16(64, 2048), None, bf16(64))
    attend = AttendLayer(bf16(3, 8, 64, 64), bf16(3, 8, 64, 64), 0.125, window)
    qkv, out = plain_weight(bf16(3072, 2048), bf16(3072)), plain_weight(bf16(2048, 2048))
    norms = Norms(bf16(2048), None, bf16(2048), None)
    return DecoderLayer(norms, qkv, attend, out, ffn)


MAKE = {"bf16": make_layer, "e4m3": fp8_layer, "int4": int4_layer}


def rough_of(head: Tensor, kind: str) -> RoughHead | None:
    """What a step over that kind of weights takes."""
    return RoughHead.of(head) if kind == "int4" else None


@pytest.mark.parametrize(
    "sizes",
    [
        SMALL,
        StepSizes(1536, 8960, 12, 128, 151936),  # Qwen2.5 1.5B
        StepSizes(2048, 8192, 32, 64, 128256),  # Llama 3.2 1B
        StepSizes(2048, 11008, 16, 128, 151936),  # Qwen2.5 3B
        StepSizes(3072, 8192, 24, 128, 128256),  # Llama 3.2 3B
        StepSizes(3072, 9216, 12, 256, 131072),  # Falcon3 3B
        StepSizes(3584, 18944, 28, 128, 152064),  # Qwen2.5 7B
        StepSizes(4096, 14336, 32, 128, 128256),  # Llama 3.1 8B
    ],
)
def test_who_goes_in_one_kernel(sizes):
    assert why_no_whole_step(sizes, H200) is None
    for form in ("sparse", "dense"):
        assert sizes.entry(form) in ENTRY_FILES
        if sizes.D <= 128:
            for kind in ("e4m3", "int4"):
                assert ENTRY_FILES[replace(sizes, kind=kind).entry(form)].endswith(f"_{kind}.cu")
    assert sizes.entry("screened") in ENTRY_FILES


@pytest.mark.parametrize(
    ("sizes", "limits", "why"),
    [
        (SMALL, replace(H200, num_sms=114), "114 multiprocessors are too few"),
        (replace(SMALL, K=1024), H200, "a hidden size of 1024"),
        (replace(SMALL, H=16), H200, "not 16 heads of 64"),
        (replace(SMALL, H=64, D=32), H200, "not 64 heads of 32"),
        (
            replace(SMALL, H=8, D=256, kind="e4m3"),
            H200,
            "1536 in heads of 128; 2048 in heads of 64 or 128; 3072 in heads of 128; "
            "3584 in heads of 128; 4096 in heads of 128, not 8 heads of 256",
        ),
        (replace(SMALL, N=132 * 128 + 8), H200, "16904 neurons are more"),
        (StepSizes(3584, 132 * 192 + 8, 28, 128, 512), H200, "25352 neurons are more"),
        (StepSizes(3072, 8192, 32, 96, 32064), H200, "not 32 heads of 96"),  # Phi 3 mini
    ],
)
def test_who_does_not(sizes, limits, why):
    assert why in why_no_whole_step(sizes, limits)


@pytest.mark.parametrize("kind", STEP_KINDS)
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_the_launch(form, kind):
    make = MAKE[kind]
    kernels, layers = OneLaunch(), [make(None), make(100)]
    sizes = replace(SMALL, N=64, V=512, kind=kind)
    weights = bf16(512, 2048), bf16(2048), bf16(512, 2048)
    rotary = Rotary(bf16(128, 64), bf16(128, 64), 64)
    rough = rough_of(weights[-1], kind)
    step = WholeStep(
        kernels,
        H200,
        sizes,
        layers,
        *weights,
        rotary,
        SCALES,
        form=form,
        num_own=48,
        rough=rough,
    )
    tokens, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    logits, counts = step(tokens, tokens, tables, Wanted.ROUGH)
    assert (logits.dtype, logits.shape, counts.shape) == (torch.float32, (1, 512), (2, 1))
    assert not kernels.behind
    name, grid, block, args, smem_bytes = kernels.call
    assert (name, grid, block) == (step_entry(2048, 64, form, kind), (132,), 288)
    assert (smem_bytes, kernels.how) == (H200.smem_bytes, {"together": True})
    assert_taken(name, args)
    sizes = [args[name] for name in ("num_layers", "N", "V", "H", "Hkv")]
    assert sizes == [2, 64, 512, 32, 8]
    words = args["words"]
    assert not words.any()
    assert len(words) == 6 * 2048 + 132 * (2048 + 4 * 64)


@pytest.mark.parametrize(
    ("wanted", "V", "behind"),
    [
        (Wanted.EXACT, 0, "few_linear_1_short"),
        (Wanted.CHOICE, 512, "refine"),
        (Wanted.ROUGH, 512, None),
    ],
)
def test_what_follows_a_step_over_int4(wanted, V, behind):
    kernels, head, scales = OneLaunch(), bf16(510, 2048), Scales(1e-5, logits=0.5)
    sizes, rough = replace(SMALL, N=64, V=510, kind="int4"), rough_of(head, "int4")
    given = sizes, [int4_layer(None)], bf16(510, 2048), bf16(2048), head
    given += Rotary(bf16(128, 64), bf16(128, 64), 64), scales
    step = WholeStep(kernels, H200, *given, form="sparse", num_own=48, rough=rough)
    token, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    logits, _ = step(token, token, tables, wanted)
    args = kernels.call[3]
    assert_taken(kernels.call[0], args)
    assert (logits.shape, args["V"]) == ((1, 510), V)
    assert (args["head"], args["head_scales"]) == (rough.codes, rough.scales)
    assert [name for name, *_ in kernels.behind] == ([behind] if behind else [])
    if behind:
        name, grid, block, given, smem_bytes = kernels.behind[0]
        assert given["x"] is args["x"]
        assert given["head" if name == "refine" else "weight"] is head
    if behind == "refine":
        assert (grid, block, given["V"], given["num_least"]) == ((2,), 256, 510, 132 * 8)
        claims = [f"few::Sizes<Bf16, 1, true, 1, 1, 5, 2>::kBytes + 2 * 2048 == {smem_bytes}"]
        compile_claims("tile/few_sizes.cuh", claims, "sm_90a")


def test_refine_adds_up_as_few_linear():
    """By the same slabs of K."""
    for name, sizes in few_entries("few_linear", (9, 0), "bf16").items():
        if sizes.octets == 1:
            assert (sizes.kind, sizes.halves) == (REFINE.kind, REFINE.halves), name


@pytest.mark.parametrize("wanted", Wanted)
def test_without_a_head_in_8_bits_all_logits_over_int4_are_exact(wanted):
    kernels, head = OneLaunch(), bf16(510, 2048)
    sizes = replace(SMALL, N=64, V=510, kind="int4")
    given = sizes, [int4_layer(None)], bf16(510, 2048), bf16(2048), head
    given += Rotary(bf16(128, 64), bf16(128, 64), 64), SCALES
    step = WholeStep(kernels, H200, *given, form="sparse", num_own=48)
    token, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    logits, _ = step(token, token, tables, wanted)
    args = kernels.call[3]
    assert_taken(kernels.call[0], args)
    assert (logits.shape, args["V"], args["head_scales"]) == ((1, 510), 0, None)
    ((name, _, _, behind, _),) = kernels.behind
    assert name == "few_linear_1_short"
    assert (behind["x"], behind["weight"]) == (args["x"], head)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_a_head_in_8_bits_is_for_int4(kind):
    head = bf16(512, 2048)
    rough = RoughHead.of(head)
    given = replace(SMALL, N=64, V=512, kind=kind), [MAKE[kind](None)], head, bf16(2048), head
    rotary = Rotary(bf16(128, 64), bf16(128, 64), 64)
    with pytest.raises(ValueError, match="in 8 bits over int4"):
        WholeStep(OneLaunch(), H200, *given, rotary, SCALES, form="sparse", num_own=48, rough=rough)


def test_scaled_embeddings_and_a_vocabulary_that_is_no_multiple_of_4():
    kernels, scales = OneLaunch(), Scales(1e-5, embeddings=3.0, logits=0.5)
    weights = torch.ones(510, 2048).bfloat16(), bf16(2048), bf16(510, 2048)
    sizes = replace(SMALL, V=510)
    given = sizes, [make_layer(None)], *weights, Rotary(bf16(128, 64), bf16(128, 64), 64), scales
    step = WholeStep(kernels, H200, *given, form="sparse", num_own=48)
    token = torch.full((1,), 509, dtype=torch.int32)
    logits, _ = step(token, token * 0, torch.zeros(1, 2, dtype=torch.int32))
    name, _, _, args, _ = kernels.call
    assert_taken(name, args)
    assert (logits.shape, args["V"], args["logits"].shape) == ((1, 510), 512, (1, 512))
    assert args["tokens"].tolist() == [0]
    assert (args["embeddings"] == 3).all()
    assert args["embeddings"].shape == (1, 2048)


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_the_table_of_layers(kind):
    """As step_shared.cuh declares a layer."""
    layer = MAKE[kind](100)
    kernels, sizes = OneLaunch(), replace(SMALL, N=64, V=512, kind=kind)
    weights = bf16(512, 2048), bf16(2048), bf16(512, 2048)
    rotary = Rotary(bf16(128, 64), bf16(128, 64), 64)
    given, rough = (sizes, [layer], *weights, rotary, SCALES), rough_of(weights[-1], kind)
    WholeStep(kernels, H200, *given, form="sparse", num_own=48, rough=rough)(
        *torch.zeros(2, 1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    )
    (row,) = kernels.call[3]["layers"].tolist()
    of_layer = {
        "input_norm": layer.norms.attention,
        "qkv": layer.qkv.values,
        "qkv_bias": layer.qkv.bias,
        "out": layer.out.values,
        "out_bias": None,
        "ffn_norm": layer.norms.ffn,
        "gate": layer.ffn.gate.values,
        "up": layer.ffn.up.values,
        "down": layer.ffn.by_neurons,
        "gate_bias": None,
        "up_bias": layer.ffn.up.bias,
        "down_bias": None,
        "keys": layer.attend.keys,
        "values": layer.attend.values,
        "q_norm": None,
        "k_norm": None,
    }
    ffn = layer.ffn
    scales = [layer.qkv.scales, layer.out.scales, ffn.gate.scales, ffn.up.scales, ffn.down.scales]
    scales = [scale for scale in scales if scale is not None]
    named = ["down_scales"] if kind == "int4" else [f"scales[{i}]" for i in range(len(scales))]
    names = [*of_layer, "copy", "limits", "window", *named]
    struct = f"ScaledLayer<{STEP_KINDS[kind].struct}>"
    claims = [f"__builtin_offsetof({struct}, {name}) == {8 * i}" for i, name in enumerate(names)]
    claims.append(f"__builtin_offsetof({struct}, num_own) == {8 * names.index('window') + 4}")
    claims.append(f"sizeof({struct}) == {8 * len(row)}")
    compile_claims("decode/step_shared.cuh", claims, "sm_90a")
    known = [0 if t is None else t.data_ptr() for t in of_layer.values()]
    whole = [*known, 0, 0, 48 << 32 | 100, *(scale.data_ptr() for scale in scales)]
    assert row == [*whole, *[0] * (len(whole) % 2)]
    if kind == "bf16":
        screen = Screen(torch.zeros(1, dtype=torch.uint8), torch.zeros(16), 48)
        given = kernels, H200, sizes, [layer], *weights, rotary, SCALES
        WholeStep(*given, form="screened", num_own=48, screens=[screen])(
            *torch.zeros(2, 1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        )
        (row,) = kernels.call[3]["layers"].tolist()
        assert row == [*known, screen.copy.data_ptr(), screen.limits.data_ptr(), 48 << 32 | 100, 0]


def test_weights_that_lie_otherwise_are_refused():
    layer = make_layer(None)
    turned = replace(layer, ffn=replace(layer.ffn, turned=bf16(2048, 64).t()))
    with pytest.raises(ValueError, match="by rows of neurons"):
        WholeStep(
            OneLaunch(),
            H200,
            SMALL,
            [turned],
            *[bf16(8, 2048)] * 3,
            Rotary(bf16(1, 64), bf16(1, 64), 64),
            SCALES,
            form="sparse",
            num_own=64,
        )


# ---- attention and the norms


CPU = torch.device("cpu")
SHAPES = [(32, 32, 64), (32, 8, 128), (14, 2, 64), (9, 3, 64), (32, 32, 96), (71, 1, 64)]
SHAPES += [(12, 4, 256), (8, 4, 256), (16, 16, 256), (32, 8, 160), (32, 32, 100)]


def arguments(H: int, Hkv: int, D: int, B: int = 3, W: int = 4, queries: int = 1) -> dict:
    """What `attend` takes."""
    plan = attention.plan_attend(B, H, Hkv, D, W * PAGE, 132, queries)
    B *= queries
    return {
        "plan": plan,
        "layer": attention.AttendLayer(
            *(bf16(9, Hkv, PAGE, plan.width) for _ in range(2)), D**-0.5
        ),
        "qkv": bf16(B, (H + 2 * Hkv) * D),
        "positions": torch.zeros(B, dtype=torch.int32),
        "tables": torch.zeros(B, W, dtype=torch.int32),
        "rotary": attention.Rotary(bf16(W * PAGE, plan.width), bf16(W * PAGE, plan.width), D),
        "workspace": attention.open_workspace([plan], CPU),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attend_is_launched_as_its_source_says(shape):
    kernels, given = Launches(), arguments(*shape)
    out = attention.attend(kernels, **given)
    assert out.shape == (3, shape[0] * shape[2])
    ((_, grid, block, _, smem_bytes),) = kernels.made
    assert (grid, block, smem_bytes) == (
        given["plan"].grid,
        32 * given["plan"].num_warps,
        given["plan"].smem_bytes,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_of_several_tokens_are_stored_before_they_are_read(shape):
    kernels, given = Launches(), arguments(*shape, queries=5)
    out = attention.attend(kernels, **given)
    assert out.shape == (15, shape[0] * shape[2])
    (store, attend), one = kernels.made, Launches()
    assert store[:3] == ("store_keys", (shape[1], 15), 32)
    assert kernels.overlaps == [True, True]
    attention.attend(one, **arguments(*shape))
    ((name, (blocks, rows, splits), *rest),) = one.made
    assert attend[:2] == (name, (blocks, 5 * rows, splits))  # a token is split as if it were alone
    assert (attend[2], attend[4]) == (rest[0], rest[2])


def test_norms_are_launched_as_their_source_says():
    kernels = Launches()
    norms.rms_norm(kernels, bf16(3, 2056), bf16(2056), 1e-5)
    wide = bf16(3, 4112)[:, :2056]
    assert norms.rms_norm(kernels, wide, bf16(2056), 1e-5, out=wide) is wide
    z, x = bf16(2, 3, 2056)
    total, y = norms.add_norm(kernels, z, bf16(2056), x, bf16(2056), 1e-5)
    assert total is not y
    total, y = norms.add_norm(kernels, z, bf16(2056), x, None, 1e-5)
    assert total is y
    tokens, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    x, y = norms.embed_norm(kernels, tokens, bf16(9, 2056), bf16(2056), 1e-5, counts)
    assert x.shape == y.shape == (3, 2056)
    norms.embed_norm(kernels, tokens, bf16(9, 2056), bf16(2056), 1e-5, scale=2)
    names = ["rms_norm"] * 2 + ["add_norm"] * 2 + ["embed_norm"] * 2
    assert [name for name, *_ in kernels.made] == names
    assert [launch[1:3] for launch in kernels.made] == [((3,), 288)] * 6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("B", [1, 2, 16, 48, 64])
@pytest.mark.parametrize("max_positions", [64, 1024, 32768, 131072])
def test_plans_fit(shape, B, max_positions):
    H, Hkv, D = shape
    plan = attention.plan_attend(B, H, Hkv, D, max_positions, 132)
    blocks, rows, splits = plan.grid
    assert blocks * plan.heads >= H
    assert rows == B
    assert 1 <= splits <= 64
    assert 4 <= plan.num_warps <= 8
    assert plan.smem_bytes <= 48 * 1024
    assert (
        splits == 1 or (splits - 1) * plan.num_warps * attention.batch_positions(D) < max_positions
    )
    assert blocks * rows * splits <= max(8 * 264, blocks * rows)
    assert plan.num_parts * 4 <= 32 << 20
    assert (plan.num_parts > 0) == (plan.num_tickets > 0) == (splits > 1)


def test_what_the_kernels_do_not_take_is_said():
    assert attention.why_not_attend(32, 8, 128) is None
    for D in (81, 258):
        heads = "heads of an even number of columns up to 256"
        said = f"the attention kernel takes {heads}, not of {D}"
        assert attention.why_not_attend(32, 8, D) == said
        with pytest.raises(ValueError, match=said):
            attention.plan_attend(1, 32, 8, D, 1024, 132)
    assert "32 are not a multiple" in attention.why_not_attend(32, 5, 64)
    assert norms.why_no_norm(2048) is None
    assert norms.why_no_norm(100).endswith("not of 100")
    assert norms.why_no_norm(16392).endswith("not of 16392")


def test_rotary_tables_are_what_the_model_computes():
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))
    made = attention.rotary_tables(rotary, 9000, 80, CPU)
    at = torch.tensor([[0, 1, 777, 8191, 8192, 8999]])
    wanted = rotary(bf16(1), at)
    assert made.turned == 64
    assert torch.equal(made.cos[at[0], :64], wanted[0][0])
    assert torch.equal(made.sin[at[0], :64], wanted[1][0])
    assert (made.cos[:, 64:] == 1).all()
    assert (made.sin[:, 64:] == 0).all()
