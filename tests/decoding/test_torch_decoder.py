"""Models of transformers in the engine: token for token what their own generate gives."""

import pytest
import torch
from greedy import run_all
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding.engine import Sampling
from twellctl.decoding.lone_decoder import LoneDecoder
from twellctl.decoding.opening import describe_decoder, open_scheduler
from twellctl.decoding.paged_cache import PagedCache, page_bytes
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.errors import TwellError
from twellctl.firing.counts import fired_meter
from twellctl.models.defaults import LONGEST

PAGED = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2"]
PAGE_BYTES = 2 * 64 * 2 * (8 + 8) * 4  # of two layers, two heads of 8, float32


def greedy(scheduler, prompts: list[list[int]], count: int) -> list[list[int]]:
    return run_all(scheduler, prompts, Sampling(count, 0))[0]


@pytest.mark.parametrize("family", [*PAGED, "falcon_h1"])
def test_greedy_tokens_are_those_of_generate(tiny, generated, prompts, family, caplog):
    model = tiny(family)
    known = [generated(model, prompt, 12) for prompt in prompts]
    scheduler = open_scheduler(model, max_running=3)
    kind = TorchDecoder if family in PAGED else LoneDecoder
    assert type(scheduler.decoder) is kind
    alone = "one sequence at a time (FalconH1ForCausalLM keeps more than keys and values of "
    alone = f"transformers' own code, {alone}attention)"
    told = "transformers' own code (the decode kernels need an NVIDIA GPU)"
    assert describe_decoder(model) == (told if kind is TorchDecoder else alone)
    assert greedy(scheduler, prompts, 12) == known  # side by side, some joining later
    assert greedy(scheduler, prompts[:1], 12) == known[:1]
    said = [record.getMessage() for record in caplog.records if "decoding" in record.name]
    assert said == ([] if kind is TorchDecoder else [f"the engine runs {alone}"])


def test_little_room_changes_no_token(tiny, generated, prompts):
    model, prompts = tiny(), [prompts[i] for i in (0, 3, 4)]
    known = [generated(model, prompt, 70) for prompt in prompts]
    scheduler = open_scheduler(model, cache_bytes=6 * PAGE_BYTES, max_running=5)
    assert page_bytes(scheduler.decoder.shapes) == PAGE_BYTES
    assert scheduler.admission.pool.capacity == 5
    calls, run = [], scheduler.decoder.run
    scheduler.decoder.run = lambda *inputs, **how: calls.append(inputs[0]) or run(*inputs, **how)
    assert greedy(scheduler, prompts, 70) == known
    read = sum(len(tokens) for tokens in calls if tokens.shape[1] > 1)
    assert read > len(prompts)  # one was evicted, and read again


def test_chunks_of_a_prompt_change_no_token(tiny, generated, prompts, monkeypatch):
    monkeypatch.setattr(TorchDecoder, "prefill_chunk", 50)
    for family in ("llama", "mistral"):
        model = tiny(family)
        known = [generated(model, prompt, 20) for prompt in prompts]
        assert greedy(open_scheduler(model), prompts, 20) == known


