"""finetune interrupted, killed, out of disk: the end is the same, bit for bit."""

import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from edits import weights_in
from finetune_runs import SMALL, InterruptAt, assert_same_weights, small, weights
from transformers import TrainerCallback

from twellctl.errors import TwellError, UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.screens.run import RunScreen
from twellctl.training import runs
from twellctl.training.progress import Progress
from twellctl.training.recipe import run_folder
from twellctl.training.runs import last_checkpoint, mark_complete
from twellctl.training.sparsity_callback import SparsityCallback

pytestmark = pytest.mark.usefixtures("no_answers")


def test_interrupted_and_resumed_has_the_same_bits(uninterrupted, relu_llama, text_file, tmp_path):
    out, recipe = tmp_path / "out", small(text_file)
    step = random.randint(2, 10)
    print("interrupted at step", step)
    with pytest.raises(Interrupted, match=f"step {step} of 12.*--resume"):
        finetune(relu_llama, out, recipe, progress=InterruptAt(step))
    assert not out.exists()
    with pytest.raises(TwellError, match=f"checkpoint-{step}.*--resume"):
        finetune(relu_llama, out, recipe)
    done = finetune(relu_llama, out, recipe, resume=True)
    assert_same_weights(out, uninterrupted.out)
    assert (done.l1, done.density) == (uninterrupted.l1, uninterrupted.density)
    assert done.first_cross_entropy == uninterrupted.first_cross_entropy


def test_resume_may_hold_fewer_blocks_at_once(relu_llama, text_file, tmp_path, uninterrupted):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        finetune(relu_llama, out, small(text_file), progress=InterruptAt(4))
    half = run_folder(out) / "checkpoint-99"  # as if it had been killed while writing one
    half.mkdir()
    recipe = small(text_file, micro_batch_size=1, gradient_checkpointing=True)
    finetune(relu_llama, out, recipe, resume=True)
    for name, wanted in weights(uninterrupted.out).items():
        assert (weights(out)[name] - wanted).norm() < 4e-3 * wanted.norm(), name


def test_resume_refuses_another_recipe_and_model(relu_llama, text_file, tmp_path):
    stranger, text = tmp_path / "stranger", tmp_path / "text.jsonl"
    shutil.copytree(relu_llama, stranger)
    with weights_in(stranger) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 0.1
    text.write_text(text_file.read_text().replace("import", "export", 1))
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "out", small(text_file), progress=InterruptAt(2))
    for model, recipe, said in (
        (relu_llama, small(text_file, l1=0.5), "l1"),
        (stranger, small(text_file), "model, teacher"),
        (relu_llama, small(text), "data"),
        (relu_llama, small(text_file, teacher=str(stranger)), "teacher"),
    ):
        with pytest.raises(
            UsageError, match=rf"other settings or inputs \({said}\): give the same"
        ):
            finetune(model, tmp_path / "out", recipe, resume=True)
    with pytest.raises(TwellError, match="no run to resume"):
        finetune(relu_llama, tmp_path / "other", small(text_file), resume=True)


@pytest.mark.parametrize("what", ["its end", "the optimizer"])
def test_a_full_disk_keeps_the_last_checkpoint(
    uninterrupted, relu_llama, text_file, tmp_path, monkeypatch, what
):
    """Of an optimizer torch's zip writer says it with an error of its own, and names no file."""
    save = torch.save

    def marked(folder, state):
        if folder.name == "checkpoint-6":
            raise OSError(28, "No space left on device")
        mark_complete(folder, state)

    def saved(state, file, *more, **how):
        if "checkpoint-6" in str(file) and "optimizer" in str(file):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos\n64")
        return save(state, file, *more, **how)

    if what == "its end":
        monkeypatch.setattr("twellctl.training.trainer.mark_complete", marked)
    else:
        monkeypatch.setattr(torch, "save", saved)
    said = r"(No space left|room left\?).*--resume continues from checkpoint-3$"
    with pytest.raises(TwellError, match=said):
        finetune(relu_llama, tmp_path / "out", small(text_file, save_steps=3))
    assert not (tmp_path / "out").exists()
    assert last_checkpoint(run_folder(tmp_path / "out")).name == "checkpoint-3"
    monkeypatch.undo()
    finetune(relu_llama, tmp_path / "out", small(text_file, save_steps=3), resume=True)
    assert_same_weights(tmp_path / "out", uninterrupted.out)


def test_a_checkpoint_that_is_broken_or_of_another_version(relu_llama, text_file, tmp_path):
    with pytest.raises(Interrupted):
        finetune(relu_llama, tmp_path / "out", small(text_file), progress=InterruptAt(3))
    state = run_folder(tmp_path / "out") / "checkpoint-3" / "twell_state.json"
    before = json.loads(state.read_text())
    for content in ("{", "[" * 100_000, '{"schedule": NaN}'):
        state.write_text(content)
        with pytest.raises(TwellError, match=r"twell_state\.json is not valid JSON .*remove that"):
            finetune(relu_llama, tmp_path / "out", small(text_file), resume=True)
    state.write_text(json.dumps({k: v for k, v in before.items() if k != "run_format"}))
    with pytest.raises(TwellError, match="was begun by another version of twellctl, which trains"):
        finetune(relu_llama, tmp_path / "out", small(text_file), resume=True)
    state.write_text(json.dumps(before))
    finetune(relu_llama, tmp_path / "out", small(text_file), resume=True)


