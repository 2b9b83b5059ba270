"""bench on a GPU, with small shapes: it runs, graphs and plain calls agree, the JSON is whole."""

import json

import pytest
import torch
from shapes import write_config

from twellctl.bench import model as bench_model_module
from twellctl.bench.energy import open_counter
from twellctl.bench.synthetic import make_weights, rotated_weights
from twellctl.bench.timing import GRAPHS, PLAIN, Timer
from twellctl.bundle.twell_nvrtc import what_is_missing
from twellctl.errors import TwellError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FFN = ("--hidden-size", "1024", "--intermediate-size", "2048", "--density", "0.02")
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 16384,
    "max_position_embeddings": 2048,
}  # fmt: skip
DENSE = ["dense eager", "dense eager, fused", "dense compile", "dense compile, fused"]
FP8 = ["dense FP8 row-wise compile", "dense FP8 tensor-wise compile"]


@pytest.fixture
def has_kernels():
    if said := what_is_missing():
        pytest.skip(said)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")


@pytest.fixture
def has_energy():
    try:
        open_counter(torch.device("cuda", 0))
    except TwellError as error:
        pytest.skip(str(error))


def test_every_side_is_timed_the_same_way(cli, has_kernels):
    words = ("--tokens", "8192", "--tokens", "256", "--no-max-autotune", "--rounds", "3")
    routes = ("--route", "auto", "--route", "twell", "--route", "portable", "--route", "dense")
    code, out, err = cli("bench", "ffn", *FFN, *words, *routes, "--bias", "--json", "-")
    assert code == 0, err[-1]
    found = json.loads(out)
    assert [point["timed_by"] for point in found["points"]] == [PLAIN, GRAPHS]
    twell = ["twell", "twell twell", "twell portable", "twell dense"]
    for point in found["points"]:
        assert list(point["candidates"]) == DENSE + FP8 + twell
        assert point["skipped"] == {}
        assert sum(point["auto_took"].values()) == 1
        for name, candidate in point["candidates"].items():
            assert 0 < candidate["ms"] < 50, name
            assert candidate["error"] < (0.3 if name in FP8 else 0.01), name
        assert point["fastest_fp8"] in FP8
        assert point["over_fastest_fp8"] > 0
    assert found["versions"]["nvrtc"]
    assert found["gpus"][found["device_index"]] == found["device"]
    assert found["sentences"][0].startswith("on this GPU this FFN of 1024 x 2048 at 2.00% density")


def test_an_ffn_in_fp8_is_measured_beside_both(cli, has_kernels):
    words = ("--tokens", "256", "--no-max-autotune", "--rounds", "3", "--quantize", "fp8")
    code, out, err = cli("bench", "ffn", *FFN, *words, "--json", "-")
    assert code == 0, err[-1]
    (point,) = json.loads(out)["points"]
    assert list(point["candidates"]) == [*DENSE, *FP8, "twell FP8"]
    assert point["skipped"] == {}
    errors = {name: c["error"] for name, c in point["candidates"].items()}
    assert errors["twell FP8"] == pytest.approx(errors["dense FP8 row-wise compile"], rel=0.3)


def test_max_autotune_takes_part(cli):
    words = ("--tokens", "256", "--rounds", "1", "--route", "dense", "--json", "-")
    code, out, err = cli("bench", "ffn", *FFN, *words)
    assert code == 0, err[-1]
    (point,) = json.loads(out)["points"]
    assert {"dense max-autotune", "dense max-autotune, fused"} <= set(point["candidates"])
    if torch.cuda.get_device_capability() >= (8, 9):
        named = {f"dense FP8 {scheme} max-autotune" for scheme in ("row-wise", "tensor-wise")}
        assert named <= set(point["candidates"]), point["skipped"]


def test_energy_is_of_a_sane_size(cli, has_energy):
    words = ("--tokens", "8192", "--no-max-autotune", "--rounds", "1", "--route", "dense")
    code, out, err = cli(
        "bench", "ffn", *FFN, *words, "--energy", "--energy-seconds", "1", "--json", "-"
    )
    assert code == 0, err[-1]
    (point,) = json.loads(out)["points"]
    for name, candidate in point["candidates"].items():
        watts = candidate["mj_per_token"] * candidate["tokens_per_ms"]
        assert 20 < watts < 1500, f"{name}: {watts:.0f} W"
    assert point["candidates"]["dense eager"]["energy_over_dense_eager"] == 1


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


