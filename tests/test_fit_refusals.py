"""convert --data: what is refused, and fits that are broken."""

import json
import re
from dataclasses import replace

import pytest
import torch
from fits import QUICK

from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.fitting import plan as plans
from twellctl.fitting.plan import Shape, plan
from twellctl.fitting.settings import QUICK_RIDGE, Fit
from twellctl.fitting.walk import HeldOut
from twellctl.models.checkpoint import FIT_FILE

pytestmark = pytest.mark.usefixtures("no_answers")


def refused(make_model, text_file, out, match, kind=TwellError, **settings):
    with pytest.raises(kind, match=match):
        convert(make_model("llama"), out, **{"data": [str(text_file)]} | QUICK | settings)
    assert not out.exists()


def test_what_is_refused(make_model, text_file, tmp_path):
    out = tmp_path / "out"
    few, alike = tmp_path / "few.jsonl", tmp_path / "alike.jsonl"
    few.write_text(json.dumps({"text": "def a(): pass " * 60}) + "\n")
    refused(make_model, few, out, "are too few to fit 128 weights", eval_windows=1)
    refused(make_model, text_file, out, "the model's context, got 10000", UsageError, seq_len=10000)
    refused(make_model, text_file, out, "<= 32, the hidden size, got 33", UsageError, map_rank=33)
    with pytest.raises(UsageError, match="the model's context, got 10000"):
        plan(make_model("llama"), data=[str(text_file)], seq_len=10000)
    refused(make_model, few, out, "windows of 256 tokens", seq_len=256)
    alike.write_text(json.dumps({"text": "\n" * 40000}) + "\n")
    refused(make_model, alike, out, "all alike")
    assert not (tmp_path / "out.run").exists()
    refused(make_model, text_file, out, "is for a fit", UsageError, data=[], steps=3)
    refused(make_model, text_file, out, "density", UsageError, density=1.5)
    convert(make_model("llama"), tmp_path / "relu")
    with pytest.raises(TwellError, match="already ReLU"):
        convert(tmp_path / "relu", out, data=[str(text_file)])


def test_a_quick_fit_takes_the_least_text_and_no_steps(make_model, text_file, tmp_path):
    """Of 128 unknowns an output; what one token less would be is refused."""
    source, how = make_model("llama"), {"seq_len": 32, "eval_windows": 8}
    planned = plan(source, quick=True, tokens=2_000_000, seq_len=32)
    assert (planned.tokens, planned.seconds > 0) == (512, True)
    done = convert(source, tmp_path / "out", data=[str(text_file)], quick=True, **how)
    assert done.fitted.tokens == 512
    settings = json.loads((tmp_path / "out" / FIT_FILE).read_text())["settings"]
    assert (settings["steps"], settings["tokens"], settings["quick"]) == (0, 512, True)
    assert settings["ridge"] == QUICK_RIDGE
    longer = plan(source, quick=True, seq_len=100)
    assert longer.tokens == 600


def test_a_fit_that_held_out_text_says_is_broken_is_an_error(
    make_model, text_file, tmp_path, monkeypatch
):
    """Its layers are kept; nothing is written to OUT."""
    monkeypatch.setattr("twellctl.fitting.walk.MOST_AWAY", 1e-3)
    said = r"^layer 0 is broken: .* by 0\.\d+ times .*: start again with --overwrite and more "
    refused(make_model, text_file, tmp_path / "out", said)
    assert (tmp_path / "out.run/layer-000.safetensors").is_file()


@pytest.mark.parametrize(
    ("loss", "of_source", "is_broken"),
    [
        (9.1, 2.0, True),
        (8.9, 2.0, False),
        (9.9, 9.25, False),
        (float("nan"), 2.0, True),
    ],
)
def test_a_model_worse_than_guessing_is_broken_unless_its_source_is(loss, of_source, is_broken):
    held = HeldOut(loss, of_source, 7.0, 0.0)
    if not is_broken:
        held.refuse_broken(8192)
        return
    said = rf"held-out text is {loss:.2f}, that of its source 2.00, that of guessing 9.01: start"
    with pytest.raises(TwellError, match=said):
        held.refuse_broken(8192)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("falcon_h1", {}, "uses hidden_act outside of its FFNs"),
        ("qwen3_5_text", {}, "uses hidden_act outside of its FFNs"),
        ("falcon_h1", {"mlp_multipliers": [2.0, 1.0]}, "compute more than down"),
    ],
)
def test_what_a_fit_would_leave_out_is_refused(
    make_model, text_file, tmp_path, family, changes, why
):
    source, how = make_model(family, **changes), QUICK | {"data": [str(text_file)]}
    for fit in (lambda: plan(source, **how), lambda: convert(source, tmp_path / "out", **how)):
        with pytest.raises(TwellError, match=rf"ForCausalLM\) .*{why}.* cannot be fitted: take an"):
            fit()
    assert not list(tmp_path.glob("out*"))


def test_a_gpu_without_room_is_refused_with_what_has_room(
    make_model, text_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(plans, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(plans, "gpu_memory", lambda device: (24 << 30, 24 << 30))
    large = Shape(28, 1536, 8960, 46_797_824, 466_748_928, 151_936, state_bytes=4)
    fit = Fit(data=["x"])
    found = re.fullmatch(
        r"a fit on 2000000 tokens takes 35.\d GiB of this GPU's memory, 24.0 GiB are free: "
        r"give --tokens (\d+), or more GPUs",
        plans.no_room(large, fit),
    )
    assert plans.no_room(large, replace(fit, tokens=int(found[1]))) is None
    assert plans.no_room(large, fit, processes=2) is None
    seventy = Shape(80, 8192, 28672, 855_638_016, 2_101_346_304, 128_256)
    assert plans.no_room(seventy, fit).endswith(": take a larger one")
    few = plans._bytes_of(large, replace(fit, tokens=30_000), True)  # which are refused, too
    monkeypatch.setattr(plans, "gpu_memory", lambda device: (few, few))
    assert plans.no_room(large, fit).endswith(": take a larger one")
    monkeypatch.setattr(plans, "gpu_memory", lambda device: (1 << 20, 1 << 30))
    refused(make_model, text_file, tmp_path / "out", "0.0 GiB are free: take a larger one")
    assert not (tmp_path / "out.run").exists()
