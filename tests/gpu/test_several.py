"""finetune on two GPUs, by torchrun: what one gives, whether they hold replicas or shards."""

import json
import os
import subprocess
import sys

import pytest
import torch

from twellctl.convert import convert
from twellctl.models.carried import REPORT_FILE
from twellctl.training.processes import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
FLAGS = {"seq-len": 64, "batch-size": 8, "max-steps": 12, "save-steps": 5, "eval-blocks": 4}
FLAGS |= {"learning-rate": 1e-3, "soften": 0.5, "teacher-weight": 0.5}


@pytest.mark.parametrize("how", ["never, one part", "never, two parts", "always"])
def test_two_gpus_are_as_one(make_model, text_file, tmp_path, how):
    """Of replicas a step of one part sends its gradients inside the graph, one of two behind it."""
    assert SIZES["hidden_size"] * SIZES["intermediate_size"] >= SMALL
    relu = tmp_path / "relu"
    convert(make_model("llama", initializer_range=0.05, **SIZES), relu)
    micro = 2 if how == "never, two parts" else 4
    found = {}
    for count in (1, 2):
        out = tmp_path / str(count)
        flags = FLAGS | {"micro-batch-size": micro, "shard": how.split(",")[0]}
        words = [f"--{flag}={value}" for flag, value in flags.items()]
        _run(count, relu, out, "--data", text_file, *words)
        found[count] = json.loads((out / REPORT_FILE).read_text())
    one, two = found[1], found[2]
    assert two["cross_entropy"] == pytest.approx(one["cross_entropy"], rel=5e-3)
    assert two["density_by_layer"] == pytest.approx(one["density_by_layer"], rel=0.03)


def _run(count: int, *words: object) -> None:
    """`twellctl finetune` in so many processes; PyTorch has nothing to say of how they end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *(launcher if count > 1 else []), "-m", "twellctl", "finetune"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, env=environment, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "destroy_process_group" not in done.stderr
