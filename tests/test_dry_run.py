"""--dry-run: some real steps of finetune, the estimates of convert; nothing is written."""

import dataclasses
import itertools
import json
import re
import warnings
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from finetune_runs import InterruptAt, small, weights

from twellctl import dry_run as module
from twellctl.dry_run import as_flags, dry_run
from twellctl.errors import TwellError, UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.fitting.plan import Rates, Shape, planned
from twellctl.fitting.settings import Fit
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_tokenizer
from twellctl.screens.make import tried_out
from twellctl.text.blocks import token_stream
from twellctl.text.reading import read_texts
from twellctl.training.memory import least_bytes
from twellctl.training.recipe import run_folder
from twellctl.training.runs import last_checkpoint
from twellctl.training.step_cost import step_operations
from twellctl.training.trainer import SparseTrainer


@pytest.fixture
def few_steps(monkeypatch):
    """Two are tried, where a test does not look at what they took."""
    monkeypatch.setattr(module, "STEPS", 2)


def test_it_measures_and_writes_nothing(success, relu_llama, text_file, tmp_path):
    words = (f"--data={text_file}", "--seq-len=32", "--batch-size=4", "--micro-batch-size=2")
    out, more = tmp_path / "out", ("--max-steps=5000", "--dry-run")
    stdout = success("finetune", relu_llama, out, *words, *more)[0].splitlines()
    assert re.match(r"5000 steps, 640000 tokens, the text about \d+\.\d times, ", stdout[0])
    assert re.match(r"about .+ at \d+ tokens/s", stdout[1])
    peak, total = re.fullmatch(r"(\S+) of (\S+) GiB of memory", stdout[2]).groups()
    assert 0 < float(peak) <= float(total)
    assert stdout[3].startswith("a checkpoint takes 0.000")
    assert stdout[4].startswith("to measure its speed with random weights: twellctl bench decode")
    assert len(stdout) == 5
    assert list(tmp_path.iterdir()) == []


def test_rate_and_sizes_are_those_of_the_run(relu_llama, text_file):
    recipe, notes = small(text_file, max_steps=50), []
    found = dry_run(relu_llama, recipe, doing=notes.append)
    assert notes[:2] == ["reading the first of the text", "loading the model"]
    assert notes[2:] == [f"taking step {n} of 5 to measure" for n in range(1, 6)]
    assert found.checkpoint_bytes == 0
    assert found.tokens_per_second > 0
    assert found.seconds == found.num_tokens / found.tokens_per_second
    assert found.num_tokens == 50 * 4 * 32
    parameters = sum(tensor.numel() for tensor in weights(relu_llama).values())
    assert found.num_trained == parameters + 2 * 96  # and a shift a neuron
    assert found.changes == {}


def test_steps_that_are_slow_on_a_cpu_are_not_taken(relu_llama, text_file, monkeypatch, capsys):
    monkeypatch.setattr(module, "product_rate", lambda: 1e6)
    notes, recipe = [], small(text_file, save_steps=2)
    found = dry_run(relu_llama, recipe, doing=notes.append)
    assert notes == ["reading the first of the text"]
    assert found.num_trained == sum(tensor.numel() for tensor in weights(relu_llama).values())
    assert found.peak_bytes == least_bytes(open_checkpoint(relu_llama), recipe)
    monkeypatch.undo()
    taken = dry_run(relu_llama, recipe)
    assert not taken.is_guess
    assert found.checkpoint_bytes == pytest.approx(taken.checkpoint_bytes, rel=0.02)
    tried_out(found, "")
    said = capsys.readouterr().out
    assert ", by a guess, as a step takes too long to try, " in said
    assert "at least 0.0 of" in said


