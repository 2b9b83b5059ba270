"""finetune as users run it: interrupted, killed, resumed, with adapters, a teacher, nonsense."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback

from twellctl.checkpoint import open_checkpoint
from twellctl.convert import convert
from twellctl.data import read_blocks, token_stream, write_tokens
from twellctl.errors import TwellError, UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.model import load_tokenizer
from twellctl.progress import Progress
from twellctl.recipe import Recipe, recipe_names, resolve_recipe, run_folder
from twellctl.runs import last_checkpoint, mark_complete

SMALL = {
    "seq_len": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "max_steps": 12,
    "l1": 1e-3,
    "learning_rate": 3e-3,
    "eval_blocks": 4,
    "eval_steps": 5,
    "logging_steps": 1,
    "save_steps": 0,
}


def small(text_file: Path, **changes) -> Recipe:
    return resolve_recipe(None, SMALL | {"data": [str(text_file)]} | changes)


class InterruptAt(Progress):
    """Sends this process Ctrl-C when a step ends."""

    def __init__(self, step: int):
        super().__init__(silent=True)
        self.step = step

    def callback(self, trainer, recipe, num_neurons):
        at = self.step

        class Hook(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == at - 1:
                    os.kill(os.getpid(), signal.SIGINT)

        return Hook()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(left: Path, right: Path) -> None:
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def uninterrupted(relu_llama, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    return finetune(relu_llama, out, small(text_file), progress=Progress(silent=True))


def test_result_is_a_stock_relu_model(uninterrupted, relu_llama):
    out = uninterrupted.out
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_act"] == "relu"
    assert config["twell"] == json.loads((relu_llama / "config.json").read_text())["twell"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert not torch.equal(model.lm_head.weight, weights(relu_llama)["lm_head.weight"])
    assert oct((out / "model.safetensors").stat().st_mode)[-3:] == "644"
    assert resolve_recipe(out / "recipe.yaml").max_steps == 12
    assert not run_folder(out).exists()
    assert uninterrupted.cross_entropy < uninterrupted.first_cross_entropy
    assert 0 < uninterrupted.density < 1


def test_interrupted_and_resumed_is_bit_for_bit_the_same(
    uninterrupted, relu_llama, text_file, tmp_path
):
    out, recipe = tmp_path / "out", small(text_file)
    step = random.randint(2, 10)
    print("interrupted at step", step)
    with pytest.raises(Interrupted, match=f"step {step} of 12.*--resume"):
        finetune(relu_llama, out, recipe, progress=InterruptAt(step))
    assert not out.exists()
    with pytest.raises(TwellError, match=f"checkpoint-{step}.*--resume"):
        finetune(relu_llama, out, recipe)
    done = finetune(relu_llama, out, recipe, resume=True, progress=Progress(silent=True))
    assert_same_weights(out, uninterrupted.out)
    assert (done.l1, done.density) == (uninterrupted.l1, uninterrupted.density)
    assert done.first_cross_entropy == uninterrupted.first_cross_entropy


def test_killed_run_resumes_from_the_last_complete_checkpoint(
    uninterrupted, relu_llama, text_file, tmp_path
):
    out = tmp_path / "out"
    recipe = small(text_file, save_steps=3)
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in (SMALL | {"save_steps": 3}).items()]
    command = [sys.executable, "-m", "twellctl", "finetune", str(relu_llama), str(out)]
    process = subprocess.Popen(
        [*command, f"--data={text_file}", *flags], stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if re.match(r"step ([7-9]|10)/", line):
            break
    process.kill()
    process.wait()
    process.stderr.close()
    half = run_folder(out) / "checkpoint-99"  # as if it had been killed while writing one
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    finetune(relu_llama, out, recipe, resume=True, progress=Progress(silent=True))
    assert_same_weights(out, uninterrupted.out)


def test_resume_may_hold_fewer_blocks_at_once(relu_llama, text_file, tmp_path, uninterrupted):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        finetune(relu_llama, out, small(text_file), progress=InterruptAt(4))
    half = run_folder(out) / "checkpoint-99"  # as if it had been killed while writing one
    half.mkdir()
    recipe = small(text_file, micro_batch_size=1, gradient_checkpointing=True)
    finetune(relu_llama, out, recipe, resume=True, progress=Progress(silent=True))
    for name, wanted in weights(uninterrupted.out).items():
        assert torch.allclose(weights(out)[name], wanted, atol=2e-3), name


def test_resume_refuses_another_recipe_and_model(relu_llama, text_file, tmp_path):
    stranger = tmp_path / "stranger"
    shutil.copytree(relu_llama, stranger)
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "out", small(text_file), progress=InterruptAt(2))
    with pytest.raises(UsageError, match="l1 differ"):
        finetune(relu_llama, tmp_path / "out", small(text_file, l1=0.5), resume=True)
    with pytest.raises(UsageError, match="resume it with that model"):
        finetune(stranger, tmp_path / "out", small(text_file), resume=True)
    with pytest.raises(TwellError, match="no run to resume"):
        finetune(relu_llama, tmp_path / "other", small(text_file), resume=True)


@pytest.mark.parametrize("lora_ffn", [False, True])
def test_lora_is_merged(relu_llama, text_file, tmp_path, lora_ffn):
    recipe = small(text_file, lora_rank=8, lora_ffn=lora_ffn, l1=0.05, l1_schedule="constant")
    finetune(relu_llama, tmp_path / "out", recipe, progress=Progress(silent=True))
    before, after = weights(relu_llama), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in before.items():
        trained = "proj" in name
        assert torch.equal(tensor, after[name]) != trained, name
    change = (
        after["model.layers.0.mlp.gate_proj.weight"] - before["model.layers.0.mlp.gate_proj.weight"]
    )
    rank = torch.linalg.matrix_rank(change, rtol=1e-4).item()
    assert rank <= 8 if lora_ffn else rank > 8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_interrupted_and_resumed(relu_llama, text_file, tmp_path, checkpointing):
    recipe = small(text_file, lora_rank=4, gradient_checkpointing=checkpointing, max_steps=5)
    finetune(relu_llama, tmp_path / "whole", recipe, progress=Progress(silent=True))
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "out", recipe, progress=InterruptAt(3))
    finetune(relu_llama, tmp_path / "out", recipe, resume=True, progress=Progress(silent=True))
    assert_same_weights(tmp_path / "whole", tmp_path / "out")


def test_dtype_and_tied_weights_stay(make_model, text_file, tmp_path):
    source = make_model("llama", tie_word_embeddings=True)
    stored = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    stored.save_pretrained(source)
    convert(source, tmp_path / "relu")
    for dtype in ("float32", "bfloat16"):
        recipe = small(text_file, param_dtype=dtype, max_steps=2)
        finetune(tmp_path / "relu", tmp_path / dtype, recipe, progress=Progress(silent=True))
        saved = weights(tmp_path / dtype)
        assert {t.dtype for t in saved.values()} == {torch.bfloat16}
        assert saved.keys() == weights(source).keys()
        assert "lm_head.weight" not in saved


@pytest.fixture(scope="module")
def pretrained(make_model, text_file, tmp_path_factory):
    """A tiny SiLU model that has learnt something, converted."""
    folder = tmp_path_factory.mktemp("pretrained")
    source = make_model("llama", seed=3, initializer_range=0.05)
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = load_tokenizer(open_checkpoint(source))
    texts = [json.loads(line)["text"] for line in text_file.open(encoding="utf-8")]
    write_tokens(token_stream(texts, tokenizer), folder / "tokens.bin")
    blocks = torch.from_numpy(read_blocks(folder / "tokens.bin", 64).astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        ids = blocks[torch.randint(0, len(blocks), (16,))]
        logits = model(ids).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "silu")
    tokenizer.save_pretrained(folder / "silu")
    convert(folder / "silu", folder / "relu")
    return folder / "relu"


def test_teacher_lowers_the_final_loss(pretrained, text_file, tmp_path):
    settings = {"seq_len": 64, "max_steps": 60, "learning_rate": 5e-4, "eval_blocks": 32}
    settings |= {"l1": 1e-2, "l1_schedule": "constant", "eval_steps": 0, "eval_fraction": 0.1}
    loss = {}
    for teacher in ("none", "auto"):
        recipe = small(text_file, teacher=teacher, **settings)
        done = finetune(pretrained, tmp_path / teacher, recipe, progress=Progress(silent=True))
        loss[teacher] = done.cross_entropy
        assert (done.teacher_cross_entropy is None) == (teacher == "none")
    assert loss["auto"] < loss["none"]


def test_controller_meets_its_target(pretrained, text_file, tmp_path):
    settings = {"seq_len": 64, "max_steps": 150, "batch_size": 8, "micro_batch_size": 8}
    recipe = small(text_file, target_sparsity=0.85, eval_steps=0, **settings)
    done = finetune(pretrained, tmp_path / "out", recipe, progress=Progress(silent=True))
    assert 0.8 * 0.15 < done.density < 1.2 * 0.15
    assert done.l1 > 1e-3


def test_finetuned_model_learns_from_its_source(pretrained, text_file, tmp_path):
    recipe = small(text_file, max_steps=2)
    finetune(pretrained, tmp_path / "once", recipe, progress=Progress(silent=True))
    again = finetune(tmp_path / "once", tmp_path / "twice", recipe, progress=Progress(silent=True))
    silu = finetune(pretrained, tmp_path / "fresh", recipe, progress=Progress(silent=True))
    assert again.teacher_cross_entropy == pytest.approx(silu.teacher_cross_entropy, rel=1e-5)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe_runs_ten_steps(pretrained, text_file, tmp_path, name):
    overrides = {"data": [str(text_file)], "max_steps": 10, "seq_len": 32, "eval_blocks": 2}
    overrides |= {"batch_size": 4, "micro_batch_size": 4}
    recipe = resolve_recipe(name, overrides)
    done = finetune(pretrained, tmp_path / "out", recipe, progress=Progress(silent=True))
    assert done.num_steps == 10


def bad_text(tmp_path: Path, case: str) -> Path:
    contents = {
        "latin1.txt": "déjà".encode("latin-1"),
        "latin1.jsonl": b'{"text": "fine"}\n{"text": "d\xe9j\xe0"}\n',
        "empty.txt": b"",
        "empty.jsonl": b"\n",
        "broken.jsonl": b'{"text": "fine"}\n{"text": \n',
        "column.jsonl": b'{"body": "fine"}\n',
        "broken.parquet": b"PAR1",
        "text.docx": b"PK",
        "short.txt": b"one two three",
    }
    path = tmp_path / case
    path.write_bytes(contents[case])
    return path


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("latin1.txt", "not valid UTF-8"),
        ("latin1.jsonl", ":2 is not valid UTF-8"),
        ("empty.txt", "holds no text"),
        ("empty.jsonl", "holds no text"),
        ("broken.jsonl", ":2 is not valid JSON"),
        ("column.jsonl", "--text-column"),
        ("broken.parquet", "no readable parquet"),
        ("text.docx", "none of .jsonl"),
        ("short.txt", "fewer than one batch"),
    ],
)
def test_bad_text_is_refused_in_one_line(relu_llama, text_file, tmp_path, case, said):
    path = bad_text(tmp_path, case)
    with pytest.raises(TwellError, match=re.escape(said)) as refused:
        finetune(relu_llama, tmp_path / "out", small(path))
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == [path]


def test_command_line_refusals(cli, silu_llama, relu_llama, text_file, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "bad.yaml").write_text("l1: -2e-5\nlearn-rate: 1\n")
    for arguments, code, said in [
        ((silu_llama, out, "--data", text_file), 1, "twellctl convert"),
        ((relu_llama, out), 2, "--data"),
        ((relu_llama, out, "--data", text_file, "--l1", "-1"), 2, "l1 must be >= 0"),
        (
            (relu_llama, out, "--data", text_file, "--recipe", tmp_path / "bad.yaml"),
            1,
            "learn-rate",
        ),
        ((relu_llama, out, "--data", text_file, "--seq-len", "4096"), 2, "seq-len must be <= 256"),
        ((relu_llama, out, "--data", text_file, tmp_path / "no.txt"), 1, "no.txt does not exist"),
        (
            (relu_llama, out, "--data", text_file, "--eval-data", text_file, text_file),
            2,
            "which flag",
        ),
        ((relu_llama, out, "--data", text_file, "--report-to", "nosuch"), 2, "'nosuch'"),
        ((relu_llama, out, "--data", text_file, "--teacher", tmp_path / "none"), 1, "not exist"),
        ((relu_llama, out, "--data", text_file, "--l1", "0"), 2, "l1 must be > 0"),
        ((relu_llama, out, "--data", text_file, "--max-steps", "1", "--max-tokens", "9"), 2, "one"),
    ]:
        exit_code, stdout, stderr = cli("finetune", *arguments)
        assert (exit_code, stdout) == (code, ""), stderr
        assert len(stderr) == 1, stderr
        assert said in stderr[0]
        assert not out.exists()
        assert not run_folder(out).exists()


def test_several_files_after_one_flag_and_the_models_own_context(
    cli, relu_llama, text_file, tmp_path
):
    other = tmp_path / "other.txt"
    other.write_text("print('hello')\n" * 400, encoding="utf-8")
    settings = ["--max-steps=1", "--batch-size=2", "--eval-blocks=1", "--l1=1e-3"]
    arguments = [relu_llama, tmp_path / "out", "--data", text_file, other, *settings]
    code, _, stderr = cli("finetune", *arguments)
    assert code == 0, stderr
    saved = resolve_recipe(tmp_path / "out" / "recipe.yaml")
    assert saved.data == [str(text_file), str(other)]
    assert saved.seq_len == 256


def test_overwrite_spares_a_run_folder_that_is_not_ours(relu_llama, text_file, tmp_path):
    theirs = tmp_path / "out.run" / "diary.txt"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(TwellError, match="no run of ours"):
        finetune(relu_llama, tmp_path / "out", small(text_file), overwrite=True)
    assert theirs.read_text() == "mine"


def test_held_out_text_too_short_is_refused(relu_llama, text_file, tmp_path):
    recipe = small(text_file, eval_data=[str(bad_text(tmp_path, "short.txt"))])
    with pytest.raises(TwellError, match=r"--eval-data makes no block of 32"):
        finetune(relu_llama, tmp_path / "out", recipe)
    assert not run_folder(tmp_path / "out").exists()


def test_another_models_tokenizer_is_refused(make_model, text_file, tmp_path):
    convert(make_model("llama", vocab_size=300), tmp_path / "relu")
    with pytest.raises(TwellError, match="but the model has 300 tokens"):
        finetune(tmp_path / "relu", tmp_path / "out", small(text_file))
    assert not run_folder(tmp_path / "out").exists()


def test_warm_up_before_a_constant_rate(relu_llama, text_file, tmp_path):
    rates = []

    class Rates(Progress):
        def callback(self, trainer, recipe, num_neurons):
            class Hook(TrainerCallback):
                def on_step_begin(self, args, state, control, **kwargs):
                    rates.append(trainer.get_learning_rate() / recipe.learning_rate)

            return Hook()

    recipe = small(text_file, lr_scheduler="constant", warmup_steps=4, max_steps=6)
    finetune(relu_llama, tmp_path / "out", recipe, progress=Rates(silent=True))
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])


def test_every_step_of_every_epoch_is_whole(relu_llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"x{i} = {i}\n" for i in range(120)), encoding="utf-8")
    ids = []

    class Seen(Progress):
        def callback(self, trainer, recipe, num_neurons):
            compute = trainer.compute_loss

            def seeing(model, inputs, *args, **kwargs):
                ids.append(len(inputs["input_ids"]))
                return compute(model, inputs, *args, **kwargs)

            trainer.compute_loss = seeing
            return TrainerCallback()

    recipe = small(text, max_steps=None, epochs=2, eval_fraction=0, batch_size=4)
    done = finetune(relu_llama, tmp_path / "out", recipe, progress=Seen(silent=True))
    assert sum(ids) * recipe.seq_len == done.num_tokens
    assert done.num_steps % 2 == 0


def test_what_tensorboard_wrote_stays(relu_llama, text_file, tmp_path):
    class Board(Progress):
        def callback(self, trainer, recipe, num_neurons):
            (Path(trainer.args.output_dir) / "runs").mkdir()
            (Path(trainer.args.output_dir) / "runs" / "events").write_text("1")
            return TrainerCallback()

    recipe = small(text_file, max_steps=1)
    finetune(relu_llama, tmp_path / "out", recipe, progress=Board(silent=True))
    assert (tmp_path / "out" / "runs" / "events").read_text() == "1"


def in_two_processes(*words) -> subprocess.CompletedProcess:
    """`twellctl finetune` under torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*run, "-m", "twellctl", "finetune", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def test_two_processes_speak_with_one_voice(relu_llama, text_file, tmp_path):
    out, flags = tmp_path / "out", [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    done = in_two_processes(relu_llama, out, f"--data={text_file}", *flags, "--lora-rank=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: twellctl profile") == 1
    assert "Warning" not in done.stderr
    assert not run_folder(out).exists()


def test_two_processes_fail_together(relu_llama, tmp_path):
    text = bad_text(tmp_path, "short.txt")
    done = in_two_processes(relu_llama, tmp_path / "out", f"--data={text}", "--seq-len=32")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert said
    assert all("fewer than one batch" in line for line in said), said
    assert sorted(tmp_path.iterdir()) == [text]


def test_no_tokenizer_is_refused(relu_llama, text_file, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(relu_llama / name)
    with pytest.raises(TwellError, match="no tokenizer"):
        finetune(bare, tmp_path / "out", small(text_file))


def test_full_disk_keeps_the_last_checkpoint(relu_llama, text_file, tmp_path, monkeypatch):
    import twellctl.training as training

    def full_at_six(folder, state):
        if folder.name == "checkpoint-6":
            raise OSError(28, "No space left on device")
        mark_complete(folder, state)

    monkeypatch.setattr(training, "mark_complete", full_at_six)
    with pytest.raises(TwellError, match=r"No space left.*--resume goes on from checkpoint-3"):
        finetune(
            relu_llama,
            tmp_path / "out",
            small(text_file, save_steps=3),
            progress=Progress(silent=True),
        )
    assert not (tmp_path / "out").exists()
    assert last_checkpoint(run_folder(tmp_path / "out")).name == "checkpoint-3"


@pytest.mark.parametrize("save_steps", [0, 5])
def test_a_run_whose_result_could_not_be_written_is_not_lost(
    uninterrupted, relu_llama, text_file, tmp_path, monkeypatch, save_steps
):
    import twellctl.finetune as module

    def full(*args):
        raise OSError(28, "No space left on device")

    out, recipe = tmp_path / "out", small(text_file, save_steps=save_steps)
    with monkeypatch.context() as patched:
        patched.setattr(module, "copy_side_files", full)
        with pytest.raises(TwellError, match="No space left"):
            finetune(relu_llama, out, recipe, progress=Progress(silent=True))
    done = finetune(relu_llama, out, recipe, resume=True, progress=Progress(silent=True))
    assert_same_weights(out, uninterrupted.out)
    assert done.density == uninterrupted.density


def test_a_weight_that_is_not_there_is_not_made_up(relu_llama, text_file, tmp_path):
    shutil.copytree(relu_llama, tmp_path / "relu")
    tensors = weights(relu_llama)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "relu" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TwellError, match=r"lacks 1 of its weights, lm_head\.weight"):
        finetune(tmp_path / "relu", tmp_path / "out", small(text_file))
    assert not run_folder(tmp_path / "out").exists()


def test_learning_rate_is_left_to_the_width(relu_llama, text_file, tmp_path):
    recipe = small(text_file, max_steps=1, learning_rate=None)
    finetune(relu_llama, tmp_path / "out", recipe, progress=Progress(silent=True))
    assert resolve_recipe(tmp_path / "out/recipe.yaml").learning_rate == 1 / 32


def test_the_first_line_says_which_schedule(cli, relu_llama, text_file, tmp_path):
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in (SMALL | {"max_steps": 1}).items()]
    for schedule, said in (("constant", "l1 held constant at 0.001"), ("target", "is steered")):
        extra = [f"--data={text_file}", f"--l1-schedule={schedule}", "--teacher=none"]
        code, _, stderr = cli("finetune", relu_llama, tmp_path / schedule, *flags, *extra)
        assert code == 0
        assert said in stderr[0]
        assert "no teacher" in stderr[0]
        assert stderr[0].endswith("1 steps of 128 tokens")
