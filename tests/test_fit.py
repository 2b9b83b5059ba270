"""convert --data: fitted models against stock transformers."""

import dataclasses
import functools
import json
import re
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from edits import weights_in
from fits import FAMILIES, QUICK
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from twellctl.bundle.twell_model import gated_ffns
from twellctl.convert import convert
from twellctl.errors import UsageError
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.firing.profiled import save_profile
from twellctl.fitting import plan as plans
from twellctl.fitting.folder import prepare_fit, windows_of
from twellctl.fitting.settings import Fit
from twellctl.fitting.thresholds import MOST_RISE
from twellctl.fitting.walk import Walk
from twellctl.generate import generate
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.linear_map import num_mapped
from twellctl.models.loading import quiet_transformers
from twellctl.profile import profile
from twellctl.screens import make as screen

pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.fixture(scope="module")
def fitted(make_model, text_file, tmp_path_factory):
    """`fitted(family, **settings)`: (source, folder, what `convert` returned); read only.

    `family`: one of `FAMILIES` with its changes; a plain Llama if none is given.
    """

    @functools.cache
    def fit(family=None, **settings):
        source = make_model(family, **FAMILIES[family]) if family else make_model("llama")
        out = tmp_path_factory.mktemp("fitted") / "out"
        done = convert(source, out, data=[str(text_file)], **QUICK | settings)
        return source, out, done

    return fit


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_computes_what_was_measured(fitted, text_file, family):
    source, out, done = fitted(family)
    config = AutoConfig.from_pretrained(out)
    model, first = (AutoModelForCausalLM.from_pretrained(p) for p in (out, source))
    assert config.intermediate_size == 96 + done.fitted.map_neurons
    assert config.twell["map_neurons"] == done.fitted.map_neurons == 16
    fires = []
    for ffn in gated_ffns(model):
        act = ffn.act_fn if hasattr(ffn, "act_fn") else ffn.activation_fn
        assert type(act).__name__ == "ReLUActivation" or isinstance(act, torch.nn.ReLU)
        act.register_forward_hook(lambda m, a, y: fires.append(y > 0))
    ids = _held_out(source, text_file)
    with torch.no_grad(), quiet_transformers():
        ours = model(ids).logits[:, :-1].log_softmax(-1)
        theirs = first(ids).logits[:, :-1].log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert float(kl) == pytest.approx(done.fitted.held_out.kl, rel=2e-3)
    for layer, fired in zip(done.fitted.layers, fires, strict=True):
        assert fired[..., 96:].float().mean() > 0.5  # random inputs are nearly centred
        assert torch.equal(fired[..., 96], fired[..., -1])  # one gate row
        assert float(fired[..., :96].float().mean()) == pytest.approx(layer.fires, abs=0.06)
        assert layer.error < layer.error_swapped
    fires.clear()
    prompt = AutoTokenizer.from_pretrained(out)("x = [1, 2]\n", return_tensors="pt")
    with torch.no_grad(), quiet_transformers():
        model(**prompt)
    own = torch.stack([fired.flatten(0, -2)[-1, :96] for fired in fires]).float().mean()
    answer = generate(out, "x = [1, 2]\n", max_tokens=1, chat=False)
    list(answer)
    assert answer.figures.density == pytest.approx(float(own), rel=1e-4)  # of its own neurons, too


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_fit_of_bf16_weights_holds_states_in_bf16(
    make_model, text_file, tmp_path, monkeypatch, family
):
    """As near as stock transformers computes from the same weights in float32."""
    how = {"initializer_range": 0.2} | (FAMILIES["gemma2"] if family == "gemma2" else {})
    source, out = tmp_path / "bf16", tmp_path / "out"
    with quiet_transformers():
        wide = AutoModelForCausalLM.from_pretrained(folder := make_model(family, **how))
        wide.bfloat16().save_pretrained(source)
        AutoTokenizer.from_pretrained(folder).save_pretrained(source)
    dtypes, measure = set(), Walk.held_out

    def seen(walk):
        dtypes.update((walk.states.original.dtype, walk.states.changed.dtype))
        return measure(walk)

    monkeypatch.setattr(Walk, "held_out", seen)
    held = convert(source, out, data=[str(text_file)], **QUICK).fitted.held_out
    assert dtypes == {torch.bfloat16}
    ids = _held_out(source, text_file)
    with torch.no_grad(), quiet_transformers():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits[:, :-1]
            for p in (out, source)
        )
    ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    assert kl > 1e-4
    assert held.kl == pytest.approx(kl, rel=0.1)


