"""The decoder over kernels writes what the model itself finds likeliest, within bf16's rounding."""

import copy

import pytest
import torch
from attached import attached
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from twellctl.bench.decode_runs import timed_run
from twellctl.bench.random_model import round_to_int4
from twellctl.bundle.twell_reasons import takes_hopper_kernels
from twellctl.decoding.engine import Sampling
from twellctl.decoding.few_ways import OWN_PRODUCTS
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.kernel_fit import why_not_one_kernel
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.paged_cache import PagedCache
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES

pytestmark = pytest.mark.gpu
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": MIXED,
    "sliding_window": 40,
    "vocab_size": 1001,
}
GRANITE = {
    "vocab_size": 1003,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.02,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
HEADS_OF_96 = {"hidden_size": 576, "num_attention_heads": 6, "num_key_value_heads": 6}
ODD_HEADS = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
IN_PART = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 40, "num_key_value_heads": 4},
    "phi3": HEADS_OF_96 | {"sliding_window": 40},
    "odd heads": ODD_HEADS | {"head_dim": 64},
    "granite": GRANITE,
    "falcon3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256},
    "gemma": {"head_dim": 256, "num_key_value_heads": 1, "vocab_size": 1001},
    "gemma2": GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA | {"tie_word_embeddings": False},
    "smollm3": {"no_rope_layers": [1, 0, 1], "num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 4},
    "exaone4": {"layer_types": MIXED, "sliding_window": 40, "head_dim": 80},
    "part of a head": {"kind": "phi3", "rope_parameters": IN_PART},
}


def heads(H: int, Hkv: int, **changes) -> dict:
    return {"num_attention_heads": H, "num_key_value_heads": Hkv} | changes


ONE_KERNEL = {  # models of which a step of one row is one kernel
    "llama": heads(32, 32),
    "few heads of k": heads(32, 8),
    "qwen2": heads(16, 2),
    "qwen3": heads(16, 8, head_dim=128),
    "mistral": heads(16, 4, sliding_window=40),
    "granite": heads(16, 4, tie_word_embeddings=True, **GRANITE),
    "heads of 256": heads(12, 4, hidden_size=3072),
    "1536": heads(12, 2, hidden_size=1536),
    "3072": heads(24, 8, hidden_size=3072),
    "3584": heads(28, 4, hidden_size=3584),
    "4096": heads(32, 8, hidden_size=4096),
}
LENGTHS = (5, 70, 130, 33, 1, 64)
NUM_TOKENS = 40


