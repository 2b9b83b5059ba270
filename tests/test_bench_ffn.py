"""bench ffn on the CPU, with tiny shapes: its inputs are what they claim, its output too."""

import json

import pytest
import torch

from twellctl.bench.ffn import bench_ffn
from twellctl.bench.settings import FfnSettings
from twellctl.bench.synthetic import (
    FfnWeights,
    Spread,
    check_union,
    make_rows,
    make_weights,
    measure_firing,
)
from twellctl.bench.twell_side import routes_taken
from twellctl.bundle import twell_ffn
from twellctl.bundle.twell_route import Choice, Kind, density_bucket
from twellctl.errors import TwellError, UsageError
from twellctl.firing.counts import Union, UnionCount

TINY = ("--device", "cpu", "--hidden-size", "512", "--intermediate-size", "1024", "--rounds", "1")


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr("twellctl.bench.timing.SAMPLE_SECONDS", 0.001)


def made(density: float, spread: Spread, *, bias: bool = False, M: int = 512):
    generator = torch.Generator().manual_seed(1)
    numbers = {"dtype": torch.float32, "generator": generator}
    weights = make_weights(512, 1024, density, bias=bias, **numbers)
    return make_rows(M, 512, density, spread, **numbers), weights


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("density", [0.005, 0.01, 0.05, 0.3])
def test_an_even_density_is_the_one_asked_for(density, bias):
    x, weights = made(density, Spread(), bias=bias)
    found = measure_firing(x, weights)
    assert found["density"] == pytest.approx(density, rel=0.06)
    assert found["union"]["tokens"] == 128


def test_all_rows_can_be_full():
    found = measure_firing(*made(1, Spread(), bias=True))
    assert (found["density"], found["nnz_p50"], found["slots"]) == (1, 1024, 256)


def test_a_lognormal_spread_keeps_the_mean():
    found = measure_firing(*made(0.02, Spread("lognormal"), M=4096))
    assert found["density"] == pytest.approx(0.02, rel=0.1)
    assert found["nnz_p99"] > 4 * found["nnz_p50"]


def test_heavy_rows_are_as_many_and_as_heavy_as_asked_for():
    x, weights = made(0.01, Spread("heavy", heavy_rows=0.1, heavy_density=0.5), M=1000)
    densities = ((x @ weights.gate_up[:1024].T) > 0).float().mean(-1)
    heavy = densities > 0.3
    assert int(heavy.sum()) == 100
    assert float(densities[heavy].mean()) == pytest.approx(0.5, rel=0.05)
    assert float(densities[~heavy].mean()) == pytest.approx(0.01, rel=0.06)


def test_copies_hold_the_same_numbers_elsewhere():
    _, weights = made(0.1, Spread(), bias=True)
    for ours, copied in zip(weights.split, weights.copy().split, strict=True):
        assert torch.equal(ours, copied)
        assert ours.data_ptr() != copied.data_ptr()
        assert ours.is_contiguous()


def test_the_union_is_counted_over_neighbours():
    fired = torch.zeros(300, 1000)
    fired[:128, :5] = 1  # the same neurons for each of them
    for token in range(128, 256):
        fired[token, token] = 1  # another one for each
    count = UnionCount()
    for part in (fired[:256], fired[256:]):  # what is no whole window is left out
        count.add(part)
    assert count.summary(0.005) == Union(128, pytest.approx((5 + 128) / 2000), 1 - 0.995**128)