def test_what_a_step_computes(relu_llama, text_file):
    """What LoRA freezes has no gradient of its own, and activations are computed again."""
    checkpoint, recipe = open_checkpoint(relu_llama), small(text_file, batch_size=3, seq_len=32)
    tensors = weights(relu_llama)
    layers = [t for name, t in tensors.items() if t.ndim == 2 and ".layers." in name]
    inside, head = sum(t.numel() for t in layers), tensors["model.embed_tokens.weight"].numel()
    ours, theirs = 6 * (inside + head), 2 * (inside + head)
    muon = sum(5 * (4 * min(t.shape) * t.numel() + 2 * min(t.shape) ** 3) for t in layers)
    assert step_operations(checkpoint, recipe) == 96 * (ours + theirs) + muon
    alone = replace(recipe, teacher="none", optimizer="adamw")
    assert step_operations(checkpoint, alone) == 96 * ours
    frozen = replace(alone, lora_rank=2, lora_ffn=True, gradient_checkpointing=True)
    assert step_operations(checkpoint, frozen) == 96 * (6 * inside + 6 * head)
    config = {key: value for key, value in checkpoint.config.items() if key != "vocab_size"}
    assert step_operations(replace(checkpoint, config=config), alone) == 96 * ours


def test_epochs_are_about_the_steps_of_the_run(relu_llama, text_file):
    recipe = small(text_file, max_steps=None, epochs=2, eval_fraction=0.0)
    tokenizer = load_tokenizer(open_checkpoint(relu_llama))
    texts = read_texts([str(text_file)], "text")
    tokens = sum(len(some) for some in token_stream(texts, tokenizer))
    expected = 2 * tokens // (4 * 32)
    found = dry_run(relu_llama, recipe)
    assert found.num_steps == pytest.approx(expected, rel=0.25)
    assert found.passes == pytest.approx(2, rel=0.02)


def test_epochs_do_not_depend_on_what_else_a_file_holds(relu_llama, text_file, tmp_path):
    texts = list(read_texts([str(text_file)], "text"))
    files = [tmp_path / f"text{suffix}" for suffix in (".parquet", ".jsonl", ".txt")]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, files[0], compression="zstd")  # which compresses it
    rows = [json.dumps({"more": "x" * 2000, "text": text}) for text in texts]
    files[1].write_text("\n\n".join(rows))
    files[2].write_text("".join(texts))
    how = {"max_steps": None, "epochs": 1, "batch_size": 16, "micro_batch_size": 16}
    wanted, *found = (dry_run(relu_llama, small(f, **how)).num_steps for f in (text_file, *files))
    assert found == pytest.approx([wanted] * 3, rel=0.06)  # short texts, joined in one


