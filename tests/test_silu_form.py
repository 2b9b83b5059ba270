"""A ReLU model written as SiLU: which powers of two, and who computes what of them."""

import shutil
from pathlib import Path

import pytest
import torch
from edits import json_in, weights_in
from transformers import AutoModelForCausalLM

from twellctl.bundle.twell_config import check_twell, new_twell
from twellctl.bundle.twell_model import gate_and_up, gated_ffns
from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.finetune import finetune
from twellctl.firing.profiled import LayerProfile
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import fingerprint, load_model
from twellctl.models.silu_form import choose_form, factors, scaled
from twellctl.profile import profile

IDS = (torch.arange(34).view(2, 17) * 37) % 512
MIXED = {"activation": "relu", "sharpness": [256, [1, 256] * 48], "down_share": [16, 4]}


def plain(folder: Path, **how) -> torch.Tensor:
    model = load_model(open_checkpoint(folder), device=torch.device("cpu"), **how)
    return model(IDS).logits


def layer(**changes: float) -> LayerProfile:
    """20 of its 1000 neurons fire."""
    fields = {
        "nnz_mean": 20.0,
        "nnz_p10": 10,
        "nnz_p50": 20,
        "nnz_p90": 40,
        "nnz_p99": 60,
        "nnz_max": 80,
        "density": 0.02,
        "dead": 20,
        "slots": 32,
        "overflow": 0.0005,
        "largest_gate": 0.0,
        "largest_hidden": 0.0,
    }
    return LayerProfile(**fields | changes)


@pytest.mark.parametrize(
    ("gate", "hidden", "sharpness", "share"),
    [
        (0.0, 0.0, 64, 8),
        (511.0, 4000.0, 64, 8),
        (513.0, 4000.0, 32, 4),
        (513.0, 8200.0, 16, 2),
        (5.0, 4100.0, 32, 4),
        (5.0, 8200.0, 16, 2),
        (1e5, 1e5, 16, 1),
    ],
)
def test_the_power_is_the_largest_that_leaves_room_in_fp16(gate, hidden, sharpness, share):
    layers = [layer(largest_gate=gate, largest_hidden=hidden), layer()]
    form, most = choose_form(layers, 2)
    assert form["sharpness"] == [sharpness, 64]
    assert form["down_share"] == [share, 8]
    assert most == max(sharpness * gate, share * hidden)
    assert check_twell(new_twell(2, None, "silu") | form, 2)
    assert choose_form([], 2, form) == (form, 0.0)  # what was chosen stays, without a profile


