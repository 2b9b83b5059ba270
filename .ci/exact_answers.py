"""Whether `--exact` gives the original's answers, token for token. For developers, on a GPU.

    python .ci/exact_answers.py known ORIGINAL PROMPTS.jsonl KNOWN.json
    python .ci/exact_answers.py check ORIGINAL DRAFT PROMPTS.jsonl KNOWN.json

`known` lets the original answer with `--stable`, 16 prompts at a time: greedily, and the first ones
drawn at 0.8, too. `check`, which is another process, lets it answer with the draft: one prompt at a
time, and with four others beside. It exits with 1 if a token differs. DRAFT is a fit's folder, or
a draft head's.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import PreTrainedModel

from twellctl.decoding.engine import Sampling
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.scheduler import Scheduler
from twellctl.errors import TwellError
from twellctl.evaluation.subject import Subject
from twellctl.here.gpu_memory import free_unused
from twellctl.models.answerer import load_models, open_answerer
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import load_model, load_tokenizer
from twellctl.text.reading import read_prompts

TOGETHER, BESIDE = 16, 5
TEMPERATURES = {"greedy": 0.0, "drawn": 0.8}
app = typer.Typer(pretty_exceptions_enable=False)
Given = Annotated[Path, typer.Argument(exists=True)]
Tokens = Annotated[int, typer.Option(help="of each answer")]
Drawn = Annotated[int, typer.Option(help="prompts that are also answered at a temperature")]


@app.command()
def known(
    original: str,
    prompts: Given,
    out: Path,
    new_tokens: Tokens = 256,
    drawn: Drawn = 100,
    device: str = "cuda",
) -> None:
    """The original's answers, with `--stable`."""
    checkpoint = open_checkpoint(original)
    model = load_model(checkpoint, device=torch.device(device))
    engine = Engine.of(checkpoint, model, max_running=TOGETHER, stable=True)
    encoded = engine.encoded(prompts)
    numbers = {"greedy": len(encoded), "drawn": drawn}
    answers = {
        name: engine.answers(encoded[: numbers[name]], sampling(name, new_tokens))
        for name in TEMPERATURES
    }
    out.write_text(json.dumps({"new_tokens": new_tokens, "answers": answers}))


@app.command()
def check(original: str, draft: str, prompts: Given, known: Given, device: str = "cuda") -> None:
    """Whether exact answers are those of `known`."""
    answerer = open_answerer(draft, exact=True, original=original)
    model, drafting = load_models(answerer, torch.device(device))
    saved = json.loads(known.read_text())

    def num_differing(together: int) -> int:
        engine = Engine.of(answerer.answering, model, max_running=together, draft=drafting)
        encoded, differing = engine.encoded(prompts), 0
        for name, wanted in saved["answers"].items():
            how = sampling(name, saved["new_tokens"])
            found = engine.answers(encoded[: len(wanted)], how)
            differing += engine.say_differing(name, found, wanted)
        return differing

    differing = 0
    for together in (1, BESIDE):
        differing += num_differing(together)
        free_unused()
    sys.exit(differing > 0)


def sampling(name: str, new_tokens: int) -> Sampling:
    return Sampling(new_tokens, TEMPERATURES[name], seed=11)


class Engine(NamedTuple):
    """One that answers `together` prompts at once, and the tokens of the model's prompts."""

    subject: Subject
    scheduler: Scheduler
    together: int

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, model: PreTrainedModel, *, max_running: int, **how: Any
    ) -> "Engine":
        tokenizer = load_tokenizer(checkpoint)
        ends = [tokenizer.eos_token_id]
        scheduler = open_scheduler(model, ends, max_running=max_running, **how)
        return cls(Subject(checkpoint, tokenizer, model), scheduler, max_running)

    def encoded(self, prompts: Path) -> list[list[int]]:
        return [*filter(None, self.subject.all_encoded(read_prompts(prompts)))]

    def answers(self, prompts: list[list[int]], how: Sampling) -> list[list[int]]:
        """The token ids after each prompt; says how long that took."""
        answers: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        for events in self.scheduler.run(prompts, how):  # one that ends makes room for the next
            for sequence, token in events:
                answers[sequence.client].append(token.id)
        took, num = time.perf_counter() - began, sum(map(len, answers))
        what = f"{len(prompts)} prompts, {self.together} at a time, temperature"
        print(f"{what} {how.temperature}: {num} tokens, {num / took:.0f} a second", flush=True)
        return answers

    def say_differing(self, name: str, found: list[list[int]], wanted: list[list[int]]) -> int:
        differing = [i for i, ids in enumerate(wanted) if ids != found[i]]
        print(f"  {name}: {len(differing)} of {len(wanted)} differ {differing[:9]}", flush=True)
        print(f"  drafts so far: {self.scheduler.tally.drafted}", flush=True)
        return len(differing)


if __name__ == "__main__":
    try:
        app()
    except TwellError as error:
        sys.exit(f"error: {error}")
