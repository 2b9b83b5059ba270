"""What transformers' own generate writes."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel


def greedy(
    model: PreTrainedModel, prompt: list[int], count: int, ends: Iterable[int] = ()
) -> list[int]:
    """The likeliest tokens behind a prompt, up to and with one of `ends`, if any, else its own."""
    ids = torch.tensor([prompt], device=model.device)
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    how |= {"eos_token_id": [*ends]} if ends else {}
    return model.generate(ids, **how, max_new_tokens=count)[0, len(prompt) :].tolist()