def test_too_little_text_is_refused_as_by_the_run(relu_llama, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("yes and no " * 40)
    recipe = small(file, batch_size=24)
    with pytest.raises(TwellError, match="fewer than one batch of 24") as by_the_run:
        finetune(relu_llama, tmp_path / "out", recipe)
    with pytest.raises(TwellError) as found:
        dry_run(relu_llama, recipe)
    assert str(found.value) == str(by_the_run.value)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("flag", "density"), [("target-sparsity=0.75", "0.25"), ("l1-schedule=constant", None)]
)
def test_the_speed_at_the_target_is_left_to_bench(
    success, relu_llama, text_file, tmp_path, monkeypatch, flag, density
):
    monkeypatch.chdir(relu_llama.parent)
    words = ("--dry-run", f"--data={text_file}", "--seq-len=32", "--batch-size=2", f"--{flag}")
    stdout, _ = success("finetune", relu_llama.name, tmp_path / "out", *words, "--max-steps=9")
    command = f"twellctl bench decode --config {relu_llama.name} --density {density}"
    assert (stdout.splitlines()[-1].endswith(command)) == (density is not None)
    assert ("bench" in stdout) == (density is not None)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_checkpoint_takes_what_is_said(relu_llama, text_file, tmp_path, capsys, optimizer):
    recipe = small(text_file, save_steps=2, optimizer=optimizer)
    found = dry_run(relu_llama, recipe)
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "out", recipe, progress=InterruptAt(3))
    folder = last_checkpoint(run_folder(tmp_path / "out"))
    names = ("model.safetensors", "optimizer.pt")
    size = sum((folder / name).stat().st_size for name in names)
    assert found.checkpoint_bytes == pytest.approx(size, rel=0.15)
    tried_out(found, "")
    said = f"a checkpoint takes {found.checkpoint_bytes / 1e9:.3g} GB on disk"
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("few_steps")
def test_what_does_not_fit_is_tried_in_less_memory(relu_llama, text_file, monkeypatch):
    tried, built = [], []
    build, compute_loss = module.build_trainer, SparseTrainer.compute_loss

    def building(checkpoint, teacher, recipe, *rest):
        built.append(recipe.gradient_checkpointing)
        return build(checkpoint, teacher, recipe, *rest)

    def short_of_memory(trainer, model, inputs, *rest, **kwargs):
        size = len(inputs["input_ids"])
        if (size, built[-1]) not in tried:
            tried.append((size, built[-1]))
        if size > 1 and model.get_input_embeddings().weight.grad is None:
            return compute_loss(trainer, model, inputs, *rest, **kwargs)  # the second part fails
        if not built[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute_loss(trainer, model, inputs, *rest, **kwargs)

    monkeypatch.setattr(module, "build_trainer", building)
    monkeypatch.setattr(SparseTrainer, "compute_loss", short_of_memory)
    found = dry_run(relu_llama, small(text_file, batch_size=8, micro_batch_size=4))
    assert tried == [(4, False), (2, False), (1, False), (1, True)]
    assert built == [False, False, False, True]
    assert as_flags(found.changes) == "--micro-batch-size 1 --gradient-checkpointing"
    assert found.tokens_per_second > 0


def test_what_fits_in_the_end_is_measured_whole(relu_llama, text_file, monkeypatch):
    sizes, compute_loss = [], SparseTrainer.compute_loss

    def short_of_memory(trainer, model, inputs, *rest, **kwargs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute_loss(trainer, model, inputs, *rest, **kwargs)

    monkeypatch.setattr(SparseTrainer, "compute_loss", short_of_memory)
    notes = []
    found = dry_run(relu_llama, small(text_file, batch_size=8, micro_batch_size=8), notes.append)
    assert found.changes == {"micro_batch_size": 2}
    assert notes == ["out of memory as asked", "out of memory with --micro-batch-size 4"]
    assert sizes == [8, 4] + [2] * 2 * module.STEPS


@pytest.mark.parametrize(("micro", "seconds"), [(8, 2), (2, 5)])
def test_a_step_of_parts_has_one_optimizer_step(relu_llama, text_file, monkeypatch, micro, seconds):
    ticks = itertools.count()  # a second from one look at the clock to the next
    monkeypatch.setattr(module, "_now", lambda: next(ticks))
    found = dry_run(relu_llama, small(text_file, batch_size=8, micro_batch_size=micro))
    assert found.tokens_per_second == 8 * 32 / seconds


def test_the_second_part_of_a_step_keeps_gradients_of_the_first(relu_llama, text_file, monkeypatch):
    seen = []

    class Seen(module._Clock):
        def on_substep_end(self, args, state, control, **kwargs):
            trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
            seen.append(all(p.grad is not None for p in trained))
            super().on_substep_end(args, state, control, **kwargs)

    monkeypatch.setattr(module, "_Clock", Seen)
    dry_run(relu_llama, small(text_file, batch_size=8, micro_batch_size=2))
    assert seen == [True] * module.STEPS


def test_what_cannot_fit_is_not_even_loaded(relu_llama, text_file, monkeypatch):
    tried, measure = [], module._measure

    def measured(trainer, recipe, *rest):
        tried.append(recipe.param_dtype)
        return measure(trainer, recipe, *rest)

    monkeypatch.setattr(module, "_measure", measured)
    tensors = weights(relu_llama)
    inside = [t for name, t in tensors.items() if t.ndim == 2 and ".layers." in name]
    of_all = sum(t.numel() for t in tensors.values())
    of_inside = sum(t.numel() for t in inside)
    numbers = 4 * of_all - of_inside  # weight, gradient, one momentum or two
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        monkeypatch.setattr(module, "total_bytes", lambda n=numbers * size: n + 4 * of_all)
        found = dry_run(relu_llama, small(text_file))
        assert tried == [dtype]
        assert found.changes.get("param_dtype", "float32") == dtype
        tried.clear()
    monkeypatch.setattr(module, "total_bytes", lambda: of_all)
    with pytest.raises(TwellError, match=r"even with .*--lora-rank 16: that takes 0.0 GiB"):
        dry_run(relu_llama, small(text_file))
    assert tried == []


@pytest.mark.usefixtures("few_steps")
def test_the_compilers_advice_is_not_shown(relu_llama, text_file, monkeypatch, recwarn):
    compute_loss = SparseTrainer.compute_loss

    def advised(*args, **kwargs):
        where = ("lowering.py", 1, "torch._inductor.lowering")
        warnings.warn_explicit("Online softmax is disabled", UserWarning, *where)
        warnings.warn_explicit("mind this", UserWarning, "x.py", 1, "theirs")
        return compute_loss(*args, **kwargs)

    monkeypatch.setattr(SparseTrainer, "compute_loss", advised)
    dry_run(relu_llama, small(text_file))
    said = {str(warning.message) for warning in recwarn}
    assert "mind this" in said
    assert "Online softmax is disabled" not in said


def test_nothing_fits(relu_llama, text_file, monkeypatch):
    def never(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "_measure", never)
    with pytest.raises(TwellError, match="out of memory"):
        dry_run(relu_llama, small(text_file))


def test_refusals(relu_llama, text_file, tmp_path):
    recipe = dataclasses.replace(small(text_file), data=[])
    with pytest.raises(UsageError, match="--data"):
        dry_run(relu_llama, recipe)
    with pytest.raises(TwellError, match="does not exist"):
        dry_run(relu_llama, small(tmp_path / "none.txt"))
    with pytest.raises(UsageError, match="seq-len must be <= 256"):
        dry_run(relu_llama, small(text_file, seq_len=512))


@pytest.mark.usefixtures("few_steps")
def test_no_recorded_part_is_left(relu_llama, text_file, monkeypatch):
    """A process that has one left would not end."""
    trainers, train = [], SparseTrainer.train

    def trained(trainer):
        train(trainer)
        trainer._captured = object()
        trainers.append(trainer)

    monkeypatch.setattr(SparseTrainer, "train", trained)
    dry_run(relu_llama, small(text_file))
    assert [trainer._captured for trainer in trainers] == [None]


def test_plans_are_those_of_runs_that_were_measured():
    """bf16 at 700, TF32 at 400 TFLOP/s. Peak GiB (H100), seconds (H200) as in recipes/LAB.md."""
    device, rates = torch.device("cuda"), Rates(700e12, 400e12)
    small = Shape(24, 896, 4864, 14_912_384, 272_275_968, 151_936, state_bytes=4)
    large = Shape(28, 1536, 8960, 46_797_824, 466_748_928, 151_936, state_bytes=4)
    seven = replace(large, num_layers=7)
    measured = [
        (small, {"tokens": 1_000_000}, 14.4, None),
        (small, {"tokens": 3_000_000}, 27.7, None),
        (small, {"tokens": 500_000, "steps": 0}, None, 13),
        (large, {"tokens": 2_000_000}, 33.6, None),
        (seven, {"tokens": 1_000_000}, None, 36),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
        for shape, settings, gib, seconds in measured:
            found = planned(shape, Fit(data=["x"], eval_windows=64, **settings), device, rates)
            assert gib is None or found.bytes / 2**30 == pytest.approx(gib, rel=0.15)
            assert seconds is None or found.seconds == pytest.approx(seconds, rel=0.35)
        seventy = Shape(80, 8192, 28672, 855_638_016, 2_101_346_304, 128_256)
        found = planned(seventy, Fit(data=["x"], tokens=500_000, steps=0), device, rates)
    assert found.bytes / 2**30 < 141  # one H200