def test_weights_that_share_neurons_between_tokens_are_refused():
    check_union(Union(128, 0.4510, 0.4736))
    with pytest.raises(TwellError, match=r"fire only 44\.9% of the neurons over 128 consecutive"):
        check_union(Union(128, 0.4490, 0.4736))
    x, weights = made(0.01, Spread())
    with pytest.raises(TwellError, match="another --seed or --density, or a real model"):
        measure_firing(x[:1].expand(512, -1), weights)
    skewed = FfnWeights(weights.gate_up.clone(), weights.down)
    skewed.gate_up[: 1024 // 8, 0] += 1.5  # an eighth of the neurons does most of the firing
    with pytest.raises(TwellError, match="another --seed or --density, or a real model"):
        measure_firing(x, skewed)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hidden-size", "100"], "hidden-size must be a multiple of 64, got 100"),
        (["--intermediate-size", "12"], "intermediate-size must be a multiple of 8"),
        (["--tokens", "0"], "tokens must be >= 1, got 0"),
        (["--density", "0"], "density must be > 0 and <= 1, got 0"),
        (["--density", "1.5"], "density must be > 0 and <= 1, got 1.5"),
        (["--spread", "odd"], "spread must be even, lognormal or heavy, got 'odd'"),
        (["--spread", "heavy", "--density", "0.5"], "a heavy spread needs a density up to 0.4"),
        (["--spread", "heavy", "--heavy-rows", "1"], "heavy-rows must be > 0 and < 1, got 1"),
        (["--heavy-density", "0.5"], "are of --spread heavy: give that, too"),
        (["--dtype", "int8"], "dtype must be bf16, fp16 or fp32, got 'int8'"),
        (["--route", "fast"], "route must be auto, twell, portable, fused or dense, got 'fast'"),
        (["--route", "auto", "--route", "auto"], "route must be given once"),
        (["--slots", "257"], "slots must be >= 1 and <= 256, got 257"),
        (["--rounds", "0"], "rounds must be >= 1, got 0"),
        (["--energy-seconds", "0"], "energy-seconds must be >= 0.5 and <= 600, got 0"),
        (["--device", "tpu"], "device must be cuda, cuda:1 and so on, or cpu, got 'tpu'"),
        (["--tokens", "many"], "Invalid value for '--tokens'"),
    ],
)
def test_bad_options_are_refused_in_one_line(cli, words, sentence):
    code, out, err = cli("bench", "ffn", *words)
    assert (code, out, len(err)) == (2, "", 1)
    assert sentence in err[0]


