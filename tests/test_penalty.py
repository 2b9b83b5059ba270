"""The L1 term: value and gradient are plain autograd's, however a step is cut up."""

import functools
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from finetune_runs import InterruptAt, small, weights
from step_gradients import SETTINGS, one_step
from transformers import AutoModelForCausalLM

from twellctl.bundle import twell_model
from twellctl.bundle.twell_model import gated_ffns
from twellctl.bundle.twell_train import _laid_ffn
from twellctl.convert import convert
from twellctl.finetune import Interrupted, finetune
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.text.blocks import read_blocks, token_stream, write_tokens
from twellctl.training.l1_schedule import L1Schedule
from twellctl.training.sparsity import FfnPenalty, compiled_plain

pytestmark = pytest.mark.usefixtures("no_answers")

SEQ_LEN, BATCH = SETTINGS["seq_len"], SETTINGS["batch_size"]


@pytest.fixture(scope="module")
def eight_blocks(tmp_path_factory, tokenizer, text_file):
    """(text file that makes exactly eight blocks, those blocks)."""
    folder = tmp_path_factory.mktemp("eight")
    words = Path(text_file).read_text(encoding="utf-8").replace("\\n", " ").split()
    count = 1
    while len(tokenizer(" ".join(words[:count]))["input_ids"]) + 1 < BATCH * SEQ_LEN + 8:
        count += 1
    text = " ".join(words[:count])
    (folder / "text.txt").write_text(text, encoding="utf-8")
    write_tokens(token_stream([text], tokenizer), folder / "tokens.bin")
    blocks = read_blocks(folder / "tokens.bin", SEQ_LEN)
    assert blocks.shape == (BATCH, SEQ_LEN)
    return folder / "text.txt", torch.from_numpy(blocks.astype("int64"))


@pytest.fixture(scope="module")
def expected(relu_llama, eight_blocks):
    """Gradients of cross-entropy + l1 * penalty by plain autograd over the batch."""
    model = AutoModelForCausalLM.from_pretrained(relu_llama, dtype=torch.float32)
    hidden = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    ids = eight_blocks[1]
    logits = model(ids).logits
    cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    penalty = torch.stack([h.abs().sum(-1).mean() for h in hidden]).mean()
    (cross_entropy + SETTINGS["l1"] * penalty).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare(file, expected):
    saved, gradients = torch.load(file), expected
    assert saved["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = (saved["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_micro_batch_accumulation_and_checkpointing_change_nothing(
    relu_llama, eight_blocks, expected, tmp_path, micro_batch, checkpointing
):
    file = tmp_path / "g.pt"
    one_step(relu_llama, eight_blocks[0], tmp_path / "out", micro_batch, checkpointing, file)
    compare(file, expected)


def test_two_processes_change_nothing(processes, relu_llama, eight_blocks, expected, tmp_path):
    paths = relu_llama, eight_blocks[0], tmp_path / "out", tmp_path / "g.pt"
    assert processes("gradients", 2, *map(str, paths)) == [None, None]
    compare(tmp_path / "g.pt", expected)


def test_densities_are_counted(relu_llama, eight_blocks):
    model = load_model(open_checkpoint(relu_llama))
    penalty = FfnPenalty(model)
    ids = eight_blocks[1]
    model(ids)
    densities, fired = penalty.densities(), []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, out: fired.append(out > 0))
    model(ids)
    expected = [layer.double().mean().item() for layer in fired]
    assert densities.tolist() == pytest.approx(expected, rel=1e-6)


def test_fused_family_is_penalised(make_model, tmp_path, eight_blocks):
    convert(make_model("phi3"), tmp_path / "relu")
    model = load_model(open_checkpoint(tmp_path / "relu")).requires_grad_(True)
    penalty = FfnPenalty(model)
    penalty.begin(eight_blocks[1].numel(), 1.0)
    logits = model(eight_blocks[1]).logits
    (logits * 0).sum().backward()
    assert all(layer.mlp.gate_up_proj.weight.grad.norm() > 0 for layer in model.model.layers)


