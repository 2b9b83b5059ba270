"""Draft heads on a GPU: over kernels they guess what they do in PyTorch; tokens are the model's."""

import pytest
import torch
from draft_heads import assert_alike, random_head, rounded, rounded_head
from greedy import run_all
from on_gpu import CAPABILITY, prompts_of
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.paged_cache import PagedCache
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.torch_decoder import padded
from twellctl.decoding.torch_head import TorchHead

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captured_only")]
MODELS = {
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1003},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    "qwen2 of 1536": {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2},
    "llama of 2048": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8},
    "heads of 256": {"kind": "llama", "hidden_size": 3072, "num_attention_heads": 12}
    | {"num_key_value_heads": 4, "head_dim": 256},
    "odd heads": {"kind": "llama", "hidden_size": 576, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "head_dim": 64},
}
SAMPLINGS = {
    "greedy": Sampling(60, 0, top_logprobs=3),
    "drawn": Sampling(60, 0.8, seed=3),
    "penalised and cut": Sampling(60, 0.9, top_k=40, frequency_penalty=0.5, seed=4),
}


@pytest.fixture(params=MODELS)
def model(request):
    """A random one in bf16 whose logits spread over some units."""
    settings = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 3,
        "max_position_embeddings": 8192,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.06,
        "hidden_act": "silu",
    } | MODELS[request.param]
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("kind", request.param.split()[0]), **settings)
    return AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)


@torch.inference_mode()
def test_a_head_over_kernels_is_as_in_pytorch(model):
    """States and logits of four drafts behind prompts, each from what PyTorch made before it."""
    decoder = KernelDecoder(model, stable=True)
    cache = PagedCache(decoder.shapes, 60, decoder.device)
    decoder.attach(cache)
    head = random_head(model, 500)
    told = decoder.keep_states(16, head.sizes.lower)
    by_kernels = decoder.open_head(head)
    is_rounded = head.sizes.D <= 128 or CAPABILITY != (9, 0)
    judge = TorchHead(rounded_head(head, is_rounded), model, cache, decoder.context)
    judge._rows = rounded(judge._rows, head.sizes.K)
    for length in (1, 63, 64, 700, 3000):
        (text,) = prompts_of(length)
        pages = torch.randperm(59)[: length // 64 + 2].add(1).tolist()
        decoder.run(*padded([(text, 0, pages)]))
        tables = torch.tensor([pages], dtype=torch.int32, device="cuda")
        assert_alike(judge, by_kernels, tables, length, told[:1].clone(), 4)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_are_those_of_the_model_alone(model, kind):
    prompts, head = prompts_of(5, 70, 130, 1, 64, 1000), random_head(model, 500)
    how = {"cache_bytes": 1 << 28}
    judge = open_scheduler(model, stable=True, **how)
    known = [run_all(judge, [prompt], SAMPLINGS[kind])[1] for prompt in prompts]
    for drafts in (Drafts(1), Drafts(4), Drafts(7), None):
        scheduler = open_scheduler(model, draft=head, drafts=drafts, **how)
        for prompt, tokens in zip(prompts, known, strict=True):
            assert run_all(scheduler, [prompt], SAMPLINGS[kind])[1] == tokens
        ids = [[token.id for token in tokens] for tokens in known]
        assert run_all(scheduler, prompts, SAMPLINGS[kind])[0] == ids
        assert scheduler.tally.drafted.num_read