def test_without_a_gpu_only_the_cpu_is_tried(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("ffn", "model"):
        code, out, err = cli("bench", command)
        assert (code, out, len(err)) == (1, "", 1)
        assert "torch finds none here (see twellctl doctor); --device cpu runs tiny" in err[0]
        code, out, err = cli("bench", command, "--device", "cpu", "--energy")
        assert (code, out, len(err)) == (1, "", 1)
        assert "there is none on the CPU: leave out --energy" in err[0]


def test_json_goes_to_a_file_beside_the_tables(cli, tmp_path):
    file, other = tmp_path / "bench.json", tmp_path / "other.json"
    other.write_text('{"mine": 1}')
    words = ("bench", "ffn", *TINY, "--tokens", "16", "--density", "0.02", "--json")
    for _ in range(2):  # its own kind is replaced
        code, out, err = cli(*words, file)
        assert code == 0, err
        assert "16 tokens" in "".join(out)
        assert json.loads(file.read_text())["command"] == "bench ffn"
    code, out, err = cli(*words, other)
    assert (code, out) == (1, "")
    assert f"{other} exists and is no bench" in err[-1]
    assert other.read_text() == '{"mine": 1}'


def test_json_alone_goes_to_stdout(cli):
    words = ("--tokens", "256", "--tokens", "16", "--density", "0.02", "--density", "1", "--bias")
    code, out, err = cli("bench", "ffn", *TINY, *words, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert (found["command"], found["device"]) == ("bench ffn", "CPU")
    assert {"twellctl", "torch", "torch_cuda", "python", "transformers"} <= set(found["versions"])
    assert found["settings"]["densities"] == [0.02, 1]
    sizes = [(point["density_asked"], point["tokens"]) for point in found["points"]]
    assert sizes == [(0.02, 256), (0.02, 16), (1, 256), (1, 16)]
    for point in found["points"]:
        assert list(point["candidates"]) == ["dense eager", "dense eager, fused", "twell plain"]
        assert point["density"] == pytest.approx(point["density_asked"], rel=0.25)
        assert point["timed_by"] == "wall clock"
        assert all(0 < c["error"] < 0.01 for c in point["candidates"].values())
        assert all(len(c["ms_samples"]) == 1 for c in point["candidates"].values())
        assert point["union"]["fired"] > 0.95 * point["union"]["expected"]
    assert len(found["sentences"]) == 2
    assert any("256 tokens, density 0.02: twell plain" in line for line in err)


def test_the_table_ends_with_the_sentence(cli):
    words = ("--tokens", "64", "--density", "0.02", "--spread", "heavy", "--dtype", "fp32")
    code, out, _ = cli("bench", "ffn", *TINY, *words)
    assert code == 0
    assert "dense eager, fused" in out
    assert "union of fired neurons over 64 consecutive tokens" in out
    assert out.splitlines()[-1].startswith(
        "on this CPU this FFN of 512 x 1024 at 2.00% density (5.0% of the rows at 50%) is "
    )


def test_slots_are_those_of_a_profile_unless_given():
    settings = {"hidden_size": 256, "intermediate_size": 512, "tokens": (64,), "rounds": 1}
    settings |= {"densities": (0.3,), "device": "cpu"}
    (point,) = bench_ffn(FfnSettings(**settings)).points
    assert 64 < point.about["slots"] <= 128
    assert point.about["slots"] % 8 == 0
    (point,) = bench_ffn(FfnSettings(**settings | {"tokens": (1,), "densities": (0.02,)})).points
    assert point.about["slots"] == 24  # of many rows, as a profile has; this one needs less
    (point,) = bench_ffn(FfnSettings(**settings, slots=8)).points
    assert point.about["slots"] == 8
    assert point.wrong == []


def test_a_wrong_result_ends_in_an_error(cli, monkeypatch):
    monkeypatch.setattr(
        "twellctl.bench.ffn.ffn_over_twell", lambda *numbers: lambda x, w: torch.zeros_like(x)
    )
    code, out, err = cli("bench", "ffn", *TINY, "--tokens", "16", "--density", "0.02")
    assert code == 1
    assert "on this CPU this FFN" in out
    assert "twell plain has a relative error of 1 at 16 tokens" in err[-1]


def test_settings_are_checked_from_python_too():
    with pytest.raises(UsageError, match="rounds must be >= 1"):
        bench_ffn(FfnSettings(rounds=0))


def test_which_way_auto_went(monkeypatch):
    bucket, auto = density_bucket(0.01), ("walk", "lists", "fused", "dense")
    kinds = {
        Kind("a GPU", 64, 256, False, 16384, bucket, 8, "hopper", auto): Choice("lists", "dense"),
        Kind("a GPU", 64, 256, False, 64, bucket, 8, "hopper", auto): Choice("dense", "fused"),
        Kind("a GPU", 64, 256, False, 16384, bucket, 16, "hopper", auto): Choice("fused", "fused"),
        Kind("a GPU", 64, 256, False, 64, bucket, 8, "hopper", auto[:2]): Choice("walk", "walk"),
        Kind("a GPU", 64, 256, False, 64, bucket, 8, "hopper_e4m3", auto): Choice("walk", "lists"),
    }
    monkeypatch.setattr(twell_ffn, "known_choices", lambda: kinds)
    layers = [(8, 0.01), (8, 0.01), (16, 0.01), (8, 0.1)]
    assert routes_taken(64, 256, False, 10000, layers, False) == {"lists": 2, "fused": 1}
    # graphs are replayed there
    assert routes_taken(64, 256, False, 50, layers, False) == {"fused": 2}
    assert routes_taken(64, 256, False, 50, layers, True) == {"lists": 2}