def penalised_gradients(model, ids) -> dict[str, torch.Tensor]:
    penalty = FfnPenalty(model)
    penalty.begin(ids.numel(), 0.5)
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    penalty.remove()
    return {name: p.grad for name, p in model.named_parameters()}


def test_ffns_that_their_own_modules_compute_are_penalised(relu_llama, eight_blocks):
    """As those with adapters or hooks are."""
    plain, hooked = (load_model(open_checkpoint(relu_llama)) for _ in range(2))
    for model in (plain, hooked):
        model.requires_grad_(True)
    for layer in hooked.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, out: out)
    wanted = penalised_gradients(plain, eight_blocks[1])
    for name, grad in penalised_gradients(hooked, eight_blocks[1]).items():
        torch.testing.assert_close(grad, wanted[name], msg=name)


def test_w_down_and_its_gradient_lie_as_kernels_read_them(relu_llama, eight_blocks, monkeypatch):
    """So that no pass copies one, and no gradient is turned over where it is added up."""
    plain, turned = (load_model(open_checkpoint(relu_llama)) for _ in range(2))
    wanted = penalised_gradients(plain.requires_grad_(True), eight_blocks[1])
    assert all(ffn.down_proj.weight.is_contiguous() for ffn in gated_ffns(plain))  # on the CPU
    monkeypatch.setattr(twell_model, "_kernels_read", lambda *weight: True)
    found = penalised_gradients(turned.requires_grad_(True), eight_blocks[1])
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], msg=name)
    for ffn in gated_ffns(turned):
        weight = ffn.down_proj.weight
        assert weight.t().is_contiguous()
        assert weight.grad.t().is_contiguous()
    in_bf16 = weight.detach().bfloat16()
    laid = _laid_ffn(in_bf16.t(), in_bf16.t(), in_bf16, None)
    assert laid.by_neurons.data_ptr() == in_bf16.data_ptr()


def test_a_run_with_w_down_turned_over_is_the_same(relu_llama, text_file, tmp_path, monkeypatch):
    """Through a checkpoint, from which it goes on, to the files of the result."""
    recipe = small(text_file, penalty="l1", save_steps=5, eval_steps=0)
    plain = finetune(relu_llama, tmp_path / "plain", recipe)
    monkeypatch.setattr(twell_model, "_kernels_read", lambda *weight: True)
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "turned", recipe, progress=InterruptAt(8))
    found = finetune(relu_llama, tmp_path / "turned", recipe, resume=True)
    assert found.cross_entropy == pytest.approx(plain.cross_entropy, rel=1e-4)
    ours, theirs = weights(tmp_path / "turned"), weights(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() <= 1e-3 * weight.norm(), name


def test_ffns_are_as_before_without_the_penalty(relu_llama, eight_blocks):
    model = load_model(open_checkpoint(relu_llama))
    stock, wanted = type(model.model.layers[0].mlp), model(eight_blocks[1]).logits
    penalty = FfnPenalty(model)
    assert type(model.model.layers[0].mlp) is not stock
    torch.testing.assert_close(model(eight_blocks[1]).logits, wanted)
    penalty.remove()
    assert {type(layer.mlp) for layer in model.model.layers} == {stock}
    torch.testing.assert_close(model(eight_blocks[1]).logits, wanted)


def test_compiled_layers_leave_the_ffns_to_themselves(relu_llama, eight_blocks, monkeypatch):
    """One graph before and one behind serve all of them, whatever the coefficient and the route."""
    compile_so = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_so)
    compiled_plain.cache_clear()
    torch._dynamo.reset()
    ids, found = eight_blocks[1], {}
    for compiled in (False, True):
        model = load_model(open_checkpoint(relu_llama)).requires_grad_(True).train()
        penalty = FfnPenalty(model, compiled=compiled)
        if compiled:
            for layer in model.model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
        torch._dynamo.utils.counters.clear()
        for l1 in (0.1, 0.2, 0.3):
            model.zero_grad()
            penalty.begin(ids.numel(), l1)
            penalty.ffns[1].twell_meter.route = "dense" if l1 > 0.2 else None
            loss = model(ids, use_cache=False).logits.square().mean()
            loss.backward()
        found[compiled] = {name: p.grad for name, p in model.named_parameters()}
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        penalty.remove()
    compiled_plain.cache_clear()
    assert graphs <= 3  # with graphs of its own for each layer there are more
    for name, grad in found[False].items():
        torch.testing.assert_close(found[True][name], grad, msg=name)


