"""Stable decoding and drafts on a GPU: the same bits alone, with others and in rounds."""

import copy

import pytest
import torch
from attached import attached
from exact_pairs import like_a_fit
from greedy import run_all
from on_gpu import prompts_of
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler, open_schedulers
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.torch_decoder import padded
from twellctl.models.originals import share_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captured_only")]
LOOKUP = 1  # the second drafter
MODELS = {
    "qwen2": {"num_key_value_heads": 2, "hidden_act": "silu"},
    "llama": {"hidden_act": "silu", "vocab_size": 1003},
    "relu": {"kind": "llama", "hidden_act": "relu"},
    "phi3": {"hidden_act": "silu", "sliding_window": 40},
    # tied, it repeats its input whatever the FFNs are
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 40,
        "tie_word_embeddings": False,
    },
    "long rows": {"kind": "llama", "hidden_act": "silu", "intermediate_size": 14336},
}
SAMPLINGS = {
    "greedy": Sampling(60, 0, top_logprobs=3),
    "drawn": Sampling(60, 0.8, seed=3),
    "cut": Sampling(60, 1.0, top_p=0.9, top_k=60, seed=4),
    "penalised": Sampling(60, 0.7, seed=6, repetition_penalty=1.2, frequency_penalty=0.5),
}


def make(name: str):
    """A random model in bf16 whose logits spread over some units."""
    settings = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.06,
    }
    torch.manual_seed(0)
    settings |= MODELS[name]
    config = AutoConfig.for_model(settings.pop("kind", name), **settings)
    return AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


@torch.inference_mode()
def test_a_token_has_the_same_bits_in_any_pass(model):
    """In rows of different lengths, some of them beyond the positions that are not split."""
    assert KernelDecoder.why_not(model) is None
    decoder = attached(KernelDecoder(model, stable=True), 400)
    lengths = (5, 70, 1300, 64, 700)
    rows = prompts_of(*(length + 16 for length in lengths))
    pages = [list(range(1 + 25 * i, 25 + 25 * i)) for i in range(len(rows))]
    for row, length, own in zip(rows, lengths, pages, strict=True):
        decoder.run(*padded([(row[:length], 0, own)]), last=0)

    def logits_of(some: list[int], first: int, count: int) -> torch.Tensor:
        """Of tokens `first` on behind the prompts of `some` rows."""
        parts = [
            (rows[i][lengths[i] + first :][:count], lengths[i] + first, pages[i]) for i in some
        ]
        given = (part.cuda() for part in padded(parts))
        return decoder.run(*given, last=count)[0].clone()

    everyone = list(range(len(rows)))
    alone = torch.stack(
        [torch.cat([logits_of([i], j, 1)[:, 0] for j in range(16)]) for i in everyone]
    )
    assert alone.isfinite().all()
    for count in (1, 2, 3, 4, 6, 8, 12, 16):
        for some in ([0], [2], [1, 4], [0, 1, 2], everyone):
            if len(some) * count <= decoder.max_rows:
                found = logits_of(some, 0, count)
                assert torch.equal(found, alone[some, :count]), (count, some)
    for first in (2, 5):
        assert torch.equal(logits_of(everyone, first, 3), alone[:, first : first + 3])


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_are_those_of_the_model_alone(model, kind):
    prompts, draft = prompts_of(5, 70, 130, 1, 64, 1000), like_a_fit(model)
    how = {"cache_bytes": 1 << 28}
    judge = open_scheduler(model, stable=True, **how)
    known = [run_all(judge, [prompt], SAMPLINGS[kind])[1] for prompt in prompts]
    ids = [[token.id for token in tokens] for tokens in known]
    assert run_all(judge, prompts, SAMPLINGS[kind])[0] == ids
    for drafts in (Drafts(1), Drafts(3), Drafts(7), Drafts(7, LOOKUP), None):
        scheduler = open_scheduler(model, draft=draft, drafts=drafts, **how)
        for prompt, tokens in zip(prompts, known, strict=True):
            assert run_all(scheduler, [prompt], SAMPLINGS[kind])[1] == tokens
        assert run_all(scheduler, prompts, SAMPLINGS[kind])[0] == ids
        assert (
            drafts in (None, Drafts(7, LOOKUP))
            or 0.02 < scheduler.tally.drafted.num_kept / scheduler.tally.drafted.num_read < 1
        )


def test_rounds_of_a_model_and_of_its_draft_alone_do_not_disturb_each_other():
    """In turns, over one cache, with one decoder of the draft."""
    model = make("qwen2")
    prompts, sampling = prompts_of(5, 70, 130), Sampling(60, 0)
    how = {"draft": like_a_fit(model), "drafts": Drafts(3), "cache_bytes": 1 << 28}
    exact, alone = open_schedulers(model, draft_alone=True, **how)
    known = [run_all(alone, [prompt], sampling)[0][0] for prompt in prompts]
    answers = run_all(open_scheduler(model, stable=True), prompts, sampling)[0]
    assert answers != known
    for _ in range(3):
        for prompt, tokens in zip(prompts, known, strict=True):
            sequences = [Sequence(other, sampling) for other in prompts]
            for sequence in sequences:
                exact.add(sequence)
            alone.add(own := Sequence(prompt, sampling))
            while exact.busy or alone.busy:
                exact.advance()
                alone.advance()
            assert own.tokens[own.num_prompt :] == tokens
            assert [each.tokens[each.num_prompt :] for each in sequences] == answers
    assert alone.admission.pool is exact.admission.pool
    assert alone.admission.pool.free == alone.admission.pool.capacity


def test_little_room_changes_no_token():
    model = make("qwen2")
    draft, prompts = like_a_fit(model), prompts_of(100, 60, 120, 64)
    known = run_all(open_scheduler(model, stable=True), prompts, Sampling(150, 0))[0]
    size = 3 * 64 * 2 * 2 * 64 * 2  # of a page: three layers, two heads of 64
    how = {"draft": draft, "drafts": Drafts(7), "cache_bytes": 12 * size}
    scheduler = open_scheduler(model, **how)
    assert scheduler.admission.pool.capacity == 11
    assert run_all(scheduler, prompts, Sampling(150, 0))[0] == known


def test_a_sparse_fit_drafts_over_its_own_kernels():
    """ReLU beside SiLU, over one cache."""
    model, draft = make("qwen2"), make("qwen2")
    draft.config.hidden_act = "relu"
    for layer, other in zip(draft.model.layers, model.model.layers, strict=True):
        layer.mlp.act_fn = torch.nn.ReLU()
        layer.self_attn = other.self_attn
    prompts = prompts_of(5, 70, 130)
    known = run_all(open_scheduler(model, stable=True), prompts, Sampling(60, 0))[0]
    scheduler = open_scheduler(model, draft=draft, drafts=Drafts(3))
    assert run_all(scheduler, prompts, Sampling(60, 0))[0] == known
    for prompt, tokens in zip(prompts, known, strict=True):
        assert run_all(scheduler, [prompt], Sampling(60, 0))[0] == [tokens]
    assert scheduler.tally.drafted.num_kept > 0


def test_what_two_models_share_is_on_the_gpu_once():
    """Also where decoders lay weights anew."""
    model = make("qwen2").cpu()
    draft = copy.deepcopy(model)
    for layer in draft.model.layers:
        layer.mlp.down_proj.weight.data *= 1.01
    assert share_equal(model, draft, lambda name: False) is None
    open_scheduler(model.cuda(), draft=draft.cuda())
    others = dict(draft.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.is_cuda
        is_shared = others[name].data_ptr() == parameter.data_ptr()
        assert is_shared == (".mlp." not in name), name
