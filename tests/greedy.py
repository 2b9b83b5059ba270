"""What transformers' own generate writes."""

import torch
from transformers import PreTrainedModel


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, up to and with the end token."""
    ids = torch.tensor([prompt], device=model.device)
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **how, max_new_tokens=count)[0, len(prompt) :].tolist()