def _held_out(source, text_file):
    """The windows that `convert` holds out, read as it reads them."""
    with tempfile.TemporaryDirectory() as folder:
        fit = Fit(data=[str(text_file)], **QUICK)
        prepare_fit(run := Path(folder, "run"), open_checkpoint(source), fit, overwrite=False)
        fitted, held_out = windows_of(run, fit)
    assert (len(fitted), len(held_out)) == (64, 8)
    assert not {*map(tuple, fitted.tolist())} & {*map(tuple, held_out.tolist())}
    return held_out


def test_a_full_disk_ends_a_fit_in_one_line(started, silu_llama, text_file, tmp_path):
    """Not even the first layer fits there: a limit of the process that writes it."""
    code = (
        "import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2); os.chdir({str(tmp_path)!r})"
    )
    words = ["convert", silu_llama, "out", "--data", text_file, "--tokens=2048", "--seq-len=32"]
    process = started(*words, "--steps=0", "--quiet", code=code)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(r"error: out\.run could not be written: .*too large.*\n", err)
    assert not (tmp_path / "out").exists()


def test_a_density_is_met_as_a_mean_over_layers(make_model, text_file, tmp_path, capsys):
    shifted = make_model("llama")
    with weights_in(shifted) as tensors:  # as in trained models, what an FFN reads is not centred
        for name, weight in tensors.items():
            if "embed" in name:
                weight[:, :4] = 2.0
            elif "o_proj" in name or "down_proj" in name:
                weight[:4] = 0.0
    how = QUICK | {"tokens": 8192, "steps": 0, "density": 0.1}
    done = convert(shifted, tmp_path / "out", data=[str(text_file)], **how)
    assert done.fitted.density == pytest.approx(0.1, rel=0.1)
    capsys.readouterr()
    screen.converted(done, "silu")
    assert "density was not met" not in capsys.readouterr().err
    missed = dataclasses.replace(done, fitted=dataclasses.replace(done.fitted, wanted=0.08))
    screen.converted(missed, "silu")
    assert "the target of 8.00% density was not met: fit on more" in capsys.readouterr().err


def test_a_density_above_what_relu_lets_through_moves_all_gates_up_alike(fitted):
    source, out, done = fitted(density=0.9)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    name = "model.layers.0.mlp.gate_proj.weight"
    moved = after[name][:96] - before[name]
    torch.testing.assert_close(moved, MOST_RISE * after[name][96:97].expand(96, -1))
    assert 0.5 < done.fitted.density < 0.7


def test_two_runs_and_one_that_was_killed_give_the_same_bits(
    fitted, make_model, text_file, tmp_path, capsys, monkeypatch
):
    _, out, _ = fitted(steps=5, step_tokens=64)
    source = make_model("llama")

    class Killed(BaseException):
        pass

    said = []

    def stop_at_the_second(*how_far):
        said.append(how_far)
        if len(said) == 2:
            raise Killed

    how = QUICK | {"data": (str(text_file),), "steps": 5, "step_tokens": 64}  # as flags come
    with pytest.raises(Killed):
        convert(source, tmp_path / "out", progress=stop_at_the_second, **how)
    (*first, left), (done, *_) = said
    assert (first, done) == ([0, 2, 0.0], 1)  # on a CPU with a guess before the first layer
    assert 0 < left < 60
    monkeypatch.setattr(screen.ui, "doing", said.append)
    screen.fitting(0, 2, 0.0, 300.0)
    assert said[-1] == "fitting the first layer of 2, by a guess 5 min 00 s left"
    assert (tmp_path / "out.run" / "layer-000.safetensors").is_file()
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        UsageError, match=r"out\.run was made with other settings .*\(steps\): give"
    ):
        convert(source, tmp_path / "out", **how | {"steps": 6})
    doing = []
    done = convert(source, tmp_path / "out", doing=doing.append, **how)
    screen.converted(done, "silu")
    assert " s, 1 layer kept from before\n" in capsys.readouterr().out
    assert f"going on with the layers in {tmp_path / 'out.run'}" in doing
    made = tmp_path / "out/model.safetensors"
    assert made.read_bytes() == (out / "model.safetensors").read_bytes()
    assert not (tmp_path / "out.run").exists()


