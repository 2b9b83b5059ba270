"""The decode engine on a GPU: steps as CUDA graphs, read a step late, give the same tokens."""

import asyncio
import logging

import pytest
import torch
from greedy import greedy
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding import batch
from twellctl.decoding.engine import Sampling
from twellctl.decoding.opening import open_engines, open_scheduler
from twellctl.decoding.sampler import Field, _gumbel, choose, cut
from twellctl.decoding.torch_decoder import TorchDecoder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captured_only")]
PAGE_BYTES = 2 * 64 * 2 * (16 + 16) * 4  # of two layers, two heads of 16, float32


@pytest.fixture(scope="module")
def tiny():
    """`tiny(**config)`: a ReLU Llama in float32 on the GPU."""

    def make(**changes):
        settings = {
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": None,
            "pad_token_id": 0,
            "initializer_range": 0.3,
            "hidden_act": "relu",
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **settings | changes)
        return AutoModelForCausalLM.from_config(config).eval().cuda()

    return make


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    lengths = (5, 70, 130, 1, 64, 200, 33, 2)
    return [torch.randint(1, 1000, (length,)).tolist() for length in lengths]


def tokens_of(scheduler, prompts: list[list[int]], sampling: Sampling) -> list[list]:
    found = [[] for _ in prompts]
    for events in scheduler.run(prompts, sampling):
        for sequence, token in events:
            found[sequence.client].append(token)
    assert scheduler.admission.pool.free == scheduler.admission.pool.capacity
    return found


def ids_of(scheduler, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    return [[token.id for token in tokens] for tokens in tokens_of(scheduler, prompts, sampling)]


def test_greedy_tokens_are_those_of_generate(tiny, prompts):
    model = tiny()
    known = [greedy(model, prompt, 100) for prompt in prompts]
    scheduler = open_scheduler(model, max_running=5)
    assert ids_of(scheduler, prompts, Sampling(100, 0)) == known
    assert ids_of(scheduler, prompts, Sampling(100, 0)) == known
    assert {4, 5} <= {B for B, *_ in scheduler._batch._runs} <= {1, 2, 4, 5}
    runs = scheduler._batch._runs.values()
    assert all(isinstance(run.__self__, torch.cuda.CUDAGraph) for run in runs)


def test_little_room_changes_no_token(tiny, prompts):
    model = tiny()
    known = [greedy(model, prompt, 100) for prompt in prompts]
    scheduler = open_scheduler(model, cache_bytes=8 * PAGE_BYTES, max_running=8)
    assert scheduler.admission.pool.capacity == 7
    assert ids_of(scheduler, prompts, Sampling(100, 0)) == known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(80, 0, top_logprobs=20, densities=True),
        Sampling(80, 0.9, seed=3, densities=True),
        Sampling(80, 0.9, 0.95, 40, seed=3, top_logprobs=2),
    ],
)
def test_the_same_again_has_the_same_bits(tiny, prompts, dtype, sampling):
    scheduler = open_scheduler(tiny().to(dtype))
    first = tokens_of(scheduler, prompts, sampling)
    assert tokens_of(scheduler, prompts, sampling) == first
    densities = [token.densities for tokens in first for token in tokens if token.densities]
    assert all(0 < share < 1 for shares in densities for share in shares)


def test_draws_are_those_of_the_cpu(tiny, prompts):
    model = tiny()
    for sampling in (Sampling(60, 0.8, seed=11), Sampling(60, 1.1, 0.9, 30, seed=12)):
        on_gpu = ids_of(open_scheduler(model.cuda()), prompts, sampling)
        assert ids_of(open_scheduler(model.cpu()), prompts, sampling) == on_gpu


def test_noise_is_that_of_the_cpu():
    fields = torch.randint(-(2**31), 2**31 - 1, (len(Field), 9), dtype=torch.int32)
    tokens = torch.arange(5000, dtype=torch.int32)
    on_cpu, on_gpu = _gumbel(fields, tokens), _gumbel(fields.cuda(), tokens.cuda()).cpu()
    assert torch.allclose(on_cpu, on_gpu, rtol=1e-5, atol=1e-5)


