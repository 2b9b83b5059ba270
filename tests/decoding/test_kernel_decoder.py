"""The decoder over kernels with plain PyTorch in their place: what it hands to them, on a CPU."""

import contextlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from twellctl.bundle import twell_ways
from twellctl.bundle.twell_launch import Limits
from twellctl.bundle.twell_model import gated_ffns, use_kernels
from twellctl.bundle.twell_nvrtc import KernelError
from twellctl.bundle.twell_ways import FEW_WAYS, Way
from twellctl.decoding import down_copies, few_ways, step_forms
from twellctl.decoding import kernel_decoder as module
from twellctl.decoding.attention import plan_attend
from twellctl.decoding.batch import Batch
from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.pages import PAGE
from twellctl.decoding.sampler import Field, Variant, choose

H200 = Limits(132, 227 << 10, 50 << 20, (9, 0))
SIZES = {"hidden_size": 64, "head_dim": 64}
TWELL = {"tile": 256, "slots": [32, 32]}


class Kernels:
    """Stands in for the compiled ones; `prepared`: the entries that were asked for."""

    def __init__(self, failure: str | None = None):
        self.prepared, self.failure = (), failure
        self.taken: list[str] = []  # the ways of FFNs

    def prepare(self, names) -> None:
        self.prepared = names
        if self.failure:
            raise KernelError(self.failure)

    def launch(self, name, grid, block, args, *, overlap) -> None:
        """`choose`; the others are stood in for with their launches."""
        logits, V, fields, _, fired, L, records, _, _, best, tickets = args
        assert (name, grid[1], V, L) == ("choose", *logits.shape, len(fired))
        assert len(best) >= len(logits) <= len(tickets)
        if records.dim() > 2:
            records = records[fields[Field.SLOT, 0]]
        fields[Field.SLOT] ^= 1
        records[:, 0] = fields[Field.TOKEN] = choose(logits, fields, True)
        records[:, 1 : 1 + L] = fired.T
        fields[Field.POSITION] = (fields[Field.POSITION] + 1).minimum(fields[Field.LIMIT])


def rotated(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[:, None] for table in angles)
    return heads * cos + rotate_half(heads) * sin


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def embed_norm(kernels, tokens, table, weight, eps, counts) -> tuple[Tensor, Tensor]:
    counts.zero_()
    x = F.embedding(tokens, table)
    return x, norm(x, weight, eps)