def make(family: str, changes: dict | None = None):
    """A random ReLU model in bf16 whose logits spread over some units."""
    settings = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1416,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.06,
        "hidden_act": "relu",
    }
    torch.manual_seed(0)
    settings |= FAMILIES[family] if changes is None else changes
    settings["hidden_activation"] = settings["hidden_act"]  # as Gemma calls it
    kind = settings.pop("kind", family if family in CONFIG_MAPPING else "llama")
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits_of(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]` of the places where `tokens` were chosen, float64."""
    ids = torch.tensor([prompt + tokens], device="cuda")
    with torch.inference_mode():
        return model(ids).logits[0, len(prompt) - 1 : -1].double()


def shortfall(logits: torch.Tensor, chosen: torch.Tensor) -> float:
    """By how much the logit of a chosen token lies below the best, at most."""
    return (logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]).max().item()


def shortfalls(judge, model, prompt: list[int], written: list[int]) -> tuple[float, float]:
    """By the judge, of the tokens that the model itself chooses, in bf16, and of `written`."""
    wanted = logits_of(judge, prompt, written)
    usual = shortfall(wanted, logits_of(model, prompt, written).argmax(-1))
    return usual, shortfall(wanted, torch.tensor(written, device="cuda"))


@pytest.mark.parametrize("form", ["sparse", "dense", "silu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_models_own(family, form):
    """Of SiLU in more rows than one launch of the head takes."""
    is_silu = form == "silu"
    model = make(family, FAMILIES[family] | {"hidden_act": "silu" if is_silu else "relu"})
    judge = copy.deepcopy(model).double()
    lengths = LENGTHS * 17 if is_silu else LENGTHS
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in lengths]
    assert KernelDecoder.why_not(model) is None

    def run():
        scheduler = open_scheduler(
            model,
            decoder=KernelDecoder(model, sparse=form != "dense"),
            max_running=len(prompts),  # no power of two
            cache_bytes=1 << 28,
        )
        return timed_run(scheduler, prompts, NUM_TOKENS).tokens

    tokens = run()
    assert [len(written) for written in tokens] == [NUM_TOKENS] * len(prompts)
    assert run() == tokens
    texts = zip(prompts, tokens, strict=True)
    usual, found = zip(*(shortfalls(judge, model, *text) for text in texts), strict=True)
    assert max(found) <= max(2 * max(usual), 0.1)


FP8_FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 40, "num_key_value_heads": 4},
    "phi3": {"num_key_value_heads": 4, "sliding_window": 40},
}


def dequantised(model):
    """The model in float64 with plain layers, of the very weights that the FP8 layers hold."""
    judge = AutoModelForCausalLM.from_config(model.config).eval().to("cuda", torch.float64)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(".weight_scale")]:
        weights[name.removesuffix("_scale")] *= weights.pop(name)
    judge.load_state_dict(weights)
    return judge


@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_steps_over_fp8_weights(family):
    """Each form of a step, sparse or dense, is as near to float64 as such a step in bf16.

    With many rows PyTorch's products round their inputs to e4m3.
    """
    model = make(family, FP8_FAMILIES[family] | {"intermediate_size": 1408})
    round_model(model, SCHEMES["fp8"])
    judge = dequantised(model)
    assert KernelDecoder.why_not(model) is None
    decoders = {s: attached(KernelDecoder(model, s), 40) for s in (False, True)}
    for B in (1, 3, 16, 17, 64):
        tokens = torch.randint(1, 1000, (B, 1), dtype=torch.int32, device="cuda")
        pages = torch.arange(1, B + 1, dtype=torch.int32, device="cuda")[:, None] % 39 + 1
        inputs = tokens, torch.zeros_like(tokens), pages
        with torch.inference_mode():
            wanted = judge(tokens.long()).logits[:, 0]
        found = {
            f"{sparse} {name}": form(*inputs)
            for sparse, decoder in decoders.items()
            for name, form in decoder.ways(B).items()
        }
        assert {"False dense", "True union", "True dense"} <= found.keys()
        assert ("True pairs" in found) == (B >= 4 and takes_hopper_kernels(0))
        for name, (logits, _) in found.items():
            error = (logits - wanted).norm() / wanted.norm()
            assert error < (0.02 if B <= OWN_PRODUCTS else 0.1), (name, B)
        flips = (found["True union"][1] - found["True dense"][1]).abs().max()
        assert flips <= (8 if B <= OWN_PRODUCTS else 60), B


def make_for_one_kernel(family: str, neurons: int = 1416):
    settings = {"hidden_size": 2048, "initializer_range": 0.03, "intermediate_size": neurons}
    return make(family, settings | ONE_KERNEL[family])


def twice_each(forms: dict, inputs: tuple) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Logits and counts of each form, which are the same bits the second time."""
    found = {}
    for name, form in forms.items():
        first = [made.clone() for made in form(*inputs)]
        for made, again in zip(first, form(*inputs), strict=True):
            assert torch.equal(made, again), name
        found[name] = tuple(first)
    return found


def check_forms(found: dict, wanted: torch.Tensor, *, counted: bool) -> None:
    """Logits near to `wanted`, and counts near to one another's, if they are `counted`."""
    errors = {name: (logits - wanted).abs().max() for name, (logits, _) in found.items()}
    usual, fired = list(errors.values())[-1], list(found.values())[-1][1]
    for name, (_, counts) in found.items():
        assert errors[name] <= max(2 * usual, 0.05), errors
        if counted:
            assert (counts - fired).abs().sum() <= 0.02 * fired.sum() + 2, name


def check_a_row_alone(judge, decoder, *, counted: bool) -> None:
    """Each form of a step of `decoder` is as near to the judge as the kernels one by one."""
    for length in (1, 5, 64, 130, 700, 2000):
        ids = torch.randint(1, 1000, (1, length + 1), device="cuda")
        table = torch.randperm(34, device="cuda").int()[None] + 1
        positions = torch.arange(length + 1, device="cuda").int()
        with torch.inference_mode():
            decoder.run(ids[:, :-1], positions[None, :-1], table, last=0)
            inputs = ids[:, -1:].int(), positions[None, -1:], table
            found = twice_each(decoder.ways(1), inputs)
            wanted = judge(ids).logits[0, -1:]
        check_forms(found, wanted, counted=counted)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("family", ONE_KERNEL)
def test_a_row_alone(family, sparse, weights):
    if weights != "bf16" and family == "heads of 256":
        pytest.skip("takes one kernel in bf16 alone")
    if weights == "fp8":
        model = make_for_one_kernel(family, 1408)
        round_model(model, SCHEMES["fp8"])
        judge = dequantised(model)
    else:
        model = make_for_one_kernel(family, 1408 if weights == "int4" else 1416)
        if weights == "int4":
            round_to_int4(model)
        judge = copy.deepcopy(model).double()
    assert KernelDecoder.why_not(model) is None
    assert why_not_one_kernel(model) is None
    decoder = attached(KernelDecoder(model, sparse, gates="screened"), 35)
    forms = decoder.ways(1)
    wanted = {"one dense kernel", "dense"}
    wanted |= {"one kernel", "union"} if sparse else set()
    wanted |= {"one screened kernel"} if sparse and weights == "bf16" else set()
    assert forms.keys() == wanted
    assert decoder.step_kind == ("e4m3" if weights == "fp8" else weights)
    check_a_row_alone(judge, decoder, counted=sparse)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("family", ["llama", "1536"])
def test_a_row_alone_with_silu(family, weights):
    settings = {"hidden_size": 2048, "initializer_range": 0.03, "intermediate_size": 1408}
    model = make(family, settings | ONE_KERNEL[family] | {"hidden_act": "silu"})
    if weights == "int4":
        round_to_int4(model)
    decoder = attached(KernelDecoder(model), 35)
    assert decoder.ways(1).keys() == {"one dense kernel", "dense"}
    assert decoder.step_kind == weights
    check_a_row_alone(copy.deepcopy(model).double(), decoder, counted=False)


@pytest.mark.parametrize("family", ["llama", "1536", "3584", "4096"])
def test_a_row_alone_over_fp8_weights_of_any_size(family):
    """Inputs of an FFN, and of o, of 1e-15 to 1e15; what is not finite stays so."""
    model = make_for_one_kernel(family, 1408)
    with torch.no_grad():
        for layer, size in zip(model.model.layers, (1e-15, 1.0, 1e15), strict=True):
            layer.post_attention_layernorm.weight *= size
            layer.mlp.down_proj.weight /= size**2
            layer.self_attn.v_proj.weight *= size
            layer.self_attn.o_proj.weight /= size
    round_model(model, SCHEMES["fp8"])
    judge, decoder = dequantised(model), attached(KernelDecoder(model), 3)
    tokens = torch.tensor([[7]], dtype=torch.int32, device="cuda")
    inputs = tokens, torch.zeros_like(tokens), tokens * 0 + 1
    with torch.inference_mode():
        found = twice_each(decoder.ways(1), inputs)
        check_forms(found, judge(tokens.long()).logits[:, 0], counted=True)
        for value in (torch.inf, torch.nan):
            model.get_input_embeddings().weight[7, 100] = value
            for name, form in decoder.ways(1).items():
                assert form(*inputs)[0].isnan().all(), (name, value)


def check_written(judge, model, prompt: list[int], written: list[int]) -> None:
    """That these tokens are about as likely by the judge as those of the model itself."""
    usual, found = shortfalls(judge, model, prompt, written)
    assert found <= max(2 * usual, 0.1), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "granite"])
def test_texts_together(family):
    """Through the engine: graphs, rows that come and go, pages that are taken anew."""
    model = make_for_one_kernel(family)
    judge = copy.deepcopy(model).double()
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in LENGTHS]

    def run():
        decoder = KernelDecoder(model)
        scheduler = open_scheduler(
            model, decoder=decoder, max_running=len(prompts), cache_bytes=1 << 28
        )
        return timed_run(scheduler, prompts, NUM_TOKENS).tokens

    tokens = run()
    assert run() == tokens
    for prompt, written in zip(prompts, tokens, strict=True):
        check_written(judge, model, prompt, written)


@pytest.mark.parametrize("family", ONE_KERNEL)
def test_a_text_alone(family):
    model = make_for_one_kernel(family)
    judge = copy.deepcopy(model).double()
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in (5, 130)]
    scheduler = open_scheduler(
        model, decoder=KernelDecoder(model), max_running=2, cache_bytes=1 << 28
    )
    for prompt in prompts:
        (written,) = timed_run(scheduler, [prompt], NUM_TOKENS).tokens
        assert timed_run(scheduler, [prompt], NUM_TOKENS).tokens == [written]
        check_written(judge, model, prompt, written)


@pytest.mark.parametrize("M", [1, 8, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_of_a_step_one_by_one(family, M):
    """Each is as near to the model in float64 as the last; a step is one of them."""
    model = make(family)
    judge = copy.deepcopy(model).double()
    decoder = attached(KernelDecoder(model), M + 1)
    ids = torch.randint(1, 1000, (M, 34), device="cuda")
    tables = torch.arange(M, device="cuda").int()[:, None] + 1
    positions = torch.arange(34, device="cuda").int().repeat(M, 1)
    with torch.inference_mode():
        decoder.run(ids[:, :-1], positions[:, :-1], tables, last=0)
        inputs = ids[:, -1:].int().contiguous(), positions[:, -1:].contiguous(), tables
        forms = decoder.ways(M)
        assert {"union", "dense"} <= forms.keys()
        found = twice_each(forms, inputs)
        check_forms(found, judge(ids).logits[:, -1], counted=True)
        logits, counts = decoder.run(*inputs)
        name = decoder.plan.name(M)
        assert torch.equal(logits[:, 0], found[name][0])
        assert torch.equal(counts[..., 0], found[name][1])


@pytest.mark.parametrize("Q", [2, 5, 16])
@pytest.mark.parametrize("form", ["sparse", "dense", "silu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_of_a_row_in_one_pass(family, form, Q):
    """As near to float64 as steps with one token; a row has fewer tokens than the other one."""
    model = make(family, FAMILIES[family] | {"hidden_act": "silu" if form == "silu" else "relu"})
    judge = copy.deepcopy(model).double()
    decoder = attached(KernelDecoder(model, form != "dense"), 9)
    length = 90
    ids = torch.randint(1, 1000, (2, length + Q), device="cuda")
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device="cuda")
    positions = torch.arange(length + Q, device="cuda").int().repeat(2, 1)
    tokens, at = ids[:, length:].int(), positions[:, length:].contiguous()
    with torch.inference_mode():
        wanted = judge(ids).logits[:, length:]
        decoder.run(ids[:, :length], positions[:, :length], tables, last=0)
        steps = [
            decoder.run(tokens[:, j : j + 1].contiguous(), at[:, j : j + 1].contiguous(), tables)
            for j in range(Q)
        ]
        usual = (torch.cat([logits for logits, _ in steps], 1) - wanted).abs().max()
        logits, counts = decoder.run(tokens, at, tables, last=Q)
        assert (logits - wanted).abs().max() <= max(2 * usual, 0.05)
        known = torch.cat([fired for _, fired in steps], 2)
        assert counts.shape == known.shape
        assert (counts - known).abs().sum() <= 0.02 * known.sum() + 2
        short, places = torch.zeros_like(tokens), torch.full_like(at, -1)
        short[0], places[0] = tokens[0], at[0]
        short[1, 1:], places[1, 1:] = tokens[1, :-1], at[1, :-1]
        logits, _ = decoder.run(short, places, tables, last=Q)
        assert (logits[0] - wanted[0]).abs().max() <= max(2 * usual, 0.05)
        assert (logits[1, 1:] - wanted[1, :-1]).abs().max() <= max(2 * usual, 0.05)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "one kernel"])
def test_two_decoders_over_one_model_and_one_cache(kind, weights):
    """Each gives the bits that it gives alone, in whatever order they are made and used."""

    def opened():
        if kind == "llama":
            model = make("llama", {"intermediate_size": 1408})
        else:
            model = make_for_one_kernel("llama", 1408)
        model.config.twell = {"tile": 256, "slots": [64, 64, 64]}
        if weights == "fp8":
            round_model(model, SCHEMES["fp8"])
        return model

    @torch.inference_mode()
    def passes(decoder, table):
        ids = torch.arange(1, 101, dtype=torch.int32, device="cuda")[None]
        at = torch.arange(100, dtype=torch.int32, device="cuda")[None]
        yield decoder.run(ids[:, :90], at[:, :90], table)[0]
        yield decoder.run(ids[:, 90:91], at[:, 90:91], table)[0]
        yield decoder.run(ids[:, 91:96], at[:, 91:96], table, last=5)[0]

    tables = torch.tensor([[[1, 2]], [[3, 4]]], dtype=torch.int32, device="cuda")
    known = [
        list(passes(attached(KernelDecoder(opened(), sparse), 5), tables[int(sparse)]))
        for sparse in (False, True)
    ]
    for order in ((False, True), (True, False)):
        model = opened()
        kept = {name: part.clone() for name, part in model.state_dict().items()}
        classes = [type(module) for module in model.modules()]
        decoders = {sparse: KernelDecoder(model, sparse) for sparse in order}
        cache = PagedCache(decoders[True].shapes, 5, model.device)
        for decoder in decoders.values():
            decoder.attach(cache)
        runs = [passes(decoders[sparse], tables[int(sparse)]) for sparse in (False, True)]
        found = list(zip(*zip(*runs, strict=True), strict=True))  # by turns
        for logits, wanted in zip(found, known, strict=True):
            assert all(map(torch.equal, logits, wanted))
        assert [type(module) for module in model.modules()] == classes
        assert all(torch.equal(part, kept[name]) for name, part in model.state_dict().items())


def test_logprobs_and_densities_of_tokens():
    model = make("llama")
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in LENGTHS]
    scheduler = open_scheduler(
        model, decoder=KernelDecoder(model), max_running=len(prompts), cache_bytes=1 << 28
    )

    def run(*sampling, **more) -> list[list]:
        found = [[] for _ in prompts]
        for events in scheduler.run(prompts, Sampling(NUM_TOKENS, *sampling, **more)):
            for sequence, token in events:
                found[sequence.client].append(token)
        return found

    def ids(rows: list[list]) -> list[list[int]]:
        return [[token.id for token in tokens] for tokens in rows]

    plain, detailed = run(0), run(0, top_logprobs=3, densities=True)
    assert ids(detailed) == ids(plain)
    for token in (token for tokens in detailed for token in tokens[1:]):
        assert token.top[0] == (token.id, token.logprob)
        assert len(token.densities) == 3
        assert all(0.1 < share < 0.9 for share in token.densities)
    drawn = run(0.9, seed=5)
    assert ids(drawn) != ids(plain)
    assert ids(run(0.9, seed=5)) == ids(drawn)
    assert ids(run(0.9, seed=5, top_logprobs=0)) == ids(drawn)  # copied, not written by the step
    assert ids(run(0.9, 0.5, 20, seed=5)) == ids(run(0.9, 0.5, 20, seed=5, densities=True))
