"""When a step is one kernel, and how that is launched, without a GPU."""

from dataclasses import replace

import pytest
import torch
from compiled import compile_claims
from ffns import ffn_by_neurons
from launched import assert_taken, bf16
from torch import Tensor

from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import (
    ENTRY_FILES,
    REFINE,
    STEP_KINDS,
    few_entries,
    step_entry,
)
from twellctl.bundle.twell_weights import FFN, Weight, plain_weight
from twellctl.decoding.attention import AttendLayer, Rotary
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.rough_head import RoughHead
from twellctl.decoding.screened import Screen
from twellctl.decoding.step_int4 import by_quads, down_by_neurons
from twellctl.decoding.whole_step import (
    DecoderLayer,
    StepSizes,
    WholeStep,
    why_no_whole_step,
)
from twellctl.models.families import Norms, Scales

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