def attend(kernels, plan, layer, qkv, positions, tables, rotary, workspace) -> Tensor:
    assert len(qkv) == plan.B
    assert workspace.parts.numel() >= plan.num_parts
    assert workspace.tickets.numel() >= plan.num_tickets
    q, k, v = qkv.unflatten(1, (-1, plan.D)).split((plan.H, plan.Hkv, plan.Hkv), 1)
    if layer.q_norm is not None:
        q, k = norm(q, layer.q_norm, layer.eps), norm(k, layer.k_norm, layer.eps)
    angles = tuple(table[positions.long()] for table in rotary)
    q, k = rotated(q, angles), rotated(k, angles)
    rows = []
    for row, position in enumerate(positions.tolist()):
        page, slot = int(tables[row, position // PAGE]), position % PAGE
        layer.keys[page, :, slot], layer.values[page, :, slot] = k[row], v[row]
        start = max(0, position + 1 - layer.window) if layer.window else 0
        keys, values = (
            pages[tables[row].long()].transpose(0, 1).flatten(1, 2)[:, start : position + 1]
            for pages in (layer.keys, layer.values)
        )
        ours = q[row].unflatten(0, (plan.Hkv, -1))
        scores = torch.einsum("gsd,gpd->gsp", ours, keys) * layer.scale
        rows.append(torch.einsum("gsp,gpd->gsd", scores.softmax(-1), values).flatten())
    return torch.stack(rows)


def linear(kernels, limits, x, weight, bias=None, *, residual=None, **how) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def gated(kernels, limits, x, ffn, *, overlap, counts=None) -> Tensor:
    gate = F.linear(x, ffn.w_gate, ffn.b_gate)
    if counts is not None:
        counts += (gate > 0).sum(-1)
    return F.relu(gate) * F.linear(x, ffn.w_up, ffn.b_up)


def played(way: Way) -> Way:
    def run(kernels, limits, x, ffn, *, residual, counts, overlap) -> Tensor:
        kernels.taken.append(way.name)
        hidden = gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
        return residual + F.linear(hidden, ffn.w_down.t(), ffn.b_down)

    return replace(way, run=run)


def noted(way: Way) -> Way:
    """The way itself, over stand-ins of its kernels."""

    def run(kernels, *given, **how) -> Tensor:
        kernels.taken.append(way.name)
        return way.run(kernels, *given, **how)

    return replace(way, run=run)


def rotary_tables(rotary: nn.Module, num_positions: int, device) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(torch.empty(1), torch.arange(num_positions)[None])
    return cos[0], sin[0]


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    made = Kernels()
    for name, stand_in in {
        "kernels_for": lambda sources, index: made,
        "device_limits": lambda index: H200,
        "what_is_missing": lambda: None,
        "embed_norm": embed_norm,
        "rms_norm": lambda kernels, *inputs: norm(*inputs),
        "attend": attend,
        "few_linear": linear,
        "takes_hopper_kernels": lambda index: True,
        "rotary_tables": rotary_tables,
    }.items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(few_ways, "few_linear", linear)
    monkeypatch.setattr(few_ways, "few_gated", gated)
    monkeypatch.setattr(few_ways, "FEW_WAYS", tuple(map(played, FEW_WAYS)))
    monkeypatch.setattr(module, "BY_COLUMNS", noted(few_ways.BY_COLUMNS))
    monkeypatch.setattr(down_copies, "_memory", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(twell_ways, "WAYS", tuple(map(played, twell_ways.WAYS)))
    return made


def run(scheduler, prompts, count: int) -> tuple[list[list[int]], list]:
    ids, tokens = [[] for _ in prompts], []
    for events in scheduler.run(prompts, Sampling(count, 0, densities=True)):
        for sequence, event in events:
            assert not isinstance(event, Exception), event
            ids[sequence.client] += [event.id] if event else []
            tokens += [event] if event else []
    return ids, tokens


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
}


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_generate(tiny, generated, prompts, case, is_sparse):
    family, changes = CASES[case]
    model = tiny(family, **SIZES | changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    if case == "llama":
        model.config.twell = TWELL
    known = [generated(model, prompt, 60) for prompt in prompts]
    decoder = KernelDecoder(model, sparse=is_sparse)
    scheduler = open_scheduler(model, max_running=3, decoder=decoder)
    found, tokens = run(scheduler, prompts, 60)
    assert found == known
    if is_sparse:
        assert all(0.1 < share < 0.9 for token in tokens for share in token.densities)
        assert {len(token.densities) for token in tokens} == {2}
    else:
        assert {token.densities for token in tokens} == {()}


def forms_of(tiny, densities: list[float] | None, rows: int) -> dict[str, list[str]]:
    model = tiny(**SIZES, intermediate_size=8192)
    model.config.twell = TWELL | ({} if densities is None else {"densities": densities})
    decoder = KernelDecoder(model)
    decoder.open_cache(3)
    forms = decoder.forms(rows).items()
    return {name: [way.name for way in form.args[0]] for name, form in forms}


def test_the_forms_of_a_step(tiny, monkeypatch):
    """By rule first, which goes by what a profile told of each layer; then each way for all."""
    pairs, union, dense = ({name: [name] * 2} for name in ("pairs", "union", "dense"))
    assert list(forms_of(tiny, None, 4).items()) == list((union | pairs | dense).items())
    assert list(forms_of(tiny, [0.01, 0.01], 4)) == ["pairs", "union", "dense"]
    mixed = {"pairs and union": ["pairs", "union"]}
    assert list(forms_of(tiny, [0.01, 0.9], 4).items()) == list(
        (mixed | pairs | union | dense).items()
    )
    assert list(forms_of(tiny, [0.01, 0.9], 3)) == ["union", "dense"]
    monkeypatch.setattr(module, "takes_hopper_kernels", lambda index: False)
    assert list(forms_of(tiny, [0.01, 0.9], 4)) == ["union", "dense"]


@pytest.fixture
def timed(monkeypatch, tmp_path) -> dict[str, float]:
    """Steps can be measured, on a CPU: the times are those told; every form is run."""
    times = {"pairs": 3.0, "union": 2.0, "dense": 4.0}

    def graph_ms(runs):
        timed.measured.append(list(runs))
        for run in runs.values():
            run()
        return {name: times[name] for name in runs}

    timed = SimpleNamespace(times=times, measured=[])
    monkeypatch.setattr(step_forms, "can_measure", lambda device: True)
    monkeypatch.setattr(step_forms, "graph_ms", graph_ms)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    return timed


@torch.inference_mode()
def open_decoder(tiny, densities: list[float] | None = None) -> KernelDecoder:
    model = tiny(**SIZES)
    model.config.twell = TWELL | ({} if densities is None else {"densities": densities})
    decoder = KernelDecoder(model)
    decoder.open_cache(9)
    return decoder


def inputs(rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    tables = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) + 1
    return torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32), tables


@torch.inference_mode()
def way_of_step(decoder: KernelDecoder, kernels: Kernels) -> str:
    """By which both layers of a step of 4 rows go, once what is measured was."""
    decoder.step(*inputs())
    kernels.taken.clear()
    decoder.step(*inputs())
    (first, second) = kernels.taken
    assert first == second
    return first


@torch.inference_mode()
def test_all_forms_of_a_step_agree(tiny):
    decoder = open_decoder(tiny)
    (logits, counts), *others = (form(*inputs()) for form in decoder.forms(4).values())
    assert counts.sum() > 0
    assert len(others) == 2
    for other, counted in others:
        assert torch.equal(other, logits)
        assert torch.equal(counted, counts)


@torch.inference_mode()
def test_the_fastest_form_is_measured_once_and_kept(tiny, timed, kernels):
    assert way_of_step(open_decoder(tiny), kernels) == "union"
    assert timed.measured == [["union", "pairs", "dense"]]
    timed.times["pairs"] = 1.0
    assert way_of_step(open_decoder(tiny), kernels) == "union"  # in another process
    assert len(timed.measured) == 1
    profiled = open_decoder(tiny, [0.01, 0.01])  # another density
    assert way_of_step(profiled, kernels) == "pairs"
    assert len(timed.measured) == 2
    profiled.step(*inputs(3))
    assert timed.measured[2:] == [["union", "dense"]]
    assert [profiled.chosen(rows) for rows in (2, 3, 4, 5)] == ["union", "union", "pairs", None]


def test_of_forms_that_are_as_fast_the_first_is_taken(tiny, timed, kernels):
    timed.times.update(pairs=1.99, dense=1.985)
    assert way_of_step(open_decoder(tiny), kernels) == "union"


def has_copies(decoder: KernelDecoder) -> bool:
    return bool(decoder._copies._made)


@torch.inference_mode()
def test_w_down_is_copied_only_while_a_choice_wants_it(tiny, timed, kernels):
    decoder = open_decoder(tiny)
    assert not has_copies(decoder)
    assert way_of_step(decoder, kernels) == "union"
    assert timed.measured[0][-1] == "dense"  # for which there were copies
    assert not has_copies(decoder)
    timed.times["dense"] = 1.0
    decoder.step(*inputs(3))
    assert decoder.chosen(3) == "dense"
    assert has_copies(decoder)
    timed.times["dense"] = 9.0
    decoder.step(*inputs(2))
    assert decoder.chosen(2) == "union"
    assert has_copies(decoder)  # steps of 3 rows still go densely
    again = open_decoder(tiny)
    again.step(*inputs(3))
    assert (again.chosen(3), len(timed.measured)) == ("dense", 3)  # as kept
    assert has_copies(again)


@torch.inference_mode()
def test_a_kept_dense_form_is_taken_only_where_it_is_possible(tiny, timed, kernels, monkeypatch):
    timed.times["dense"] = 1.0
    assert way_of_step(open_decoder(tiny), kernels) == "dense"
    monkeypatch.setattr(down_copies, "_memory", lambda device: (0, 1 << 40))
    decoder = open_decoder(tiny)
    assert way_of_step(decoder, kernels) == "union"
    assert timed.measured == [["union", "pairs", "dense"], ["union", "pairs"]]
    assert not has_copies(decoder)


@pytest.mark.parametrize("content", ["{", "[]", '{"graph": "best"}', '{"graph": []}', "null"])
def test_a_kept_form_that_makes_no_sense_is_measured_again(tiny, timed, kernels, tmp_path, content):
    way_of_step(open_decoder(tiny), kernels)
    kept = tmp_path / "routes.json"
    (key,) = json.loads(kept.read_text())
    kept.write_text(content if content == "{" else f"{{{json.dumps(key)}: {content}}}")
    assert way_of_step(open_decoder(tiny), kernels) == "union"
    assert len(timed.measured) == 2
    assert json.loads(kept.read_text())[key]["graph"] == "union"


def test_a_form_that_does_not_fit_into_memory_is_not_taken(tiny, timed, kernels, tmp_path):
    timed.times["union"] = math.inf
    assert way_of_step(open_decoder(tiny), kernels) == "pairs"
    assert not (tmp_path / "routes.json").exists()  # there may be more memory another time


def test_what_is_measured_is_told(tiny, timed, kernels, caplog):
    with caplog.at_level("INFO", logger=step_forms.__name__):
        way_of_step(open_decoder(tiny), kernels)
    (record,) = caplog.records
    assert record.getMessage() == (
        "steps of 4 rows, tables of 2 pages: union is the fastest, "
        "ms: union 2.000, pairs 3.000, dense 4.000"
    )


def test_a_step_in_a_capture_goes_by_rule(tiny, timed, kernels, monkeypatch):
    monkeypatch.setattr(step_forms, "can_measure", lambda device: False)
    assert way_of_step(open_decoder(tiny, [1e-4, 1e-4]), kernels) == "pairs"
    assert timed.measured == []


@torch.inference_mode()
def test_a_batch_measures_before_it_captures(tiny, timed, kernels, monkeypatch):
    """And what it captures is the fastest form alone."""
    order, batch = [], Batch(open_decoder(tiny), 4, 2)
    batch._captures, batch._graph_memory = True, None

    @contextlib.contextmanager
    def graph(*given, **how):
        order.append(("captures", list(timed.measured)))
        kernels.taken.clear()
        yield
        order.append(("captured", list(kernels.taken)))

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=list))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    batch.load([np.zeros(len(Field), np.int32)] * 4, [[1], [2], [3], [4]])
    for _ in range(2):
        batch.launch(1, Variant())
    assert order == [
        ("captures", [["union", "pairs", "dense"]]),
        ("captured", ["union", "union"]),
    ]


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_a_model_that_was_decoded_can_be_trained_and_saved(tiny, prompts, tmp_path, is_sparse):
    model = tiny("qwen3", **SIZES)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    run(open_scheduler(model, decoder=KernelDecoder(model, sparse=is_sparse)), prompts[:1], 3)
    ids = torch.tensor(prompts[:1])
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.is_inference(), name
        assert parameter.grad is not None, name
        assert torch.equal(parameter, kept[name]), name
    model.save_pretrained(tmp_path)
    for name, weight in type(model).from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(weight, kept[name]), name


