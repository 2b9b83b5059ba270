"""bench on a GPU, with small shapes: it runs, graphs and plain calls agree, the JSON is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_gpu import on_hopper
from shapes import write_config

from twellctl.bench import model as bench_model_module
from twellctl.bench.timing import GRAPHS, PLAIN, Timer

pytestmark = pytest.mark.gpu
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}


@pytest.mark.alone
def test_graphs_and_plain_calls_agree():
    device = torch.device("cuda", torch.cuda.current_device())
    a, b = (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    timers = {
        graphed: Timer(lambda number: a @ b, 2, device, graphed=graphed)
        for graphed in (True, False)
    }
    turns = [{graphed: timer.seconds() for graphed, timer in timers.items()} for _ in range(9)]
    seconds = {graphed: min(turn[graphed] for turn in turns) for graphed in timers}
    assert seconds[True] == pytest.approx(seconds[False], rel=0.2)


@on_hopper
@pytest.mark.usefixtures("kernels")
def test_a_model_is_measured_eager_and_compiled(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_model_module, "COUNTED_TOKENS", 4096)
    words = ("--tokens", "8192", "--tokens", "256", "--seq-len", "1024", "--density", "0.02")
    words += ("--config", write_config(tmp_path, **SIZES), "--rounds", "2", "--json", "-")
    code, out, err = cli("bench", "model", *words)
    assert code == 0, err[-1]
    found = json.loads(out)
    assert [point["timed_by"] for point in found["points"]] == [PLAIN, GRAPHS]
    for point in found["points"]:
        names = ["dense eager", "dense compile", "twell eager", "twell compile"]
        assert list(point["candidates"]) == names
        assert point["skipped"] == {}
        assert sum(point["auto_took"].values()) == 2
        errors = {name: c["error"] for name, c in point["candidates"].items()}
        assert max(errors.values()) < 0.03, errors
    assert "this model (random, 2 layers) is " in found["sentences"][0]


def test_an_export_is_measured_on_text(cli, relu_llama, text_file):
    words = ("--data", text_file, "--tokens=128", "--seq-len=64", "--rounds=1", "--json=-")
    code, out, err = cli("bench", "model", relu_llama, *words)
    assert code == 0, err[-1]
    assert json.loads(out)["sentences"][0].startswith("on this GPU this model is ")


@on_hopper
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", [(), ("--fp8",), ("--train",)])
def test_developers_may_time_one_ffn(how):
    script = Path(__file__).parents[2] / ".ci/time_ffn.py"
    words = ("--hidden-size=1024", "--intermediate-size=2048", "--tokens=4096", "--rounds=1")
    done = subprocess.run([sys.executable, script, *words, *how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if " ms " in line]
    assert len(errors) >= 3
    assert max(errors) < 0.25, done.stdout  # of FP8; few neurons that fire average little