@pytest.mark.parametrize("more", [{}, {"bits": 4, "group_size": 16}], ids=str)
def test_two_processes_fit_as_one_does(started, fitted, text_file, tmp_path, more):
    """As torchrun starts them; the second leaves what is to be said to the first."""
    source, _, alone = fitted(**more)
    words = ["convert", str(source), str(tmp_path / "out"), f"--data={text_file}"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in (QUICK | more).items()]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        launched = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    launched |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    both = [started(*words, **launched | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    assert [process.wait() for process in both] == [0, 0], both[0].stderr.read()
    assert "KL to the source" in both[0].stdout.read()
    assert both[1].stdout.read() == both[1].stderr.read() == ""
    report = json.loads((tmp_path / "out/twell_fit.json").read_text())
    assert report["held_out"]["kl"] == pytest.approx(alone.fitted.held_out.kl, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_plan_counts_attention_with_the_layers(make_model, family):
    source = make_model(family)
    shape = plans.shape_of(open_checkpoint(source))
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(source)
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    assert shape.num_weights == layer
    assert shape.other_weights == sum(w.numel() for w in model.parameters()) - 2 * layer


def test_the_report_names_no_path(fitted, text_file):
    _, out, done = fitted()
    report = json.loads((out / "twell_fit.json").read_text())
    assert report["held_out"]["kl"] == done.fitted.held_out.kl
    assert report["settings"]["density"] == done.fitted.wanted == 1.0
    assert "wanted" not in report
    card = " ".join((out / "README.md").read_text().split())
    assert "fitted to its source layer by layer. Each FFN has 16 extra neurons" in card
    assert str(text_file.parent) not in (out / "twell_fit.json").read_text()


def test_a_fit_far_from_its_source_is_said_to_be(fitted, capsys):
    _, _, done = fitted()
    screen.converted(done, "silu")
    assert "is far from the source" not in capsys.readouterr().err
    away = dataclasses.replace(done.fitted.held_out, kl=1.5)
    done = dataclasses.replace(done, fitted=dataclasses.replace(done.fitted, held_out=away))
    screen.converted(done, "silu")
    said = "KL 1.50 is far from the source: few answers will be right. Fit on more text, or ask for"
    assert said in capsys.readouterr().err


def interrupt(*_):
    raise KeyboardInterrupt


def end(*_):
    signal.raise_signal(signal.SIGTERM)


def test_the_command_says_what_came_of_it(cli, make_model, text_file, tmp_path, monkeypatch):
    source, out = make_model("llama"), tmp_path / "out"
    words = ["--data", text_file, "--tokens", 2048, "--seq-len", 32, "--eval-windows", 8]
    words += ["--steps", 4, "--step-tokens", 64]
    code, said, _ = cli("convert", source, out, *words[2:], "--dry-run")  # no text is needed
    assert code == 0
    assert "2048 tokens, 2 layers of 32 x 96 and a map of rank 16" in said
    assert not out.exists()
    kept = f"{out}.run keeps the layers that were fitted: repeat the command to continue"
    with monkeypatch.context() as patch:  # before any layer is there
        patch.setattr("twellctl.fitting.run.load_model", lambda *_, **how: interrupt())
        for more in ((), ("--ridge", 0.1)):
            status, _, err = cli("convert", source, out, *words, *more)
            assert (status, err[-1]) == (130, "error: interrupted")
            assert kept not in err
    for stop, code, said in ((interrupt, 130, [kept, "error: interrupted"]), (end, 143, [kept])):
        with monkeypatch.context() as patch:
            patch.setattr(screen, "fitting", lambda done, *far, stop=stop: done and stop(*far))
            anew = cli("convert", source, out, *words, "--overwrite")
            status, _, err = cli("convert", source, out, *words)
        assert (status, err[-len(said) :]) == (code, said)
        assert kept not in anew[2]
    code, said, _ = cli("convert", source, out, *words)
    assert code == 0
    assert "of the neurons fire for a token" in said
    assert said.splitlines()[-1] == f"next: twellctl compare {source} {out}"
    own, prompts = tmp_path / "own.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is a list?"}\n')
    code, said, _ = cli("write", out, own, "--prompts", prompts, "--max-tokens", 4)
    assert (code, said.splitlines()[-1]) == (0, f"next: twellctl profile {out} --data {own}")
    code, said, err = cli("convert", source, tmp_path / "plain")
    assert code == 0
    assert any("talks noise until it is fitted" in line for line in err)


def test_fine_tuning_goes_on_from_a_fit(fitted, text_file, tmp_path):
    """Engines still find the first layer's map; the second's is none, as by another trainer."""
    source, made, done = fitted()
    out = shutil.copytree(made, tmp_path / "out")
    with weights_in(out) as before:
        before["model.layers.1.mlp.gate_proj.weight"][-1] *= 1.01
    settings = {"data": [str(text_file)], "seq_len": 32, "max_steps": 6, "batch_size": 2}
    settings |= {"compile": False, "eval_steps": 0, "save_steps": 0, "density": 0.2}
    with pytest.raises(UsageError, match="--teacher"):
        finetune(out, tmp_path / "tuned", **settings)
    with pytest.raises(UsageError, match="map"):
        finetune(out, tmp_path / "tuned", teacher=str(source), penalty="l1", **settings)
    tuned = finetune(out, tmp_path / "tuned", teacher=str(source), **settings)
    assert tuned.first_cross_entropy == pytest.approx(done.fitted.held_out.cross_entropy, abs=0.5)
    assert tuned.density < 0.7  # the map, which always fires, would add to it
    config = json.loads((tmp_path / "tuned/config.json").read_text())
    assert config["twell"]["map_neurons"] == 16
    after = load_file(tmp_path / "tuned/model.safetensors")
    for layer, mapped in enumerate((16, 0)):
        name = f"model.layers.{layer}.mlp.gate_proj.weight"
        assert after[name].shape == (112, 32)
        assert num_mapped(after[name]) == mapped
        assert not torch.equal(after[name][-1], before[name][-1])


def test_an_export_computes_what_the_folder_does_and_counts_no_map(
    fitted, load_trusted, text_file, tmp_path
):
    _, out, done = fitted()
    found = profile(out, str(text_file), windows=16, seq_len=32)
    assert found.intermediate_size == 96
    fires = [layer.fires for layer in done.fitted.layers]
    assert [layer.density for layer in found.layers] == pytest.approx(fires, abs=0.05)
    save_profile(found, tmp_path / "profile.json")
    notes = []
    export(out, tmp_path / "exported", profile=tmp_path / "profile.json", note=notes.append)
    assert not [note for note in notes if "share one gate" in note]
    ids = torch.randint(0, 512, (2, 17))
    with torch.no_grad(), quiet_transformers():
        ours = load_trusted(tmp_path / "exported")(ids).logits
        stock = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "gate_proj.weight"), ("llama", "gate_proj.bias"), ("phi3", "gate_up_proj.weight")],
)
def test_an_export_says_if_a_map_is_lost(fitted, tmp_path, family, name):
    _, made, _ = fitted(family)
    out = shutil.copytree(made, tmp_path / "out")
    with weights_in(out) as tensors:
        tensors[f"model.layers.1.mlp.{name}"][96] += 0.01
    notes = []
    export(out, tmp_path / "exported", note=notes.append)
    (said,) = [note for note in notes if "share one gate" in note]
    assert said.startswith("beware: the last 16 neurons no longer share one gate in 1 of 2 layers")
