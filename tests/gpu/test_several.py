"""finetune and convert on two GPUs, by torchrun: what one gives, with replicas or shards."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from twellctl.convert import convert
from twellctl.models.checkpoint import REPORT_FILE
from twellctl.training.recipe import run_folder
from twellctl.training.replicas import SMALL
from twellctl.training.runs import STATE_FILE, last_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
FLAGS = {"seq-len": 64, "batch-size": 8, "max-steps": 12, "save-steps": 5, "eval-blocks": 4}
FLAGS |= {"learning-rate": 1e-3, "teacher-weight": 0.5}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("how", ["never, one part", "never, two parts", "always"])
def test_two_gpus_are_as_one(make_model, text_file, tmp_path, how):
    """Of replicas a step of one part sends its gradients inside the graph, one of two behind it."""
    relu = _relu(make_model, tmp_path)
    micro = 2 if how == "never, two parts" else 4
    flags = {"micro-batch-size": micro, "shard": how.split(",")[0]}
    found = {}
    for count in (1, 2):
        out = tmp_path / str(count)
        _run(count, "finetune", relu, out, *_words(text_file, **flags))
        found[count] = json.loads((out / REPORT_FILE).read_text())
    _assert_near(found[2], found[1])


@pytest.mark.parametrize("shard", ["never", "always"])
def test_killed_runs_go_on_with_two_and_with_one(make_model, text_file, tmp_path, shard):
    """One of the two processes is killed once a checkpoint is there."""
    relu = _relu(make_model, tmp_path)
    words = _words(text_file, **{"micro-batch-size": 4, "shard": shard})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(2, "finetune", relu, whole, *words)
    undisturbed = json.loads((whole / REPORT_FILE).read_text())
    saved = _run_until_saved(run_folder(killed), relu, killed, *words)
    assert not killed.exists()
    for count in (2, 1):
        out = tmp_path / f"on {count}"
        shutil.copytree(run_folder(killed), run_folder(out))
        assert f"resumed at step {saved} of" in _run(
            count, "finetune", relu, out, *words, "--resume"
        )
        _assert_near(json.loads((out / REPORT_FILE).read_text()), undisturbed)


def test_two_gpus_fit_as_one_does(make_model, text_file, tmp_path):
    source = make_model("llama", initializer_range=0.1, **SIZES)
    flags = {"tokens": 16384, "seq-len": 64, "eval-windows": 16, "steps": 20, "step-tokens": 512}
    words = [f"--data={text_file}", *(f"--{k}={value}" for k, value in flags.items())]
    found = []
    for count in (1, 2):
        _run(count, "convert", source, tmp_path / str(count), *words)
        found.append(json.loads((tmp_path / f"{count}/twell_fit.json").read_text()))
    for name in ("kl", "cross_entropy"):
        one, two = (report["held_out"][name] for report in found)
        assert two == pytest.approx(one, rel=0.1)


def _relu(make_model, folder):
    assert SIZES["hidden_size"] * SIZES["intermediate_size"] >= SMALL
    relu = folder / "relu"
    convert(make_model("llama", initializer_range=0.05, **SIZES), relu)
    return relu


def _words(text_file, **flags: object) -> list[str]:
    return ["--data", str(text_file), *(f"--{k}={value}" for k, value in (FLAGS | flags).items())]


def _assert_near(found: dict, wanted: dict) -> None:
    assert found["cross_entropy"] == pytest.approx(wanted["cross_entropy"], rel=5e-3)
    assert found["density_by_layer"] == pytest.approx(wanted["density_by_layer"], rel=0.03)


def _command(count: int, *words: object) -> list[str]:
    """`twellctl` in so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    words = "-m", "twellctl", *map(str, words)
    return [sys.executable, *(launcher if count > 1 else []), *words]


def _run(count: int, *words: object) -> str:
    """To its end; what it says. PyTorch has nothing to say of how the processes end."""
    done = subprocess.run(
        _command(count, *words), capture_output=True, text=True, env=ENVIRONMENT, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "destroy_process_group" not in done.stderr
    return done.stderr


def _run_until_saved(run: Path, *words: object) -> int:
    """The second process is killed once a checkpoint is complete, then all end; the step of it."""
    command = _command(2, "finetune", *words)
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            end = time.monotonic() + 180
            while not list(run.glob(f"checkpoint-*/{STATE_FILE}")):
                assert launcher.poll() is None, launcher.stderr.read()[-2000:]
                assert time.monotonic() < end
                time.sleep(0.01)
            os.kill(_process(launcher.pid, rank=1), signal.SIGKILL)
            _, err = launcher.communicate(timeout=120)
        finally:
            launcher.terminate()  # which ends its processes
    saved = last_checkpoint(run).name
    assert launcher.returncode == 1
    assert f"--resume continues from {saved}" in err
    return int(saved.split("-")[1])


def _process(launcher: int, rank: int) -> int:
    """The id of that one among the children of a launcher."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # no process, or one that has just ended
            is_child = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == launcher
            variables = (folder / "environ").read_bytes().split(b"\0") if is_child else []
            if f"RANK={rank}".encode() in variables:
                return int(folder.name)
    raise AssertionError(f"no process {rank}")
