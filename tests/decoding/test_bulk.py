"""Many prompts at once: each is continued as transformers' own generate continues it alone."""

import random

import pytest
import torch

from twellctl.decoding.bulk import answers
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3")


@pytest.fixture
def opened(make_model):
    """`opened(family, **config)`: a random model, and its greedy answers by transformers."""

    def opened(family: str = "llama", **changes):
        model = load_model(open_checkpoint(make_model(family, **changes)))

        def greedy(prompt: list[int], most: int) -> list[int]:
            ids = torch.tensor([prompt])
            how = {"do_sample": False, "max_new_tokens": most, "pad_token_id": 0}
            return model.generate(ids, **how)[0, len(prompt) :].tolist()

        return model, greedy

    return opened


def ragged(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 512) for _ in range(draw.randint(1, 90))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(opened, tokenizer, family):
    model, greedy = opened(family)
    prompts = ragged(11)
    known = [greedy(prompt, 30) for prompt in prompts]
    made = dict(answers(model, tokenizer, prompts, max_new_tokens=30, rows=4))
    assert [made[i] for i in range(len(prompts))] == known