@pytest.mark.parametrize("save_steps", [0, 5])
def test_a_run_whose_result_could_not_be_written_is_not_lost(
    uninterrupted, relu_llama, text_file, tmp_path, monkeypatch, save_steps
):
    def full(*args):
        raise OSError(28, "No space left on device")

    out, recipe = tmp_path / "out", small(text_file, save_steps=save_steps)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["twellctl.finetune"], "copy_side_files", full)
        with pytest.raises(TwellError, match="No space left"):
            finetune(relu_llama, out, recipe)
    done = finetune(relu_llama, out, recipe, resume=True)
    assert_same_weights(out, uninterrupted.out)
    assert (done.density, done.num_steps) == (uninterrupted.density, uninterrupted.num_steps)


@pytest.mark.parametrize("fails", ["killed", "stays"])
def test_a_run_folder_that_is_half_removed_stops_no_later_run(
    relu_llama, text_file, tmp_path, monkeypatch, fails
):
    def removed(path):
        if fails == "killed":
            raise KeyboardInterrupt

    out, recipe, said = tmp_path / "out", small(text_file, max_steps=2), []
    with monkeypatch.context() as patched:
        patched.setattr(runs, "remove", removed)
        progress = Progress()
        progress.note = said.append
        if fails == "killed":
            with pytest.raises(KeyboardInterrupt):
                finetune(relu_llama, out, recipe, progress=progress)
        else:
            finetune(relu_llama, out, recipe, progress=progress)
            assert "could not be removed" in said[-1]
    assert out.is_dir()
    finetune(relu_llama, out, recipe, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_ctrl_c_under_torchrun_saves_a_checkpoint(started, relu_llama, text_file, tmp_path):
    """Two processes with its environment, and its answer to Ctrl-C: SIGTERM behind it."""
    out = tmp_path / "out"
    settings = SMALL | {"max_steps": 3000, "eval_steps": 0, "eval_fraction": 0.0}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    words = ["finetune", str(relu_llama), str(out), "--teacher=none", f"--data={text_file}", *flags]
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        launched["MASTER_PORT"] = str(free.getsockname()[1])
    both = [started(*words, **launched | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    for line in both[0].stderr:
        assert "Warning" not in line
        if re.match(r"step 5/", line):
            break
    for number in (signal.SIGINT, signal.SIGTERM):
        for process in both:
            process.send_signal(number)
    rest = both[0].stderr.read()
    both[0].wait()
    both[1].send_signal(signal.SIGTERM)  # as torchrun ends those that are left
    both[1].wait()
    both[0].stderr.close()
    assert "continue with the same command and --resume" in rest
    assert last_checkpoint(run_folder(out)) is not None
    assert not out.exists()


def test_a_repeated_signal_is_one_wish_only_in_several_processes():
    for world_size in (1, 2):
        notes = []
        trainer = SimpleNamespace(args=SimpleNamespace(world_size=world_size))
        callback = SparsityCallback(trainer, partial(notes.append, "stopping"))
        callback._ask(signal.SIGINT, None)
        if world_size == 1:
            with pytest.raises(KeyboardInterrupt):
                callback._ask(signal.SIGINT, None)
        else:
            callback._ask(signal.SIGINT, None)
        assert callback.asked_to_stop
        assert notes == ["stopping"]


class CtrlC(RunScreen):
    """Presses Ctrl-C `times` in the middle of step 5, and waits for an answer."""

    def __init__(self, times: int):
        super().__init__()
        self.times, self.answered = times, threading.Event()

    def note(self, text):
        if text.startswith("stopping after this step; a checkpoint will be kept; Ctrl-C once more"):
            self.answered.set()

    def stopping(self):
        super().stopping()
        assert self.answered.wait(10)  # the step goes on only then

    def callback(self, trainer, recipe, num_neurons):
        progress = self

        class Hook(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    for _ in range(progress.times):
                        os.kill(os.getpid(), signal.SIGINT)

        return Hook()


def test_ctrl_c_is_answered_before_the_step_ends(relu_llama, text_file, tmp_path):
    progress = CtrlC(times=1)
    with pytest.raises(Interrupted, match="interrupted at step 5 of 12; the checkpoint is in"):
        finetune(relu_llama, tmp_path / "out", small(text_file), progress=progress)
    assert progress.answered.is_set()


@pytest.mark.parametrize(
    ("save_steps", "said"),
    [(3, "--resume continues from checkpoint-3"), (0, "no checkpoint was complete")],
)
def test_a_second_ctrl_c_says_what_remains(relu_llama, text_file, tmp_path, save_steps, said):
    recipe = small(text_file, save_steps=save_steps)
    with pytest.raises(Interrupted, match=f"in the middle of a step; {said}$"):
        finetune(relu_llama, tmp_path / "out", recipe, progress=CtrlC(times=2))
    kept = last_checkpoint(run_folder(tmp_path / "out"))
    assert (kept.name if kept else None) == ("checkpoint-3" if save_steps else None)
