"""Whether vLLM is there, what it is asked, and what transformers says of its tokens."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

FAMILIES = {  # that the plugin has classes for
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}
PROMPTS = [[(7 * i * i + 3 * j) % 512 for j in range(5 + 9 * i)] for i in range(8)]
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: tests/vllm_plugin/environment.sh DIR makes an environment",
)


def assert_as_transformers(folder: Path, rows: list[dict], *, noise: float = 0.05) -> None:
    """Log-probabilities of `rows` err as those of transformers in bf16 do, and no more.

    A row is {"tokens": [id], "logprobs": those of its last tokens}. `noise`: the most that these
    may err on average; in FP8 roundings of inputs flip.
    """
    wanted = _logprobs(folder, rows, torch.float32)
    theirs = (_logprobs(folder, rows, torch.bfloat16) - wanted).abs()
    ours = (torch.tensor([logprob for row in rows for logprob in row["logprobs"]]) - wanted).abs()
    print(
        f"{len(ours)} tokens: mean {ours.mean():.5f} for {theirs.mean():.5f}, "
        f"most {ours.max():.4f} for {theirs.max():.4f}"
    )
    assert 0 < theirs.mean() < noise  # so that it says something
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.max() < 3 * theirs.max()


@torch.no_grad()
def _logprobs(folder: Path, rows: list[dict], dtype: torch.dtype) -> Tensor:
    """Of the same tokens, by transformers with the export's own code."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    found = []
    for row in rows:
        tokens = torch.tensor([row["tokens"]])
        log_p = model(tokens[:, :-1]).logits.float().log_softmax(-1)
        found.append(log_p.gather(-1, tokens[:, 1:, None]).flatten()[-len(row["logprobs"]) :])
    return torch.cat(found)