@torch.no_grad()
def test_a_model_made_to_overflow_gets_a_smaller_power(make_model, text_file, tmp_path):
    relu, out, said = tmp_path / "relu", tmp_path / "out", []
    convert(make_model("llama", dtype=torch.bfloat16), relu)
    with weights_in(relu) as tensors:
        for name in tensors:
            if "gate_proj" in name:
                tensors[name] *= 256
            if "up_proj" in name:
                tensors[name] /= 256
    found = profile(relu, str(text_file), windows=4, seq_len=64)
    assert all(one.largest_gate * 64 > 65504 for one in found.layers)
    export(relu, tmp_path / "blind")
    done = export(relu, out, profile=found, note=said.append)
    assert 16 <= done.sharpness < 64
    assert not any("run it in bf16" in words for words in said)
    blind, seen = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)(IDS).logits
        for folder in (tmp_path / "blind", out)
    )
    assert not blind.isfinite().all()
    wanted = plain(relu)
    assert (seen - wanted).norm() < 0.02 * wanted.norm()
    assert profile(out, str(text_file), windows=4, seq_len=64).layers == found.layers


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_some_neurons_may_stay_silu(make_model, load_trusted, text_file, tmp_path, family):
    """Biases and fused gates go along; of the SiLU neurons every door computes SiLU."""
    biased = {"mlp_bias": True} if family == "llama" else {}
    silu, out = make_model(family, **biased), tmp_path / "out"
    convert(silu, tmp_path / "relu")
    export(tmp_path / "relu", out)
    shutil.copyfile(tmp_path / "relu/model.safetensors", out / "model.safetensors")
    with weights_in(out) as tensors:
        by = factors(tensors, MIXED, 96)
        tensors |= {name: scaled(tensors[name], by[name]) for name in by}
    with json_in(out / "config.json") as config:
        config |= {"hidden_act": "silu", "twell": config["twell"] | MIXED}
    wanted = plain(out)
    stock = AutoModelForCausalLM.from_pretrained(out)(IDS).logits
    assert (stock - wanted).norm() <= 5e-3 * wanted.norm()
    trusted = load_trusted(out)
    torch.testing.assert_close(trusted(IDS).logits, wanted, rtol=0, atol=1e-4)
    relu = plain(tmp_path / "relu")
    assert (relu - wanted).norm() > 5e-2 * wanted.norm()
    assert fingerprint(open_checkpoint(out)) == fingerprint(open_checkpoint(tmp_path / "relu"))
    of_all = plain(out, activation="silu")
    stock = AutoModelForCausalLM.from_pretrained(silu)(IDS).logits
    torch.testing.assert_close(of_all, stock, rtol=0, atol=1e-4)
    export(out, tmp_path / "again")  # its SiLU neurons stay what they are
    assert torch.equal(plain(tmp_path / "again"), wanted)
    trusted.save_pretrained(tmp_path / "saved")
    assert torch.equal(plain(tmp_path / "saved"), wanted)
    with pytest.raises(TwellError, match="has neurons that stay SiLU, which no recipe trains"):
        finetune(out, tmp_path / "trained", "quickstart", data=[str(text_file)])


@torch.no_grad()
def test_neurons_that_always_fire_are_exact(relu_llama, tmp_path):
    """A map's gates are about 1 for every token: there SiLU is the gate itself."""
    gate = torch.linspace(0.8, 1.2, 64).bfloat16()
    assert torch.equal(torch.nn.functional.silu(gate * 64) / 64, gate)
    export(relu_llama, tmp_path / "out")
    ffn = gated_ffns(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))[0]
    was = gated_ffns(AutoModelForCausalLM.from_pretrained(relu_llama))[0]
    ratios = [
        float((new.weight / old.weight).mean())
        for new, old in zip(
            (*gate_and_up(ffn), ffn.down_proj), (*gate_and_up(was), was.down_proj), strict=True
        )
    ]
    assert ratios == [64, 1 / 8, 1 / 8]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "gelu"}, "must have activation relu, got 'gelu'"),
        ({"sharpness": [256]}, "must hold 2 sharpness, one a layer"),
        ({"sharpness": [256, 8]}, "sharpness that are powers of two, got 8"),
        ({"sharpness": [256, [1, 48]]}, "sharpness that are powers of two, got 48"),
        ({"down_share": [4, [4]]}, r"down_share that are powers of two, got \[4\]"),
        ({"down_share": [4, True]}, "down_share that are powers of two, got True"),
        ({"sharpness": [256, [1, 256]]}, "sharpness is not that of its hidden_act 'silu' or of"),
        ({"hidden_act": "relu"}, "sharpness is not that of its hidden_act 'relu' or of"),
    ],
)
def test_forms_that_are_not_sound_are_refused(exported, changes, said):
    with json_in(exported / "config.json") as config:
        config["hidden_act"] = changes.pop("hidden_act", "silu")
        config["twell"] |= changes
    with pytest.raises(TwellError, match=said):
        open_checkpoint(exported)


@torch.no_grad()
def test_a_family_of_gelu_keeps_it(make_model, tmp_path):
    convert(make_model("llama", hidden_act="gelu_pytorch_tanh"), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    stock, wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), plain(tmp_path / "relu")
    assert stock.config.hidden_act == "gelu_pytorch_tanh"
    assert (stock(IDS).logits - wanted).norm() <= 5e-3 * wanted.norm()
    assert torch.equal(plain(tmp_path / "out"), wanted)
