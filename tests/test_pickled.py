"""A loaded export goes through pickle, copies and torch.save, into another process too."""

import copy
import pickle

import torch

from twellctl.bundle.twell_model import TwellFFN, twell_class
from twellctl.export import export

IDS = (torch.arange(34).view(2, 17) * 37) % 512


def test_a_loaded_export_is_pickled(started, relu_llama, tmp_path):
    export(relu_llama, tmp_path / "export")
    model = twell_class("LlamaForCausalLM").from_pretrained(tmp_path / "export")
    with torch.no_grad():
        logits = model(IDS).logits
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for again in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            ffn = again.model.layers[0].mlp
            assert type(again) is type(model)
            assert type(ffn) is type(model.model.layers[0].mlp)
            assert isinstance(ffn, TwellFFN)
            assert torch.equal(again(IDS).logits, logits)
    torch.save(logits, tmp_path / "logits.pt")
    elsewhere = (
        "import torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "logits = model((torch.arange(34).view(2, 17) * 37) % 512).logits\n"
        f"assert torch.equal(logits, torch.load({str(tmp_path / 'logits.pt')!r}))\n"
    )
    process = started("--version", code=elsewhere)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