def test_the_weights_outgrow_the_cache():
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    numbers = {"bias": False, "dtype": torch.bfloat16, "generator": generator}
    weights = make_weights(1024, 2048, 0.02, **numbers)
    copies = rotated_weights(weights, device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert len(copies) == 64 or len(copies) * weights.gate_bytes > 3 * cache
    assert len({copy.gate_up.data_ptr() for copy in copies}) == len(copies)


def test_a_dtype_without_kernels_is_told_or_refused(cli, has_kernels):
    words = ("--tokens", "256", "--rounds", "1", "--no-max-autotune", "--dtype", "fp16")
    code, _, err = cli("bench", "ffn", *FFN, *words)
    assert code == 0
    assert any("the kernels take bf16, not float16" in line for line in err)
    code, _, err = cli("bench", "ffn", *FFN, *words, "--route", "twell")
    assert code == 1
    assert "--route twell cannot run here" in err[-1]


def test_a_model_is_measured_eager_and_compiled(cli, has_kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_model_module, "COUNTED_TOKENS", 4096)
    words = ("--tokens", "8192", "--tokens", "256", "--seq-len", "1024", "--density", "0.02")
    words += ("--config", write_config(tmp_path, **SIZES), "--rounds", "2", "--json", "-")
    code, out, err = cli("bench", "model", *words)
    assert code == 0, err[-1]
    found = json.loads(out)
    assert [point["timed_by"] for point in found["points"]] == [PLAIN, GRAPHS]
    for point in found["points"]:
        names = ["dense eager", "dense compile", *FP8, "twell eager", "twell compile"]
        assert list(point["candidates"]) == names
        assert point["skipped"] == {}
        assert sum(point["auto_took"].values()) == 2
        errors = {name: c["error"] for name, c in point["candidates"].items()}
        assert max(error for name, error in errors.items() if name not in FP8) < 0.03, errors
        assert min(errors[name] for name in FP8) > 0.005, errors
        assert max(errors.values()) < 0.15, errors
    assert "this model (random, 2 layers) is " in found["sentences"][0]
    assert " as fast as dense FP8" in found["sentences"][0]


def test_a_model_in_fp8_is_measured_beside_both(cli, has_kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_model_module, "COUNTED_TOKENS", 4096)
    words = ("--tokens", "256", "--seq-len", "256", "--density", "0.02", "--quantize", "fp8")
    words += ("--config", write_config(tmp_path, **SIZES), "--rounds", "2", "--json", "-")
    code, out, err = cli("bench", "model", *words)
    assert code == 0, err[-1]
    found = json.loads(out)
    (point,) = found["points"]
    twell = ["twell FP8 eager", "twell FP8 compile"]
    assert list(point["candidates"]) == ["dense eager", "dense compile", *FP8, *twell]
    assert point["skipped"] == {}
    errors = {name: c["error"] for name, c in point["candidates"].items()}
    assert max(errors[name] for name in twell) < 2 * errors["dense FP8 row-wise compile"], errors
    assert "this model in FP8 (random, 2 layers) is " in found["sentences"][0]


def test_dense_fp8_of_a_gpu_without_it_is_left_out_in_a_line(cli, monkeypatch):
    monkeypatch.setattr("twellctl.bench.dense_fp8.why_no_products", lambda *asked: "no FP8 here")
    words = ("--tokens", "256", "--tokens", "64", "--no-max-autotune", "--rounds", "1")
    code, out, err = cli("bench", "ffn", *FFN, *words, "--route", "dense")
    assert code == 0, err[-1]
    assert [line for line in err if "FP8" in line] == ["dense FP8 was left out: no FP8 here"]
    assert "FP8" not in out


def test_an_export_is_measured_on_text(cli, relu_llama, text_file):
    words = ("--data", text_file, "--tokens=128", "--seq-len=64", "--rounds=1", "--json=-")
    code, out, err = cli("bench", "model", relu_llama, *words)
    assert code == 0, err[-1]
    assert json.loads(out)["sentences"][0].startswith("on this GPU this model is ")
