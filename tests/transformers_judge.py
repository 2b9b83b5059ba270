"""What transformers says of the tokens that another engine wrote."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def logprobs(folder: Path, rows: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each row of tokens but the first, by transformers with the export's own code."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    found = []
    for row in rows:
        tokens = torch.tensor([row])
        told = model(tokens[:, :-1]).logits.float().log_softmax(-1)
        found.append(told.gather(-1, tokens[:, 1:, None]).flatten())
    return found


def assert_as_transformers(folder: Path, rows: list[dict]) -> None:
    """vLLM's log-probabilities err as much as those of transformers in bf16 do, and no more."""
    tokens = [row["tokens"] for row in rows]
    wanted = torch.cat(logprobs(folder, tokens, torch.float32))
    theirs = (torch.cat(logprobs(folder, tokens, torch.bfloat16)) - wanted).abs()
    ours = (torch.tensor([told for row in rows for told in row["logprobs"]]) - wanted).abs()
    print(
        f"{len(ours)} tokens: mean {ours.mean():.5f} for {theirs.mean():.5f}, "
        f"most {ours.max():.4f} for {theirs.max():.4f}"
    )
    assert 0 < theirs.mean() < 0.05  # so that it says something
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.max() < 3 * theirs.max()
