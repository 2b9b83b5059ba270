"""README's picture: a model answers by itself, and the same text comes drafted, each with a clock.

    python .ci/picture.py record ORIGINAL DRAFT PROMPTS.jsonl OUT.json
    python .ci/picture.py draw OUT.json PICTURE.svg --kind edit

DRAFT is a fit's folder, or a draft head's. Rows of PROMPTS are as for `twellctl bench exact`, and
have a `kind`. `record` needs the GPU that it times, with `--device cpu` none, to try it. `draw`
needs matplotlib, for its colours.
"""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from side_by_side import Answer, drawn, same_tokens

from twellctl.bench.device import bench_device, device_facts
from twellctl.bench.exact import LEAST_TIMED
from twellctl.bench.exact_results import EXACT, FIT, ORIGINAL, STABLE
from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.scheduler import Scheduler
from twellctl.errors import TwellError, shown
from twellctl.evaluation.subject import Subject
from twellctl.files.strict_json import read_json
from twellctl.here.gpu_memory import free_unused
from twellctl.models.answerer import Answerer, load_models, open_answerer
from twellctl.models.loading import load_tokenizer
from twellctl.models.schemes import INT4
from twellctl.text.files import checked, read_rows
from twellctl.text.rows import row_prompt
from twellctl.text.tokens import Detokenizer, Messages

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def record(
    original: str,
    draft: str,
    prompts: Path,
    out: Path,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 200,
    device: Annotated[str | None, typer.Option(help="As of twellctl bench.")] = None,
    commit: Annotated[str | None, typer.Option(help="Where git does not know it.")] = None,
) -> None:
    """Let each engine answer the prompts, greedily, one at a time, and write what came when."""
    on = bench_device(device)
    answerer = open_answerer(draft, exact=True, original=original)
    checkpoint = answerer.checkpoint
    asked = _read(prompts)
    model, drafting = load_models(answerer, on)
    subject = Subject(checkpoint, load_tokenizer(checkpoint), model)
    encoded = [subject.encoded(messages) for _, messages in asked]
    engines = {
        STABLE: {"model": model, "stable": True},
        ORIGINAL: {"model": model},
        EXACT: {"model": model, "draft": drafting},
    }
    if answerer.head is None:
        engines[FIT] = {"model": drafting}  # the last: its decoder may expand it
    answers = {name: _answers(subject, how, encoded, tokens) for name, how in engines.items()}
    rows = []
    for number, (kind, messages) in enumerate(asked):
        forms = {name: of_all[number] for name, of_all in answers.items()}
        right = same_tokens(forms[EXACT], forms[STABLE]) is None
        row = {"kind": kind, "prompt": messages[-1]["content"], "exact_is_stable": right}
        rows.append(row | {"forms": forms})
        _say(rows[-1])
    facts = device_facts(on)
    found = {
        "device": facts["device"],
        "versions": facts["versions"],
        "commit": commit or _git_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "original": Path(answerer.answering.name).name,
        "draft": Path(answerer.named.name).name,
        "drafted": _drafted(answerer),
        "prompts": rows,
    }
    out.write_text(json.dumps(found) + "\n")


def _drafted(answerer: Answerer) -> str:
    """By what, in words."""
    if answerer.head is not None:
        return "drafted by its draft head"
    return f"drafted in {4 if answerer.checkpoint.scheme is INT4 else 16} bits"


def _read(prompts: Path) -> list[tuple[str, Messages]]:
    """The kind and the messages of each row."""
    found = []
    for where, row in read_rows(prompts, ""):
        messages = row_prompt(checked(row), where)
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise TwellError(f'{where} has no "kind", such as "edit"')
        found.append((row["kind"], messages))
    return found


def _answers(
    subject: Subject, how: dict[str, Any], prompts: list[list[int]], most: int
) -> list[Answer]:
    """What the engine of `how` (`open_scheduler`) answers. All is answered twice: by the second
    time CUDA graphs are captured, and the engine knows how many drafts pay."""
    free_unused()
    scheduler = open_scheduler(max_running=1, extra_eos=[subject.tokenizer.eos_token_id], **how)
    sampling = Sampling(most, temperature=0)
    for _ in range(2):
        answers = [_answer(scheduler, prompt, sampling, subject.tokenizer) for prompt in prompts]
    return answers


def _answer(scheduler: Scheduler, prompt: list[int], sampling: Sampling, tokenizer: Any) -> Answer:
    """Times are the host's, of when a token was known, from the first one on."""
    seen = []
    try:
        for events in filter(None, scheduler.run([prompt], sampling)):
            now = time.perf_counter()
            seen += [(now, token) for _, token in events]
    except EngineError as error:
        raise TwellError(str(error)) from error
    if len(seen) < LEAST_TIMED:
        said = shown(tokenizer.decode([token.id for _, token in seen]))
        raise TwellError(f"the answer {said} is too short to be timed: leave out its prompt")
    begin, end, text = seen[0][0], seen[-1][0], Detokenizer(tokenizer)
    tokens = [
        {
            "id": token.id,
            "text": text.add(token.id),
            "ms": round(1000 * (now - begin), 3),
            "draft": token.draft.drafter if token.draft and token.draft.kept else None,
        }
        for now, token in seen
    ]
    tokens[-1]["text"] += text.rest()
    num_timed = sum(now > begin for now, _ in seen)
    return {"tokens_per_second": num_timed / (end - begin), "tokens": tokens}


def _say(row: dict[str, Any]) -> None:
    forms = row["forms"]
    rates = (f"{name} {of['tokens_per_second']:,.0f}" for name, of in forms.items())
    right = "exact is stable" if row["exact_is_stable"] else "exact is NOT stable"
    differs = same_tokens(forms[EXACT], forms[ORIGINAL])
    alike = "the original too" if differs is None else f"the original differs from {differs} on"
    print(f"{row['kind']}: tokens/s: {', '.join(rates)}; {right}, {alike}")


def _git_commit() -> str | None:
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    return asked.stdout.strip() or None


@app.command()
def draw(
    recorded: Path,
    picture: Path,
    kind: Annotated[str, typer.Option(help="Of the prompt.")] = "edit",
) -> None:
    """Draw the answer of middling gain at the moment when `--exact` is through, as SVG."""
    found = read_json(recorded, "record it again")
    picture.write_text(drawn(found, kind), encoding="utf-8")


def main() -> None:
    try:
        app()
    except TwellError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
