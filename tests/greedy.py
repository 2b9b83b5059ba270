"""What transformers' own generate writes, and what an engine does."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from twellctl.decoding.engine import Sampling
from twellctl.decoding.scheduler import Scheduler


def greedy(
    model: PreTrainedModel, prompt: list[int], count: int, ends: Iterable[int] = ()
) -> list[int]:
    """The likeliest tokens behind a prompt, up to and with one of `ends`, if any, else its own."""
    ids = torch.tensor([prompt], device=model.device)
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    how |= {"eos_token_id": [*ends]} if ends else {}
    return model.generate(ids, **how, max_new_tokens=count)[0, len(prompt) :].tolist()


def run_all(scheduler: Scheduler, prompts: list[list[int]], how: Sampling) -> tuple[list, list]:
    """What an engine writes behind each prompt, and its tokens in their order; no page stays."""
    ids, tokens = [[] for _ in prompts], []
    for events in scheduler.run(prompts, how):
        for sequence, token in events:
            ids[sequence.client].append(token.id)
            tokens.append(token)
    assert scheduler.admission.pool.free == scheduler.admission.pool.capacity
    return ids, tokens


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """That each of `tokens` behind a prompt is the likeliest by `model`, or nearly so."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    behind = logits.max(1).values - chosen
    assert behind.max() < 0.05 * logits.std(), (tokens, behind)
