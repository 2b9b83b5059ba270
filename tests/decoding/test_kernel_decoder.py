"""The decoder over kernels with plain PyTorch in their place: what it hands to them, on a CPU."""

from collections.abc import Iterator

import pytest
import torch
from attached import attached
from compiled import EVERY_CASE
from greedy import run_all
from played_kernels import H200, SIZES, TWELL, Kernels, stand_in
from torch import nn
from transformers import PreTrainedModel

from twellctl.decoding.attention import MOST_QUERIES, plan_alike, plan_attend
from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.kernel_layers import pad_rows
from twellctl.decoding.opening import SLOW, describe_decoder, open_scheduler
from twellctl.decoding.paged_cache import PagedCache
from twellctl.decoding.pages import PAGE
from twellctl.decoding.stable import STABLE_ROWS
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    return stand_in(monkeypatch)


MIXED = ["sliding_attention", "full_attention"]
GEMMA = {"hidden_activation": "relu", "vocab_size": 517, "head_dim": 256}
WINDOW = {"layer_types": MIXED, "sliding_window": 40}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22}
GRANITE |= {"logits_scaling": 5.0}
PARTIAL = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
CASES = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "a key for many": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "neurons": ("llama", {"intermediate_size": 128}),  # few_linear takes them
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"hidden_size": 256}),  # whose heads are of 64 by their number
    "ministral": ("ministral", {"sliding_window": 40}),
    "seed_oss": ("seed_oss", {}),
    "cwm": ("cwm", {"sliding_window": 40}),
    "granite": ("granite", {"vocab_size": 515} | GRANITE),
    "heads of 100": ("llama", {"head_dim": 100}),
    "normed heads of 36": ("qwen3", {"head_dim": 36}),
    "heads of 256": ("llama", {"head_dim": 256, "vocab_size": 513}),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", GEMMA | WINDOW | CAPS),
    "gemma3": ("gemma3_text", GEMMA | WINDOW),
    "vaultgemma": ("vaultgemma", GEMMA | WINDOW),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOW),
    "exaone4": ("exaone4", WINDOW),
    "part of a head": ("phi3", {"hidden_size": 256, "rope_parameters": PARTIAL}),
}
# layers that are put together as those of another one here
ALIKE = {"tied", "mistral", "ministral", "seed_oss", "cwm", "gemma", "vaultgemma", "olmo2"}
BOTH = [(case, True) for case in CASES if EVERY_CASE or case not in ALIKE]
BOTH += [("phi3", False)]  # which differs in the FFN alone