def fired_shares(model, tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), L]`, as the profile counts them."""
    shares = []
    with torch.no_grad(), fired_meter(model, lambda _, __, active: shares.append(active != 0)):
        model(torch.tensor([tokens]))
    return torch.stack([share.float().mean(-1) for share in shares], 1)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_densities_are_counted_at_the_activation(tiny, prompts, family):
    model, found = tiny(family), []
    scheduler = open_scheduler(model)
    for events in scheduler.run(prompts[1:3], Sampling(8, 0, densities=True)):
        found += events
    for i in range(2):
        (sequence, *_), tokens = zip(*[e for e in found if e[0].client == i], strict=True)
        known = fired_shares(model, sequence.tokens[:-1])[-8:]
        assert torch.allclose(torch.tensor([token.densities for token in tokens]), known)
        assert 0.2 < known.mean() < 0.8
    total = sum(torch.tensor(token.densities) for _, token in found)
    assert scheduler.reports.fired.tolist() == pytest.approx(total.tolist())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_log_probabilities_are_the_models_own(tiny, prompts):
    model = tiny()
    sampling = Sampling(6, 1.3, 0.8, 20, seed=4, top_logprobs=3)
    found = [told for each in open_scheduler(model).run([prompts[1]], sampling) for told in each]
    tokens = found[0][0].tokens
    with torch.no_grad():
        known = model(torch.tensor([tokens])).logits[0, -7:-1].log_softmax(-1)
    for (_, token), row in zip(found, known, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        values, ids = row.topk(3)
        assert [t for t, _ in token.top] == ids.tolist()
        assert [value for _, value in token.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_seeded_draw_is_the_same_alone_in_a_crowd_and_after_eviction(tiny, prompts):
    model = tiny()
    sampling = Sampling(70, 0.8, 0.95, 40, seed=11)

    def draw(scheduler, prompts) -> list[int]:
        return run_all(scheduler, prompts, sampling)[0][-1]

    alone = draw(open_scheduler(model), prompts[:1])
    crowd = [prompts[3], prompts[4], prompts[0]]
    assert draw(open_scheduler(model), crowd) == alone
    assert draw(open_scheduler(model, cache_bytes=6 * PAGE_BYTES, max_running=5), crowd) == alone


def test_bf16_parts_only_where_the_best_two_are_close(tiny, prompts):
    model = tiny().bfloat16()
    scheduler = open_scheduler(model)
    for prompt, tokens in zip(prompts, greedy(scheduler, prompts, 40), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < 0.1


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2"])
def test_prompts_read_together_give_what_each_gives_alone(tiny, prompts, family):
    decoder = TorchDecoder(tiny(family))
    lengths = list(map(len, prompts))
    tokens = torch.zeros(5, 130, dtype=torch.int32)
    positions = torch.full_like(tokens, -1)
    tables = torch.zeros(5, 3, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, 130 - len(prompt) :] = torch.tensor(prompt)
        positions[row, 130 - len(prompt) :] = torch.arange(len(prompt))
        tables[row] = torch.tensor([1, 2, 3]) + 3 * row
    with torch.inference_mode():
        together, alone = (PagedCache(decoder.shapes, 16, decoder.device) for _ in range(2))
        decoder.attach(together)
        logits, fired = decoder.run(tokens, positions, tables)
        decoder.attach(alone)
        for row, length in enumerate(lengths):
            inputs = tokens[row, -length:], positions[row, -length:], tables[row]
            logits_alone, fired_alone = decoder.run(*(part[None] for part in inputs))
            assert torch.allclose(logits[row], logits_alone[0], atol=1e-4)
            assert torch.equal(fired[:, row], fired_alone[:, 0])
    pairs = zip([*together.keys, *together.values], [*alone.keys, *alone.values], strict=True)
    for pages, known in pairs:
        assert torch.allclose(pages[1:], known[1:], atol=1e-4)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "phi3"])
@torch.inference_mode()
def test_tokens_to_verify_get_the_logits_of_the_model(tiny, family, consecutive):
    """After a prompt in two chunks; one row has fewer tokens than the others."""
    model = tiny(family)
    decoder = TorchDecoder(model, consecutive=consecutive)
    decoder.attach(PagedCache(decoder.shapes, 9, decoder.device, by_tokens=consecutive))
    usual = model.config._attn_implementation
    tokens = torch.randint(1, 500, (3, 80), dtype=torch.int32)
    positions = torch.arange(80, dtype=torch.int32).repeat(3, 1)
    tables = torch.tensor([[1, 2], [5, 6], [7, 8]], dtype=torch.int32)
    known = model(tokens.long()).logits
    for some in (slice(0, 33), slice(33, 60)):
        decoder.run(tokens[:, some], positions[:, some], tables, last=0)
    together, _ = decoder.run(tokens[:, 60:76], positions[:, 60:76], tables, last=16)
    torch.testing.assert_close(together, known[:, 60:76], rtol=1e-4, atol=1e-4)
    step, fired = decoder.run(tokens[:, 76:77], positions[:, 76:77], tables)
    torch.testing.assert_close(step, known[:, 76:77], rtol=1e-4, atol=1e-4)
    assert fired.shape == (0 if consecutive else 2, 3, 1)
    places = positions[:, 60:76].clone()
    tokens[1, 60:76], places[1] = 0, -1
    tokens[1, 72:76], places[1, 12:] = torch.arange(9, 13), torch.arange(77, 81) - 17
    ragged, _ = decoder.run(tokens[:, 60:76], places, tables, last=3)
    for row in (0, 2):
        torch.testing.assert_close(ragged[row], known[row, 73:76], rtol=1e-4, atol=1e-4)
    other = model(torch.cat([tokens[1:2, :60], tokens[1:2, 72:76]], 1).long()).logits
    torch.testing.assert_close(ragged[1], other[0, 61:64], rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == usual


def test_garbage_after_a_row_is_not_seen(tiny):
    """Pages come from others who may have left NaN there."""
    decoder = TorchDecoder(tiny())
    tokens = torch.arange(1, 71, dtype=torch.int32).repeat(2, 1)
    positions = torch.stack([torch.arange(70), torch.arange(-50, 20).clamp(min=-1)]).int()
    tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)

    def logits(garbage: float) -> list[torch.Tensor]:
        cache = PagedCache(decoder.shapes, 5, decoder.device)
        decoder.attach(cache)
        for pages in (*cache.keys, *cache.values):
            pages.fill_(garbage)
        first, _ = decoder.run(tokens, positions, tables)
        rows = torch.tensor([[9, 8, 0], [70, 20, 0]], dtype=torch.int32)[..., None]
        second, _ = decoder.run(*rows, torch.cat([tables, torch.zeros_like(tables[:1])]))
        return [first, second]

    with torch.inference_mode():
        for clean, full in zip(logits(0.0), logits(torch.nan), strict=True):
            assert torch.equal(clean, full)


def test_widths_are_few_and_enough(tiny):
    decoder = TorchDecoder(tiny())
    assert decoder.widths(1) == [1]
    assert decoder.widths(64) == [1, 2, 4, 8, 16, 32, 64]
    assert decoder.widths(100) == [1, 2, 4, 8, 16, 32, 64, 100]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("falcon_h1", {}, "keeps more than keys and values"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic rotary"),
        ("llama", {"attn_implementation": "flex_attention"}, "flex_attention takes no mask"),
        ("llama", {"attention_chunk_size": 64}, "attends in chunks"),
    ],
)
def test_what_it_cannot_drive_is_said(tiny, family, changes, said):
    assert said in TorchDecoder.why_not(tiny(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("mistral", {"attn_implementation": "eager"}),
    ],
)
def test_dynamic_positions_and_eager_attention_too(tiny, generated, prompts, family, changes):
    model = tiny(family, **changes)
    known = [generated(model, prompt, 20) for prompt in prompts]
    assert greedy(open_scheduler(model), prompts, 20) == known


def test_a_cache_too_small_for_a_page_is_refused(tiny):
    with pytest.raises(TwellError, match="two pages of 16384 bytes, got 20000"):
        open_scheduler(tiny(), cache_bytes=20_000)


def test_the_context_is_no_longer_than_the_cache(tiny):
    assert open_scheduler(tiny()).context == 256
    assert open_scheduler(tiny(), cache_bytes=4 * PAGE_BYTES).context == 3 * 64


def test_a_model_that_names_no_context(generated):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512, "state_size": 4}
    config = AutoConfig.for_model("mamba", **sizes, eos_token_id=None, pad_token_id=0)
    assert not hasattr(config, "max_position_embeddings")
    model = AutoModelForCausalLM.from_config(config).eval()
    scheduler = open_scheduler(model)
    assert scheduler.context == LONGEST
    assert greedy(scheduler, [[1, 2, 3]], 9) == [generated(model, [1, 2, 3], 9)]