def test_passes_of_training_go_by_the_density_of_the_step_before(relu_llama, monkeypatch):
    model, asked, run = load_model(open_checkpoint(relu_llama)), [], twell_model.train_ffn
    penalty = FfnPenalty(model)

    def noted(*tensors, density, **how):
        asked.append(density)
        return run(*tensors, density=density, **how)

    monkeypatch.setattr(twell_model, "train_ffn", noted)
    ids, layers = torch.arange(8)[None], range(len(penalty.ffns))
    given = [0.01 * (layer + 1) for layer in layers]
    model.train()(ids)
    penalty.follow(given)
    model(ids)
    with torch.no_grad():
        model(ids)
    nothing = [None for _ in layers]
    assert asked == [*nothing, *given, *nothing]


# ---- the controller against a model of a model: density answers late, by a power


def simulate(schedule, num_steps, *, lag, elasticity, stop_at=None):
    """Densities and coefficients of a run whose density settles within `lag` of the run."""
    log_density, seen = math.log(0.28), []
    for step in range(num_steps):
        learning_rate = max(0.01, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        settled = math.log(0.17) - elasticity * math.log(schedule.l1 / 1e-3)
        settled = min(math.log(0.3), settled)
        log_density += (settled - log_density) * min(1, learning_rate / (lag * num_steps))
        schedule.update(math.exp(log_density), (step + 1) / num_steps, learning_rate)
        seen.append((math.exp(log_density), schedule.l1))
        if step + 1 == stop_at:
            break
    return seen


@pytest.mark.parametrize("start", [2e-6, 2e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("num_steps", [200, 800, 5000])
@pytest.mark.parametrize(("lag", "elasticity"), [(0.02, 0.3), (0.02, 0.5), (0.05, 0.4), (0.1, 0.4)])
def test_target_is_met_from_any_start(start, num_steps, lag, elasticity):
    schedule = L1Schedule(start, 0.07, num_steps)
    seen = simulate(schedule, num_steps, lag=lag, elasticity=elasticity)
    assert seen[-1][0] == pytest.approx(0.07, rel=0.1)
    if start < 1e-2:  # else it begins far beyond what the target needs
        assert min(density for density, _ in seen) > 0.05  # no dive below the target on the way


def test_coefficient_moves_smoothly():
    seen = simulate(L1Schedule(2e-6, 0.01, 500), 500, lag=0.05, elasticity=0.4)
    steps = [math.log(b / a) for (_, a), (_, b) in itertools.pairwise(seen)]
    assert max(map(abs, steps)) <= 0.1 + 1e-12


def test_coefficient_stays_below_its_ceiling():
    schedule = L1Schedule(1e-3, 1e-5, 200, ceiling=0.5)
    simulate(schedule, 200, lag=0.02, elasticity=0.1)
    assert schedule.l1 == pytest.approx(0.5)


def test_state_through_json_goes_on_exactly():
    whole = L1Schedule(2e-5, 0.07, 300)
    seen = simulate(whole, 300, lag=0.05, elasticity=0.4)
    first = L1Schedule(2e-5, 0.07, 300)
    simulate(first, 300, lag=0.05, elasticity=0.4, stop_at=100)
    second = L1Schedule(2e-5, 0.07, 300)
    vars(second).update(json.loads(json.dumps(vars(first))))
    assert second == first
    for step, (density, l1) in enumerate(seen[100:], 100):
        share = max(0.01, 0.5 * (1 + math.cos(math.pi * step / 300)))
        second.update(density, (step + 1) / 300, share)
        assert second.l1 == l1


def test_constant_stays():
    schedule = L1Schedule(2e-5, None, 100)
    schedule.update(0.5, 0.5, 1.0)
    assert schedule.l1 == 2e-5