@pytest.mark.parametrize("heads", [(9, 3), (15, 5), (4, 2)])
def test_there_is_room_for_the_parts_of_any_number_of_rows(tiny, heads):
    """Splits of 6 rows of 9 heads, three of which share keys, need more than those of 4 or 8."""
    H, Hkv = heads
    sizes = {"hidden_size": 64 * H, "num_attention_heads": H, "num_key_value_heads": Hkv}
    decoder = KernelDecoder(tiny(**sizes, head_dim=64, max_position_embeddings=2048))
    assert decoder.max_rows == 64
    with torch.inference_mode():
        decoder.open_cache(33)
    for B in range(1, 65):
        for width in decoder.widths(32):
            plan = plan_attend(B, H, Hkv, 64, width * PAGE, H200.num_sms)
            assert decoder._workspace.parts.numel() >= plan.num_parts, (B, width)
            assert decoder._workspace.tickets.numel() >= plan.num_tickets, (B, width)


def test_the_dense_form_of_a_model_over_twell_is_refused(tiny):
    model = tiny(**SIZES)
    model.config.twell = TWELL
    KernelDecoder(model, sparse=False)
    KernelDecoder(model)
    use_kernels(model, "sources")  # here are none to register
    with pytest.raises(ValueError, match="make its dense form before"):
        KernelDecoder(model, sparse=False)


