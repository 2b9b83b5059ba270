"""Tiny models for which there can be draft heads."""

from pathlib import Path

import pytest
import torch
from edits import weights_in

from twellctl.heads.original import Original
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

FAMILIES = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}


@pytest.fixture(scope="session", params=FAMILIES)
def model_folder(request, make_model) -> Path:
    """A model whose norms are not all ones; read only."""
    folder = make_model(request.param, **FAMILIES[request.param])
    with weights_in(folder) as tensors:
        torch.manual_seed(1)
        for name in tensors:
            if "norm" in name:
                tensors[name] = 1 + 0.3 * torch.randn_like(tensors[name])
    return folder


@pytest.fixture(scope="session")
def open_original():
    """`open_original(folder, seq_len, dtype)`: the model as its draft head reads it."""

    def make(folder: Path, seq_len: int, dtype: torch.dtype = torch.float32) -> Original:
        return Original(load_model(open_checkpoint(folder), dtype=dtype), seq_len)

    return make
