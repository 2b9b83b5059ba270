"""Tiny random models in memory, what transformers' generate says of them; when rounds are read."""

import pytest
import torch
from conftest import TINY
from greedy import greedy
from scheduled import MODES
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding.batch import Batch

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 40},
    "qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "phi3": {"sliding_window": 30},
    "smollm3": {},
    "gemma2": {"head_dim": 8, "sliding_window": 30, "hidden_activation": "relu"},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
}


@pytest.fixture(scope="session")
def tiny():
    """`tiny(family)`: a ReLU model in float32 that no token ends."""

    def make(family: str = "llama", **changes):
        settings = TINY | {"eos_token_id": None, "pad_token_id": 0, "hidden_act": "relu"}
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **settings | FAMILIES.get(family, {}) | changes)
        return AutoModelForCausalLM.from_config(config).eval()

    return make


@pytest.fixture(scope="session")
def generated():
    """`generated(model, prompt, count)`: the greedy tokens of transformers' generate."""
    return greedy


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Shorter and longer than a page, just one page, and a few tokens from the end of the second;
    12 tokens more bring the first past the windows of all families."""
    torch.manual_seed(1)
    return [torch.randint(1, 512, (length,)).tolist() for length in (29, 70, 125, 1, 64)]


@pytest.fixture(params=[False, True], ids=["at once", "a round late"])
def reads_late(request, monkeypatch) -> None:
    """Rounds are read before or after the next one is launched, as on a CPU and on a GPU."""
    made = Batch.__init__

    def make(self, *arguments, **how):
        made(self, *arguments, **how)
        self.reads_late = request.param

    monkeypatch.setattr(Batch, "__init__", make)


@pytest.fixture(params=[False, True], ids=["alone", "drafted for"])
def both_modes(request, monkeypatch) -> None:
    """What `scheduler_of` makes has no drafts, and has some."""
    monkeypatch.setitem(MODES, "is_drafted", request.param)