# ---- what it does not take ----


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_what_it_takes_is_compiled_before_the_first_request(tiny, as_on_a_gpu, kernels):
    assert KernelDecoder.why_not(tiny(**SIZES).bfloat16()) is None
    assert {"choose", "embed_norm", "rms_norm", "attend_64_2"} <= set(kernels.prepared)
    assert {"few_linear_8", "few_gated_4"} <= set(kernels.prepared)
    assert {"few_down", "few_down_wide_1", "few_hidden_2_long"} <= set(kernels.prepared)
    kernels.failure = "NVRTC found no compiler"
    assert KernelDecoder.why_not(tiny(**SIZES).bfloat16()) == "NVRTC found no compiler"


def relu6(model) -> None:
    for ffn in gated_ffns(model):
        ffn.act_fn = nn.ReLU6()


def wide_norm(model) -> None:
    model.model.norm.float()


def other_head(model) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


def hook(model) -> None:
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *given: None)


def hook_on_ffn(model) -> None:
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *given: None)


def hook_on_layer(model) -> None:
    model.model.layers[0].register_forward_hook(lambda *given: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hook, "self_attn.o_proj of LlamaForCausalLM has hooks"),
        (hook_on_ffn, "mlp of LlamaForCausalLM has hooks"),
        (hook_on_layer, "a layer of LlamaForCausalLM has hooks"),
        (relu6, "the FFNs of LlamaForCausalLM are not ReLU"),
        (wide_norm, "take bf16, not float32"),
        (other_head, "the LM head of LlamaForCausalLM are not plain layers"),
    ],
)
def test_what_would_be_passed_by_is_refused(tiny, as_on_a_gpu, change, said):
    model = tiny(**SIZES).bfloat16()
    change(model)
    assert said in KernelDecoder.why_not(model)