def test_a_cut_draw_is_repeated_over_a_large_vocabulary():
    fields = torch.randint(0, 2**31 - 1, (len(Field), 4), dtype=torch.int32).cuda()
    fields[Field.TEMPERATURE] = torch.ones(4).view(torch.int32).cuda()
    fields[Field.TOP_P] = torch.full((4,), 0.9).view(torch.int32).cuda()
    fields[Field.TOP_K] = 0
    logits = torch.randn(4, 150_000, device="cuda")
    for rows in (slice(0, 1), slice(0, 4)):  # one row is summed up by another kernel
        mine, ours = logits[rows], fields[:, rows]
        first = choose(cut(mine, ours), ours, True)
        for _ in range(20):
            assert torch.equal(choose(cut(mine, ours), ours, True), first)


def test_a_graph_is_captured_where_a_row_stands_at_the_end_of_its_page(tiny):
    model = tiny()
    prompt = list(range(1, 64))  # its second token is the last of the page
    assert ids_of(open_scheduler(model), [prompt], Sampling(70, 0)) == [greedy(model, prompt, 70)]


@pytest.fixture
def generator_kept():
    """A capture that fails leaves torch's generator as if it were in one: not for other tests."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    kept = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    yield
    generator.graphsafe_set_state(kept)


def test_what_cannot_be_captured_runs_as_it_is(tiny, prompts, monkeypatch, caplog, generator_kept):
    class Reading(TorchDecoder):
        def run(self, tokens, positions, tables, last=1, **how):
            if torch.cuda.is_current_stream_capturing():
                tokens.sum().item()
            return super().run(tokens, positions, tables, last, **how)

    monkeypatch.undo()
    model = tiny()
    scheduler = open_scheduler(model, decoder=Reading(model))
    with caplog.at_level(logging.WARNING):
        tokens = ids_of(scheduler, prompts, Sampling(70, 0))
    assert tokens == [greedy(model, prompt, 70) for prompt in prompts]
    (record,) = [record for record in caplog.records if record.name == batch.logger.name]
    assert "no CUDA graph could be captured" in record.getMessage()


def test_many_clients_some_of_which_leave(tiny, prompts):
    model = tiny()
    known = [greedy(model, prompt, 150) for prompt in prompts]
    [engine] = open_engines(model, max_running=16)

    async def ask(i: int) -> None:
        which, stay = i % len(prompts), i % 10 or 1000
        tokens = engine.generate(prompts[which], Sampling(150, 0))
        found = []
        async for token in tokens:
            found.append(token.id)
            if len(found) >= stay:
                break
        await tokens.aclose()
        assert found == known[which][:stay]

    async def all_at_once() -> None:
        await asyncio.gather(*(ask(i) for i in range(64)))

    try:
        asyncio.run(all_at_once())
        while (stats := engine.stats()).running or stats.cache_used:
            pass
    finally:
        engine.close()


def test_out_of_memory_in_a_prompt_fails_that_one(tiny, prompts):
    model = tiny()
    [engine] = open_engines(model)
    run = engine._scheduler.decoder.run

    def hungry(tokens, positions, tables, last=1, **how):
        is_prompt = positions.shape[1] > 1  # steps may be captured, which nothing is read in
        if is_prompt and ((positions >= 0).sum(1) == 70).any():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return run(tokens, positions, tables, last, **how)

    engine._scheduler.decoder.run = hungry

    async def ask(prompt: list[int]) -> list[int] | str:
        try:
            return [token.id async for token in engine.generate(prompt, Sampling(40, 0))]
        except Exception as error:
            return type(error).__name__

    async def all_at_once() -> list:
        return await asyncio.gather(*map(ask, prompts[:3]))

    try:
        first, failed, last = asyncio.run(all_at_once())
    finally:
        engine.close()
    assert failed == "OutOfMemory"
    assert [first, last] == [greedy(model, prompts[i], 40) for i in (0, 2)]
