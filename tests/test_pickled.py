"""A loaded export is pickled like any model: saved, copied, loaded in a process of its own."""

import copy
import pickle
import subprocess
import sys

import torch

from twellctl.bundle.twell_model import TwellFFN, twell_class
from twellctl.export import export

IDS = torch.arange(8)[None]


def test_a_loaded_export_is_pickled(relu_llama, tmp_path):
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
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "logits = model(torch.arange(8)[None]).logits\n"
        "assert torch.equal(logits, torch.load(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", elsewhere, tmp_path / "model.pt", tmp_path / "logits.pt"]
    assert subprocess.run(words).returncode == 0