def test_fused_weights_are_not_copied(tiny):
    model = tiny("phi3", hidden_size=256)
    decoder = KernelDecoder(model)
    with torch.inference_mode():
        decoder.open_cache(3)
    for layer, made in zip(model.model.layers, decoder._layers, strict=True):
        assert made.qkv.weight is layer.self_attn.qkv_proj.weight
        fused = layer.mlp.gate_up_proj.weight
        halves = made.ffn.w_gate, made.ffn.w_up
        assert [half.data_ptr() for half in halves] == [
            fused.data_ptr(),
            fused.data_ptr() + fused.nbytes // 2,
        ]


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "default", "partial_rotary_factor": 0.75}, "Phi3ForCausalLM 48 of 64"),
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


def test_a_step_is_one_kernel_where_model_and_gpu_are_such(tiny, monkeypatch):
    wide = {"hidden_size": 2048, "head_dim": 64, "num_attention_heads": 32, "vocab_size": 512}
    takes = tiny("llama", **wide)
    assert module.why_not_one_kernel(takes) is None
    assert "a hidden size of 64" in module.why_not_one_kernel(tiny("llama", **SIZES))
    mixed = tiny("llama", **wide)
    monkeypatch.setattr(module, "_window", lambda model, i: 40 if model is mixed and i else None)
    assert "the same window" in module.why_not_one_kernel(mixed)
    takes.lm_head.bias = nn.Parameter(torch.zeros(512))
    assert "no bias" in module.why_not_one_kernel(takes)
    monkeypatch.setattr(module, "takes_hopper_kernels", lambda index: False)
    takes.lm_head.bias = None
    assert "for Hopper" in module.why_not_one_kernel(takes)