@pytest.mark.parametrize(("case", "is_sparse"), BOTH)
def test_greedy_tokens_are_those_of_generate(tiny, generated, prompts, case, is_sparse):
    family, changes = CASES[case]
    model = tiny(family, **SIZES | changes)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.data += 0.3 * torch.randn_like(parameter)
    if case == "llama":
        model.config.twell = TWELL
    known = [generated(model, prompt, 12) for prompt in prompts]
    decoder = KernelDecoder(model, sparse=is_sparse)
    scheduler = open_scheduler(model, max_running=3, decoder=decoder)
    found, tokens = run_all(scheduler, prompts, Sampling(12, 0, densities=True))
    assert found == known
    if is_sparse:
        assert all(0.1 < share < 0.9 for token in tokens for share in token.densities)
        assert {len(token.densities) for token in tokens} == {2}
    else:
        assert {token.densities for token in tokens} == {()}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "silu", "mlp_bias": True}),
        ("phi3", {"hidden_act": "gelu", "hidden_size": 256}),
    ],
)
def test_with_another_activation_than_relu(tiny, generated, family, changes):
    """Densely, and in more rows than a launch of the head takes."""
    model = tiny(family, **SIZES | changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    prompts = [[1 + row, 7, 400 - row] for row in range(100)]
    known = [generated(model, prompt, 6) for prompt in prompts[::11]]
    decoder, rows = KernelDecoder(model), []
    run = decoder.run
    decoder.run = lambda tokens, *inputs, **how: (
        rows.append(len(tokens)) or run(tokens, *inputs, **how)
    )
    scheduler = open_scheduler(model, max_running=100, decoder=decoder)
    found, tokens = run_all(scheduler, prompts, Sampling(6, 0, densities=True))
    assert found[::11] == known
    assert max(rows) == 100
    assert {token.densities for token in tokens} == {()}


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_a_model_that_was_decoded_can_be_trained_and_saved(tiny, prompts, tmp_path, is_sparse):
    model = tiny("qwen3", **SIZES)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    decoder = KernelDecoder(model, sparse=is_sparse)
    run_all(open_scheduler(model, decoder=decoder), prompts[:1], Sampling(3, 0))
    ids = torch.tensor(prompts[:1])
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.is_inference(), name
        assert parameter.grad is not None, name
        assert torch.equal(parameter, kept[name]), name
    model.save_pretrained(tmp_path)
    for name, weight in type(model).from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(weight, kept[name]), name


@pytest.mark.parametrize("is_stable", [True, False], ids=["stable", "fast"])
@pytest.mark.parametrize("heads", [(9, 3), (15, 5), (4, 1)])
def test_there_is_room_for_the_parts_of_any_number_of_rows(tiny, heads, is_stable):
    """Splits of 6 rows of 9 heads, three of which share keys, need more than those of 4 or 8."""
    H, Hkv = heads
    sizes = {"hidden_size": 64 * H, "num_attention_heads": H, "num_key_value_heads": Hkv}
    model = tiny(**sizes, head_dim=64, max_position_embeddings=2048)
    decoder = KernelDecoder(model, stable=is_stable)
    attached(decoder, 33)
    assert decoder.max_rows == (STABLE_ROWS if is_stable else 64)
    for B in range(1, decoder.max_rows + 1):
        for width in decoder.widths(32):
            for queries in range(1, min(MOST_QUERIES, decoder.max_rows // B) + 1):
                given = B, H, Hkv, 64, width * PAGE, H200.num_sms, queries
                plan = plan_alike(*given, longest=2048) if is_stable else plan_attend(*given)
                assert decoder._workspace.parts.numel() >= plan.num_parts, (B, width)
                assert decoder._workspace.tickets.numel() >= plan.num_tickets, (B, width)


def test_a_head_gets_more_rows_once(tiny):
    head = tiny(vocab_size=515, tie_word_embeddings=True).lm_head.weight
    before = head.detach().clone()
    pad_rows(head)
    place = head.data_ptr()
    assert head.untyped_storage().nbytes() == 516 * 32 * 4
    pad_rows(head)
    assert torch.equal(head, before)
    assert head.data_ptr() == place


@torch.inference_mode()
def passes(decoder: KernelDecoder, tables: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits of a prompt of two rows, of steps, and of some tokens to verify."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 512, (2, 80), generator=draw, dtype=torch.int32)
    positions = torch.arange(80, dtype=torch.int32).repeat(2, 1)
    for first, end, last in ((0, 62, 1), (62, 63, 1), (63, 64, 1), (64, 80, 16)):
        inputs = tokens[:, first:end], positions[:, first:end], tables
        yield decoder.run(*inputs, last=last)[0].clone()


@pytest.mark.parametrize("first", [False, True], ids=["dense first", "sparse first"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_two_decoders_over_one_model_and_one_cache(tiny, family, first):
    """Each gives what it gives alone, by turns with the other one; the model is as it was."""
    sizes = SIZES | {"intermediate_size": 128} | ({"hidden_size": 256} if family == "phi3" else {})

    def opened() -> PreTrainedModel:
        model = tiny(family, **sizes)
        model.config.twell = TWELL
        return model

    tables = {True: torch.tensor([[1, 2], [3, 4]]), False: torch.tensor([[8, 7], [6, 5]])}
    known = {
        sparse: list(passes(attached(KernelDecoder(opened(), sparse), 9), tables[sparse]))
        for sparse in tables
    }
    model = opened()
    kept = {name: part.clone() for name, part in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    decoders = {sparse: KernelDecoder(model, sparse) for sparse in (first, not first)}
    cache = PagedCache(decoders[True].shapes, 9, model.device)
    for decoder in decoders.values():
        decoder.attach(cache)
    runs = [passes(decoders[sparse], tables[sparse]) for sparse in (True, False)]
    turns = zip(*runs, strict=True)
    for (sparse, dense), *wanted in zip(turns, known[True], known[False], strict=True):
        assert torch.equal(sparse, wanted[0])
        assert torch.equal(dense, wanted[1])
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(part, kept[name]) for name, part in model.state_dict().items())


def test_a_cache_of_another_model_is_refused(tiny):
    decoder, other = (KernelDecoder(tiny(**SIZES, num_key_value_heads=n)) for n in (2, 4))
    cache = PagedCache(other.shapes, 3, decoder.device)
    with pytest.raises(ValueError, match="layers of other shapes"):
        decoder.attach(cache)
    with pytest.raises(ValueError, match="by_tokens=False"):
        decoder.attach(PagedCache(decoder.shapes, 3, decoder.device, by_tokens=True))


@pytest.mark.parametrize("case", ["llama", "normed heads of 36", "gemma2", "exaone4"])
@torch.inference_mode()
def test_tokens_to_verify_get_the_logits_of_the_model(tiny, case):
    family, changes = CASES[case]
    model = tiny(family, **SIZES | changes)
    decoder = attached(KernelDecoder(model), 9)
    tokens = torch.randint(1, 500, (3, 80), dtype=torch.int32)
    positions = torch.arange(80, dtype=torch.int32).repeat(3, 1)
    tables = torch.tensor([[1, 2], [5, 3], [7, 6]], dtype=torch.int32)
    known = model(tokens.long()).logits
    decoder.run(tokens[:, :60], positions[:, :60], tables, last=0)
    places = positions[:, 60:76].clone()
    places[1, :5] = -1  # a row with fewer tokens than the others
    tokens[1, 60:76], places[1, 5:] = tokens[1, 55:71].clone(), positions[1, 60:71]
    logits, fired = decoder.run(tokens[:, 60:76], places, tables, last=16)
    assert fired.shape == (2, 3, 16)
    for row, columns in ((0, slice(60, 76)), (2, slice(60, 76)), (1, slice(60, 71))):
        found = logits[row, 16 - (columns.stop - columns.start) :]
        torch.testing.assert_close(found, known[row, columns], rtol=1e-4, atol=1e-4)


# ---- what it does not take ----


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_what_is_slow_is_described(tiny, as_on_a_gpu):
    slow = f"transformers' own code{SLOW} (the decode kernels take"
    assert describe_decoder(tiny(**SIZES)) == f"{slow} bf16, not float32)"
    assert describe_decoder(tiny(**SIZES).bfloat16()) == "twellctl's kernels"


def test_what_it_takes_is_compiled_before_the_first_request(tiny, as_on_a_gpu, kernels):
    assert KernelDecoder.why_not(tiny(**SIZES).bfloat16()) is None
    assert {"choose", "embed_norm", "rms_norm", "attend_64_2"} <= set(kernels.prepared)
    assert {"few_linear_8", "few_gated_4"} <= set(kernels.prepared)
    assert {"few_down", "few_down_wide_1", "few_hidden_2_long"} <= set(kernels.prepared)
    kernels.failure = "NVRTC found no compiler"
    assert KernelDecoder.why_not(tiny(**SIZES).bfloat16()) == "NVRTC found no compiler"


@pytest.mark.parametrize(
    ("act", "families"), [("silu", {"few_linear", "few_gated"}), ("gelu", {"few_linear"})]
)
def test_of_another_activation_no_sparse_kernel_is_compiled(
    tiny, as_on_a_gpu, kernels, act, families
):
    assert KernelDecoder.why_not(tiny(**SIZES, hidden_act=act).bfloat16()) is None
    prepared = set(kernels.prepared)
    assert {"choose", "embed_norm", "rms_norm", "attend_64_2", "few_linear_8"} <= prepared
    few = (name.split("_")[:2] for name in prepared if name.startswith("few"))
    assert {"_".join(parts) for parts in few} == families


def test_fp8_with_another_activation_is_refused(tiny, as_on_a_gpu):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    model = tiny(**sizes, hidden_act="silu").bfloat16()
    round_model(model, SCHEMES["fp8"])
    assert "the FFNs of LlamaForCausalLM are rounded to e4m3 and not ReLU" in KernelDecoder.why_not(
        model
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m, layer: setattr(layer.self_attn.q_proj, "bias", m.model.norm.weight),
            "some of q, k and v of LlamaForCausalLM have a bias, some have none",
        ),
        (
            lambda m, layer: layer.self_attn.o_proj.register_forward_hook(print),
            "self_attn.o_proj of LlamaForCausalLM has hooks",
        ),
        (
            lambda m, layer: layer.mlp.register_forward_pre_hook(print),
            "mlp of LlamaForCausalLM has hooks",
        ),
        (
            lambda m, layer: layer.register_forward_hook(print),
            "a layer of LlamaForCausalLM has hooks",
        ),
        (lambda m, layer: m.model.norm.float(), "take bf16, not float32"),
        (
            lambda m, layer: setattr(m, "lm_head", nn.Sequential(m.lm_head)),
            "the LM head of LlamaForCausalLM are not plain layers",
        ),
    ],
)
def test_what_would_be_passed_by_is_refused(tiny, as_on_a_gpu, change, said):
    model = tiny(**SIZES).bfloat16()
    change(model, model.model.layers[1])
    assert said in KernelDecoder.why_not(model)


def test_scales_of_another_dtype_are_refused(tiny, as_on_a_gpu):
    model = tiny(hidden_size=128, intermediate_size=128, head_dim=64).bfloat16()
    round_model(model, SCHEMES["fp8"])
    scale = model.model.layers[1].mlp.down_proj.weight_scale
    scale.data = scale.data.bfloat16()
    assert "scales in float32" in KernelDecoder.why_not(model)


def test_fused_weights_are_not_copied(tiny):
    model = tiny("phi3", hidden_size=256)
    decoder = attached(KernelDecoder(model), 3)
    for layer, made in zip(model.model.layers, decoder._layers, strict=True):
        assert made.qkv.values.data_ptr() == layer.self_attn.qkv_proj.weight.data_ptr()
        fused = layer.mlp.gate_up_proj.weight
        start, halves = fused.data_ptr(), (made.ffn.gate.values, made.ffn.up.values)
        assert [half.data_ptr() - start for half in halves] == [0, fused.nbytes // 2]


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "default", "partial_rotary_factor": 0.75}, None),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
            "longrope rotary positions depend on the longest sequence",
        ),
    ],
    ids=["plain", "partial", "longrope"],
)
def test_rotary_positions_of_phi3(tiny, as_on_a_gpu, rope, said):
    parameters = {"rope_theta": 1e4, **rope}
    model = tiny("phi3", hidden_size=256, rope_parameters=parameters).bfloat16()
    found = KernelDecoder.why_not(model)
    assert found is None if said is None else said in found
